"""holdfast.job-request-ref/1 -> where the request lies, for senders whose messages must be small."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from holdfast.domain.errors import Rejected
from holdfast.domain.locations import split_uri
from holdfast.messages.envelope import BODY_LIMIT_BYTES, open_envelope
from holdfast.messages.refusal import validated

SCHEMA = "holdfast.job-request-ref/1"
LIMIT_BYTES = BODY_LIMIT_BYTES
"""An object may be as large as a message: it is stored beside the job's row all the same."""


class RequestReference(BaseModel):
    """The address of a request; with `sha256` only this very object will do."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_: Literal["holdfast.job-request-ref/1"] = Field(alias="schema", description=f'"{SCHEMA}"')
    uri: str = Field(max_length=1_100, description="s3://bucket/key")
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$", description="64 hex digits in lower case")

    @property
    def place(self) -> tuple[str, str]:
        """Bucket and key. Raises Rejected."""
        return split_uri(self.uri, "uri")


def reference_in(message: Mapping[str, Any]) -> RequestReference | None:
    """Return the reference that the message is, None when it is no reference. Raises Rejected."""
    return validated(RequestReference, message) if message.get("schema") == SCHEMA else None


def opened(reference: RequestReference, raw: bytes) -> dict[str, Any]:
    """Return the message in the object. Raises Rejected."""
    digest = hashlib.sha256(raw).hexdigest()
    if reference.sha256 is not None and digest != reference.sha256:
        raise Rejected(
            "reference_digest_differs",
            f"{reference.uri} has sha256 {digest}, the reference says {reference.sha256}; send that of the object",
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise Rejected("not_json", f"{reference.uri} is not UTF-8: {error}; upload one JSON object") from error
    message = open_envelope(text)
    if message.get("schema") == SCHEMA:
        raise Rejected("reference_nested", f"{reference.uri} is a reference itself; let the first one name the request")
    return message
