"""Step «Launch fleet» -> the whole gang is bought and owned, or nothing is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.launch import Launch
from holdfast.application.terms import terms
from holdfast.messages.acceptance import candidates_of, prefix_of
from holdfast.messages.job_request import read_request
from holdfast.messages.step_input import StepInput, read_step
from holdfast.runtime.observability import logger, measure, tracer
from holdfast.runtime.wiring import supervisor


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> Mapping[str, Any]:
    step, launch = read_step(StepInput, event), Launch(supervisor(), terms=terms)
    request, job = read_request(supervisor().store.accepted_body(step.job)), supervisor().store.load(step.job)
    answer = launch.run(
        step.job,
        step.attempt,
        candidates=candidates_of(request, job and job.nodes),
        prefix=prefix_of(request),
        image=request.image.uri if request.image else "",
        time_left_s=context.get_remaining_time_in_millis() / 1000,
    )
    measure("CapacityRefused", answer["outcome"] == "refused")
    measure("QuotaReached", launch.quotas_reached)
    logger.info("launch", job_id=step.job, attempt=step.attempt, outcome=answer["outcome"])
    return answer
