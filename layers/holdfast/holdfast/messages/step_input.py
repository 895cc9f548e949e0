"""The payloads that the run machine hands to its steps (`statemachines/run_attempt.asl.json`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.domain.errors import Rejected
from job_contract.orders import Wait

Step = TypeVar("Step", bound="StepInput")


class StepInput(BaseModel):
    """Which attempt of which job the step works for. Fields of another release's machine are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    job: str = Field(min_length=1)
    attempt: int = Field(ge=1, strict=True)


class LeaveTokenInput(StepInput):
    """The token of a waiting state; `again` on the one further wait after a silence."""

    wait: Wait
    token: str = Field(min_length=1)
    again: bool = False


def read_step(kind: type[Step], event: Mapping[str, Any]) -> Step:
    """Return the payload as `kind`. Raises Rejected, which only a machine of another release can cause."""
    try:
        return kind.model_validate(event)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in fault["loc"]) or "the payload"
        raise Rejected("bad_step_input", f"{kind.__name__}: {where}: {fault['msg']}") from error
