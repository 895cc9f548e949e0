"""Schedule -> whatever an event should have told is found and set right."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.sweep import Sweep
from holdfast.runtime.observability import logger, tracer
from holdfast.runtime.wiring import supervisor


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, int]:
    findings = Sweep(supervisor()).run()
    for finding in findings:
        logger.warning("swept", what=finding.what, who=finding.who, done=finding.done)
    return {"findings": len(findings)}
