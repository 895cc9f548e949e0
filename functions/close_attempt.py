"""Step «Close attempt» -> the attempt is charged to its class; the job has ended, or may be dispatched again."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.release import close_attempt
from holdfast.messages.step_input import StepInput, read_step
from holdfast.runtime.observability import logger, tracer
from holdfast.runtime.wiring import supervisor


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, str]:
    step = read_step(StepInput, event)
    job = close_attempt(step.job, step.attempt, supervisor())
    logger.info("attempt closed", job_id=step.job, attempt=step.attempt, phase=job.phase, reason=job.reason)
    return {"phase": job.phase.value}
