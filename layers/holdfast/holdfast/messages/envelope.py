"""A user's message on a queue: plain JSON, or wrapped by SNS ("Notification") or by EventBridge ("detail-type")."""

from __future__ import annotations

import json
from typing import Any

from holdfast.domain.errors import Rejected

# SQS itself takes 1 MiB; the body is stored beside the job's row, and DynamoDB takes 400 KB an item.
BODY_LIMIT_BYTES = 262_144
# EventBridge -> SNS -> SQS is the longest chain that AWS offers without code in between.
WRAPPERS_AT_MOST = 2


def open_envelope(body: str) -> dict[str, Any]:
    """Return the JSON object that the sender wrote, wrappers taken off. Raises Rejected.

    NaN and Infinity, which Python's reader lets through, are left for the reader of the field to refuse by name.
    """
    size = len(body.encode("utf-8", "surrogatepass"))
    if size > BODY_LIMIT_BYTES:
        raise Rejected(
            "too_large",
            f"the message has {size} bytes, the limit is {BODY_LIMIT_BYTES}; "
            "put large data into a bucket and send its s3:// address",
        )
    # A byte-order mark is no part of the text: some systems put one before everything they send.
    message = _parse(body.removeprefix("\ufeff"))
    for _ in range(WRAPPERS_AT_MOST):
        message = _unwrapped(message)
    return message


def _unwrapped(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("Type") == "Notification" and "Message" in message:
        return _parse(message["Message"])
    if "detail-type" in message and "detail" in message:
        return _object(message["detail"])
    return message


def _parse(text: Any) -> dict[str, Any]:
    if not isinstance(text, str):
        raise Rejected("not_json", f"the wrapped message must be text that holds JSON, not {type(text).__name__}")
    try:
        message = json.loads(text, object_pairs_hook=_no_doubled_keys)
        json.dumps(message, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Rejected(
            "not_json", "the message holds half of a surrogate pair, which is no character; send valid UTF-8"
        ) from error
    except RecursionError as error:
        raise Rejected("not_json", "the message is nested too deeply; a request has four levels") from error
    except ValueError as error:
        raise Rejected("not_json", f"the message is not JSON: {error}; send one JSON object") from error
    return _object(message)


def _object(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Rejected("not_json", f"the message must be one JSON object, not {type(message).__name__}")
    return message


def _no_doubled_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    message = dict(pairs)
    if len(message) < len(pairs):
        names = [name for name, _ in pairs]
        doubled = next(name for name in names if names.count(name) > 1)
        raise Rejected("doubled_key", f"the key {doubled!r} occurs twice in one object; say which value is meant")
    return message
