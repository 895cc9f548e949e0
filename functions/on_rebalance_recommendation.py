"""aws.ec2 "EC2 Instance Rebalance Recommendation" v0 -> the job is asked for an early save; nothing is ended."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.notices import advised
from holdfast.domain.errors import Rejected
from holdfast.messages.rebalance_recommendation import read_rebalance_recommendation
from holdfast.runtime.observability import logger, set_aside, tell, tracer
from holdfast.runtime.wiring import supervisor


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> None:
    try:
        advice = read_rebalance_recommendation(event)
    except Rejected as refusal:
        set_aside(refusal)
        return
    tell("rebalance recommendation", advised(advice.instance_id, supervisor()))
