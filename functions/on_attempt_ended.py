"""aws.states "Step Functions Execution Status Change" -> an attempt whose execution died is released and closed."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.release import end_dead_attempt
from holdfast.domain.errors import Rejected
from holdfast.messages.execution_status_change import read_execution_status_change
from holdfast.runtime.observability import logger, set_aside, tracer
from holdfast.runtime.wiring import supervisor


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> None:
    try:
        ended = read_execution_status_change(event)
        end_dead_attempt(ended.job, ended.attempt, supervisor(), cause=f"execution {ended.status.lower()}")
    except Rejected as refusal:
        set_aside(refusal)
        return
    logger.info("attempt ended", job_id=ended.job, attempt=ended.attempt, status=ended.status)
