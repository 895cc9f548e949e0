"""Plain data <-> DynamoDB items."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from boto3.dynamodb.types import TypeDeserializer, TypeSerializer

_serialize = TypeSerializer().serialize
_deserialize = TypeDeserializer().deserialize


LEAST, MOST = Decimal("1e-130"), Decimal("9.9e125")
"""Magnitudes that DynamoDB keeps, and zero; boto3 raises for all others."""


def to_item(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data as an item; fields that are None are left out.

    A number that DynamoDB cannot hold becomes the nearest that it can: a request has none, the loss of a run that
    diverges may be one.
    """
    exact = json.loads(json.dumps(data, allow_nan=False), parse_float=_held)
    return {key: _serialize(value) for key, value in exact.items() if value is not None}


def from_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the item as plain data; whole numbers are int, others float."""
    return {key: _number(_deserialize(value)) for key, value in item.items()}


def _held(text: str) -> Decimal:
    value = Decimal(text)
    if abs(value) < LEAST:
        return Decimal(0)
    return value if abs(value) <= MOST else MOST.copy_sign(value)


def _number(value: Any) -> Any:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, dict):
        return {key: _number(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_number(item) for item in value]
    return value
