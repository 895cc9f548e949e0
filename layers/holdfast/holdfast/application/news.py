"""What leaves the supervisor: one event a change of phase, one result a job. At least once, under the same id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.application.ports import JobStore, Outbox
from holdfast.domain.cost import cost
from holdfast.domain.job import Job
from holdfast.domain.keys import KEEP_S
from holdfast.messages.result_message import known_usd, result_id, result_message

PHASE_CHANGED = "Training Job Phase Changed"


def publish(before: Job | None, after: Job, *, bucket: str, outbox: Outbox) -> bool:
    """What the row's change has to tell is told; False when it was nothing."""
    if before is not None and after.news <= before.news:
        return False
    outbox.publish(f"{after.id}#{after.news}", PHASE_CHANGED, phase_change(after))
    if after.over:
        outbox.result(result_id(after), after.id, result_message(after, bucket=bucket))
    return True


def remember(before: Job | None, after: Job, store: JobStore) -> None:
    """What belongs to a job that is over is kept for KEEP_S from its end; of one that is tried again, until told else.

    The row is read again, so that news that come late or twice say what is true now.
    """
    if after.over == (before is not None and before.over):
        return
    job = store.load(after.id)
    if job is not None:
        store.expire(job.id, job.ended_at + KEEP_S if job.over and job.ended_at is not None else None)


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
        "save": job.saved.save if job.saved else None,
        "cost_usd": known_usd(cost(job, job.phase_at)),
        "over": job.over,
        "at": job.phase_at,
    }
