"""What leaves the supervisor: one event a change of phase, one result a job. At least once, under the same id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.application.ports import Outbox
from holdfast.domain.job import Job
from holdfast.messages.result_message import result_id, result_message

PHASE_CHANGED = "Training Job Phase Changed"


def publish(before: Job | None, after: Job, *, bucket: str, outbox: Outbox) -> bool:
    """What the row's change has to tell is told; False when it was nothing."""
    if before is not None and after.news <= before.news:
        return False
    outbox.publish(f"{after.id}#{after.news}", PHASE_CHANGED, phase_change(after))
    if after.over:
        outbox.result(result_id(after), after.id, result_message(after, bucket=bucket))
    return True


def phase_change(job: Job) -> Mapping[str, Any]:
    """Return the detail of the event, schema holdfast.phase-change/1."""
    return {
        "schema": "holdfast.phase-change/1",
        "id": f"{job.id}#{job.news}",
        "job": job.id,
        "name": job.name,
        "team": job.team,
        "phase": job.phase.value,
        "intent": job.intent.value,
        "stage": job.stage,
        "reason": job.reason,
        "attempt": job.attempt,
        "step": job.step,
        "over": job.over,
        "at": job.phase_at,
    }
