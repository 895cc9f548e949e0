"""Waiting steps of the run machine -> the token lies where news will find it, or is answered at once."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.waiting import leave_token
from holdfast.messages.step_input import LeaveTokenInput, read_step
from holdfast.runtime.observability import logger, tracer
from holdfast.runtime.wiring import supervisor
from job_contract.orders import WaitItem


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> None:
    step = read_step(LeaveTokenInput, event)
    item = WaitItem(job=step.job, attempt=step.attempt, wait=step.wait, token=step.token)
    leave_token(item, supervisor(), after_silence=step.again)
    logger.info("waiting", job_id=step.job, attempt=step.attempt, wait=step.wait, again=step.again)
