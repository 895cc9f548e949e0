"""aws.states "Step Functions Execution Status Change" v0 -> an attempt's execution has ended, and how."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from holdfast.domain.errors import Rejected
from holdfast.messages.aws_event import AwsDetail, AwsEvent, parsed
from holdfast.messages.step_input import StepInput

ATTEMPT = re.compile(r"[1-9][0-9]{0,8}")


class ExecutionDetail(AwsDetail):
    name: str
    status: str
    execution_arn: str = Field("", alias="executionArn")
    # Left out by Step Functions when input and output are too large together.
    input: str | None = None
    stop_date_ms: float | None = Field(None, alias="stopDate")
    error: str | None = None
    cause: str | None = None


class ExecutionStatusChange(AwsEvent):
    """The change of one execution, with the job and the attempt that it ran."""

    detail: ExecutionDetail
    job: str
    attempt: int

    @property
    def status(self) -> str:
        return self.detail.status

    @property
    def ended_at(self) -> float:
        """When the execution stopped, in seconds since 1970; the time of the event where it does not say."""
        return self.at if self.detail.stop_date_ms is None else self.detail.stop_date_ms / 1000


class _Envelope(AwsEvent):
    detail: ExecutionDetail


def read_execution_status_change(event: Mapping[str, Any]) -> ExecutionStatusChange:
    """Return the change in the event, job and attempt read from the input or else from the name. Raises Rejected."""
    envelope = parsed(_Envelope, event)
    run = _from_input(envelope.detail.input) or _from_name(envelope.detail.name)
    return ExecutionStatusChange(time=envelope.time, detail=envelope.detail, job=run.job, attempt=run.attempt)


def _from_input(text: str | None) -> StepInput | None:
    try:
        return StepInput.model_validate(json.loads(text or ""))
    except ValueError:
        return None


def _from_name(name: str) -> StepInput:
    job, _, attempt = name.rpartition("-")
    if not job or not ATTEMPT.fullmatch(attempt):
        raise Rejected("bad_event", f"execution {name!r} is not named <job>-<attempt>, so it is none of ours")
    return StepInput(job=job, attempt=int(attempt))
