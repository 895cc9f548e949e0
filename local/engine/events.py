"""Events of aws.ec2 and others on the default bus, as AWS puts them there; each one is in events.jsonl."""

import json
from contextvars import ContextVar

from ministack.core import responses
from ministack.services import eventbridge

from local.engine.journal import Journal
from local.engine.settings import ACCOUNT, REGION

NEEDS = {
    "ministack.services.eventbridge": ("_put_events", "_now_ts"),
    "ministack.core.responses": ("request_scope",),
}

_SEEN_AT: ContextVar[float | None] = ContextVar("seen_at", default=None)
_NOW = eventbridge._now_ts
# The engine dates every event with the present; AWS keeps the time at which the source saw the fact.
eventbridge._now_ts = lambda: _NOW() if _SEEN_AT.get() is None else _SEEN_AT.get()


class EventSource:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.muted_state_changes = False

    def put(
        self, source: str, detail_type: str, detail: dict, resources: list[str], seen_at: float | None = None
    ) -> float:
        """The event is on the default bus; the time (epoch seconds) at which it was published.
        `seen_at` is the event's own time where that is another one."""
        entry = {"Source": source, "DetailType": detail_type, "Detail": json.dumps(detail), "Resources": resources}
        published_at = self._journal.write(kind="event", source=source, detail_type=detail_type, detail=detail)
        with responses.request_scope(ACCOUNT, REGION):
            dated = _SEEN_AT.set(seen_at)
            try:
                eventbridge._put_events({"Entries": [entry]}, allow_aws_source=True)
            finally:
                _SEEN_AT.reset(dated)
        return published_at

    def state_changed(self, instance_id: str, state: str) -> None:
        """The new state is in the journal and, unless muted, on the bus."""
        self._journal.write(kind="state", instance=instance_id, state=state, muted=self.muted_state_changes)
        if not self.muted_state_changes:
            detail = {"instance-id": instance_id, "state": state}
            self.put("aws.ec2", "EC2 Instance State-change Notification", detail, [instance_arn(instance_id)])

    def interruption_warning(self, instance_id: str, ends_at: float) -> float:
        """The event names no end: whoever reads it adds two minutes to its time, so a shorter notice is dated back."""
        detail = {"instance-id": instance_id, "instance-action": "terminate"}
        resources = [instance_arn(instance_id)]
        return self.put("aws.ec2", "EC2 Spot Instance Interruption Warning", detail, resources, ends_at - 120)

    def rebalance_recommendation(self, instance_id: str) -> float:
        detail = {"instance-id": instance_id}
        return self.put("aws.ec2", "EC2 Instance Rebalance Recommendation", detail, [instance_arn(instance_id)])


def instance_arn(instance_id: str) -> str:
    return f"arn:aws:ec2:{REGION}:{ACCOUNT}:instance/{instance_id}"
