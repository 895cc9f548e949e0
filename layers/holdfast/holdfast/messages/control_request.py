"""holdfast.control/1 -> what a user wants of a job that exists."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from holdfast.domain.errors import Rejected
from holdfast.messages.envelope import open_envelope
from holdfast.messages.refusal import printable, validated

SCHEMA = "holdfast.control/1"


class ControlRequest(BaseModel):
    """A wish for one job. `dedup_id` tells two wishes of one kind apart; without it they are one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_: Literal["holdfast.control/1"] = Field(alias="schema", description=f'"{SCHEMA}"')
    job: str = Field(pattern=r"^[a-z0-9-]{1,40}$", description="the job's id, as submit printed it")
    action: Literal["cancel"] = Field(description='"cancel"')
    dedup_id: Annotated[str, AfterValidator(printable)] | None = Field(
        None, min_length=1, max_length=128, description="1 to 128 printable characters"
    )
    requested_by: Annotated[str, AfterValidator(printable)] | None = Field(
        None, min_length=1, max_length=128, description="who asks, 1 to 128 printable characters"
    )


def read_control(body: str) -> ControlRequest:
    """Return the control request in a message's body, plain or wrapped by SNS or EventBridge. Raises Rejected."""
    message = open_envelope(body)
    if message.get("schema") != SCHEMA:
        raise Rejected(
            "unknown_schema", f"schema is {message.get('schema')!r}; this queue takes {SCHEMA!r}, so set it to that"
        )
    return validated(ControlRequest, message)


def control_identity(request: ControlRequest) -> str:
    """Return what makes two control requests for one job the same wish: the dedup_id, else the action itself."""
    return request.action if request.dedup_id is None else f"{request.action}#{request.dedup_id}"
