"""Step «Launch fleet» -> the whole gang is bought and owned, or nothing is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.launch import Launch
from holdfast.messages.acceptance import candidates_of, prefix_of
from holdfast.messages.job_request import read_request
from holdfast.messages.step_input import StepInput, read_step
from holdfast.runtime.observability import logger, metrics, tracer
from holdfast.runtime.wiring import supervisor


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
@metrics.log_metrics
def handler(event: dict[str, Any], context: LambdaContext) -> Mapping[str, Any]:
    step = read_step(StepInput, event)
    request = read_request(supervisor().store.accepted_body(step.job))
    launch = Launch(supervisor())
    answer = launch.run(
        step.job,
        step.attempt,
        candidates=candidates_of(request),
        prefix=prefix_of(request),
        time_left_s=context.get_remaining_time_in_millis() / 1000,
    )
    if launch.quotas_reached:
        metrics.add_metric(name="QuotaReached", unit=MetricUnit.Count, value=launch.quotas_reached)
    logger.info("launch", job_id=step.job, attempt=step.attempt, outcome=answer["outcome"])
    return answer
