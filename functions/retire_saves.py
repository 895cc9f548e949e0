"""Our own "Training Job Phase Changed" of a job that is over -> no more of its saves are left than it asked for."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.retention import tidy
from holdfast.domain.errors import Rejected
from holdfast.messages.phase_change import read_phase_change
from holdfast.runtime.observability import logger, set_aside, tracer
from holdfast.runtime.wiring import supervisor


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> None:
    try:
        change = read_phase_change(event)
    except Rejected as refusal:
        set_aside(refusal)
        return
    logger.info("saves past checkpoint.keep deleted", job_id=change.job, saves=tidy(change.job, supervisor()))
