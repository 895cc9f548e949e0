"""Messages as frozen dataclasses: encoded with the contract's version; decoding forgives fields, never the version."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from decimal import Decimal
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, Union

CONTRACT_VERSION = 1

SCALARS = frozenset({str, int, float, bool, type(None)})

T = TypeVar("T")


class ContractError(ValueError):
    """A message that does not keep the contract; the text names the message, the field and what was expected."""


class UnknownVersion(ContractError):
    """A message of a contract version that this reader does not know."""


def encode(message: Any) -> dict[str, Any]:
    """Return the message as JSON-ready data with the contract's version first; fields that are None are left out."""
    return {"contract": CONTRACT_VERSION, **plain(message)}


def decode(kind: type[T], data: Mapping[str, Any]) -> T:
    """Return the message held in `data`. Raises UnknownVersion or ContractError."""
    if not isinstance(data, Mapping):
        raise ContractError(f"{kind.__name__} must be an object, not {type(data).__name__}")
    version = data.get("contract")
    if version != CONTRACT_VERSION:
        raise UnknownVersion(
            f"{kind.__name__} has contract version {version!r}; this reader knows {CONTRACT_VERSION}; "
            "use an image and a supervisor of the same release"
        )
    return build(kind, data)


def canonical_json(data: Mapping[str, Any]) -> bytes:
    """Return one byte string for equal data: sorted keys, no spaces, UTF-8, no NaN."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def plain(value: Any) -> Any:
    """Return the value as JSON-ready data, without a version; fields that are None are left out."""
    if type(value) in SCALARS:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {name: plain(item) for name, item in fields if item is not None}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def build(kind: type[T], data: Mapping[str, Any]) -> T:
    """Return the dataclass held in plain data; unknown fields are ignored. Raises ContractError."""
    if not isinstance(data, Mapping):
        raise ContractError(f"{kind.__name__} must be an object, not {type(data).__name__}")
    hints = _hints(kind)  # type: ignore[arg-type]
    values = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if data.get(field.name) is not None:
            values[field.name] = _value(hints[field.name], data[field.name], f"{kind.__name__}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ContractError(f"{kind.__name__} lacks the field {field.name!r}")
    return kind(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return _value(next(arm for arm in typing.get_args(hint) if arm is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ContractError(f"{where} must be a list, not {value!r}")
        return tuple(_value(typing.get_args(hint)[0], item, where) for item in value)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ContractError(f"{where} must be an object, not {value!r}")
        return dict(value)
    if dataclasses.is_dataclass(hint):
        return build(hint, value)  # type: ignore[arg-type]
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if hint is bool or isinstance(value, bool):
        if hint is not bool or not isinstance(value, bool):
            raise ContractError(f"{where} must be {hint.__name__}, not {value!r}")
        return value
    # DynamoDB hands numbers over as Decimal, JSON as int or float.
    if hint in (int, float) and isinstance(value, (int, float, Decimal)):
        return _number(hint, value, where)
    if isinstance(hint, type) and issubclass(hint, str) and isinstance(value, str):
        try:
            return hint(value)
        except ValueError as error:
            raise ContractError(f"{where}: {value!r} is not one of {[item.value for item in hint]}") from error  # type: ignore[attr-defined]
    raise ContractError(f"{where} must be {getattr(hint, '__name__', hint)}, not {value!r}")


def _number(hint: type[int] | type[float], value: int | float | Decimal, where: str) -> int | float:
    try:
        whole = hint is float or value % 1 == 0
        number = hint(value) if whole else 0
    except ArithmeticError as error:
        raise ContractError(f"{where} is a number out of range") from error
    if not whole:
        raise ContractError(f"{where} must be a whole number, not {value!r}")
    return number
