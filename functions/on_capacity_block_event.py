"""aws.ec2 "Capacity Block Delivered" and "Capacity Block Expiration Warning" v0 -> jobs on the block leave it in time.

aws.ec2 "EC2 Capacity Reservation Instance Interruption Warning" v0 -> the job is interrupted, the order is out.
"""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.notices import Told, block_ends, interrupted
from holdfast.domain.errors import Rejected
from holdfast.messages.capacity_block import read_capacity_block_event
from holdfast.messages.reservation_interruption import read_reservation_interruption
from holdfast.runtime.observability import logger, set_aside, tell, tracer
from holdfast.runtime.wiring import supervisor

INTERRUPTION = "EC2 Capacity Reservation Instance Interruption Warning"


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> None:
    try:
        answers = _interrupted(event) if event.get("detail-type") == INTERRUPTION else _ends(event)
    except Rejected as refusal:
        set_aside(refusal)
        return
    for told in answers:
        tell("reservation", told, kind=event["detail-type"])


def _interrupted(event: dict[str, Any]) -> list[Told]:
    notice = read_reservation_interruption(event)
    cause = "reservation interruption"
    return [interrupted(notice.instance_id, supervisor(), deadline_at=notice.deadline_at, cause=cause)]


def _ends(event: dict[str, Any]) -> list[Told]:
    # A delivered block says when it ends too, so the warning may be lost without harm.
    block = read_capacity_block_event(event)
    return block_ends(block.reservation, supervisor(), ends_at=block.ends_at)
