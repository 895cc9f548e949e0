"""aws.ec2 "EC2 Spot Instance Interruption Warning" v0 -> the job is interrupted, the checkpoint order is out."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.notices import interrupted
from holdfast.domain.errors import Rejected
from holdfast.messages.spot_interruption import read_spot_interruption
from holdfast.runtime.observability import logger, set_aside, tell, tracer
from holdfast.runtime.wiring import supervisor


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> None:
    try:
        notice = read_spot_interruption(event)
    except Rejected as refusal:
        set_aside(refusal)
        return
    tell("spot interruption", interrupted(notice.instance_id, supervisor(), deadline_at=notice.deadline_at))
