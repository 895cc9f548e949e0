"""Step «Release fleet» -> every machine of the attempt is seen ending."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.release import release_fleet
from holdfast.messages.step_input import StepInput, read_step
from holdfast.runtime.observability import logger, tracer
from holdfast.runtime.wiring import supervisor


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, int]:
    step = read_step(StepInput, event)
    ended = release_fleet(step.job, step.attempt, supervisor())
    logger.info("released", job_id=step.job, attempt=step.attempt, ended=ended)
    return {"ended": ended}
