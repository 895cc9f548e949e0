"""aws.ec2 "AWS Service Event via CloudTrail", BidEvictedEvent -> the members that were taken are lost to their jobs."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.notices import evicted
from holdfast.domain.errors import Rejected
from holdfast.messages.aws_event import instance_ids
from holdfast.messages.bid_evicted import read_bid_evicted
from holdfast.runtime.observability import logger, set_aside, tell, tracer
from holdfast.runtime.wiring import supervisor


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> None:
    try:
        instances, refused = instance_ids(read_bid_evicted(event).entities)
    except Rejected as refusal:
        instances, refused = [], [refusal]
    for refusal in refused:
        set_aside(refusal)
    for told in evicted(instances, supervisor()):
        tell("bid evicted", told)
