"""One sentence for a message that does not fit its model: the field, its value, and what is expected there."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from holdfast.domain.errors import Rejected

Model = TypeVar("Model", bound=BaseModel)
SHOWN_CHARACTERS = 80
# What stands there may be secret, and a reason is logged.
NEVER_QUOTED = frozenset({"environment", "secrets"})


class Coded(ValueError):
    """A fault with a code of its own, found by a model's validator."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def printable(text: str) -> str:
    """Return the text unchanged. Raises ValueError when a terminal or a log could not show it."""
    if not text.isprintable() or not text.strip():
        raise ValueError(f"{text!r} has characters that cannot be printed, or none that can; use printable text")
    return text


def validated(kind: type[Model], message: Mapping[str, Any]) -> Model:
    """Return the message as `kind`, read by the rules for JSON. Raises Rejected about the first fault found."""
    try:
        return kind.model_validate_json(json.dumps(message))
    except ValidationError as error:
        faults = error.errors(include_url=False)
        # A union reports each of its arms; the one that went deepest is the one that the sender meant.
        first = [fault for fault in faults if _field(kind, fault["loc"]) == _field(kind, faults[0]["loc"])]
        raise _rejection(kind, message, max(first, key=lambda fault: len(fault["loc"]))) from error


def _rejection(kind: type[BaseModel], message: Mapping[str, Any], fault: Any) -> Rejected:
    where, owner, expected = _place(kind, fault["loc"])
    if fault["type"] == "extra_forbidden":
        name = fault["loc"][-1]
        return Rejected("unknown_field", f"{_dotted((*where, name))} is not a known field; {_known(owner, str(name))}")
    if fault["type"] == "missing":
        return Rejected("missing_field", f"{_dotted(where)} is missing; add it: {expected}")
    if fault["type"] == "value_error":
        error = fault["ctx"]["error"]
        text = str(error)
        named = not where or text.startswith(_dotted(where))
        return Rejected(getattr(error, "code", "bad_value"), text if named else f"{_dotted(where)} {text}")
    shown = "not shown" if NEVER_QUOTED & set(where) else _shown(_value(message, where))
    return Rejected("bad_value", f"{_dotted(where)} is {shown}; expected {expected or fault['msg']}")


def _place(kind: type[BaseModel], loc: tuple[str | int, ...]) -> tuple[tuple[str | int, ...], type[BaseModel], str]:
    """Return the part of `loc` that the sender wrote, the model of its last field, and what is expected there."""
    where: list[str | int] = []
    owner: type[BaseModel] = kind
    inner: type[BaseModel] | None = kind
    expected = ""
    for step in loc:
        if isinstance(step, int):
            where.append(step)
        elif inner is not None and step in (fields := _fields(inner)):
            owner, field = inner, fields[step]
            where.append(step)
            expected = field.description or ""
            inner = _model_in(field.annotation)
    if inner is not None:
        owner = inner
    return tuple(where), owner, expected


def _field(kind: type[BaseModel], loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    return tuple(step for step in _place(kind, loc)[0] if isinstance(step, str))


def _fields(kind: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in kind.model_fields.items()}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    arms = (annotation, *getattr(annotation, "__args__", ()))
    return next((arm for arm in arms if isinstance(arm, type) and issubclass(arm, BaseModel)), None)


def _known(owner: type[BaseModel], name: str) -> str:
    known = list(_fields(owner))
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known here are {', '.join(known)}"


def _dotted(where: tuple[str | int, ...]) -> str:
    text = ""
    for step in where:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.lstrip(".") or "the message"


def _value(message: Any, where: tuple[str | int, ...]) -> Any:
    for step in where:
        message = message[step]
    return message


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[:SHOWN_CHARACTERS]}..."
    return f"{text}, a string" if isinstance(value, str) else text
