"""aws.health "AWS Health Event" v0 -> jobs leave machines before their maintenance, and machines that degrade."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.notices import Told, degraded, maintenance
from holdfast.domain.errors import Rejected
from holdfast.messages.aws_event import instance_ids
from holdfast.messages.health_event import Grade, HealthEvent, read_health_event
from holdfast.runtime.observability import count, logger, set_aside, tell, tracer
from holdfast.runtime.wiring import supervisor


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> None:
    try:
        health = read_health_event(event)
    except Rejected as refusal:
        set_aside(refusal)
        return
    for told in _answers(health):
        tell("health event", told, code=health.code)
    if health.grade is Grade.PUBLIC:
        # It names no machine of ours, so it is no reason to move any: a person looks at the alarm.
        count("PublicHealthIssue")


def _answers(health: HealthEvent) -> list[Told]:
    instances, refused = instance_ids(health.entities if health.grade in (Grade.MAINTENANCE, Grade.DEGRADED) else ())
    for refusal in refused:
        set_aside(refusal)
    if health.grade is Grade.MAINTENANCE:
        return maintenance(instances, supervisor(), starts_at=health.starts_at, cause=health.code)
    return degraded(instances, supervisor(), cause=health.code)
