"""aws.ec2 "EC2 Instance State-change Notification" v0 -> a member that goes is lost to its job."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.notices import lost
from holdfast.domain.errors import Rejected
from holdfast.messages.instance_state_change import read_instance_state_change
from holdfast.runtime.observability import logger, set_aside, tell, tracer
from holdfast.runtime.wiring import supervisor


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> None:
    try:
        change = read_instance_state_change(event)
    except Rejected as refusal:
        set_aside(refusal)
        return
    if change.is_going:
        tell("instance is going", lost(change.instance_id, supervisor()), state=change.state)
