"""What is owed because of the row: the orders the nodes read, and the answers the waiting states get.

Both are read off the row, so doing them again after a crash heals it.
"""

from __future__ import annotations

from typing import Any

from holdfast.domain.job import Job
from holdfast.domain.notices import checkpoint_wait_s
from holdfast.domain.phase import ENDED, Intent, Phase
from job_contract.orders import Action, Orders, Wait

HEARTBEAT_S = 30
"""The agents of two nodes beat every 10 s."""


def action_for(job: Job) -> Action:
    """Return what the nodes of the current attempt are to do."""
    if job.phase in ENDED or job.phase is Phase.RESUMING:
        return Action.RELEASE if job.attempt_open else Action.WAIT
    if job.roster_id is None:
        return Action.WAIT if job.intent is Intent.RUN else Action.RELEASE
    if job.phase in (Phase.INTERRUPTED, Phase.CHECKPOINTING) or job.intent is not Intent.RUN:
        return Action.CHECKPOINT_STOP
    return Action.CHECKPOINT if job.yields and job.phase is Phase.RUNNING else Action.RUN


def projection(job: Job) -> tuple[Any, ...]:
    """Everything of the orders but their generation and time."""
    return (job.attempt, action_for(job), job.roster_id, job.doomed, job.deadline_at, job.resume_from)


def orders_for(job: Job, now: float) -> Orders:
    """Return the item that the nodes poll. Its generation is the version of the row that changed it last."""
    return Orders(
        job=job.id,
        attempt=job.attempt,
        generation=job.generation,
        action=action_for(job),
        spec_id=job.spec_id,
        issued_at=now,
        deadline_at=job.deadline_at,
        doomed=job.doomed,
        reason=job.reason[:200],
        roster_id=job.roster_id,
        resume_from=job.resume_from,
    )


def answer_for(job: Job, wait: Wait, now: float) -> dict[str, Any] | None:
    """Return what a state that waits in the current attempt is to be told, None while it must wait on."""
    if job.phase in ENDED or job.phase is Phase.RESUMING or not job.attempt_open:
        return {"outcome": "ended"}
    if wait is Wait.READY:
        if job.roster_id is not None:
            # A state's heartbeat must be shorter than its timeout.
            run_s = max(job.run_s, HEARTBEAT_S + 1)
            return {"outcome": "started", "heartbeat_s": HEARTBEAT_S, "run_s": run_s}
        return {"outcome": "withdrawn"} if job.intent is not Intent.RUN else None
    if wait is Wait.TRAINING and action_for(job) is Action.CHECKPOINT_STOP:
        return {"outcome": "interrupted", "checkpoint_wait_s": checkpoint_wait_s(job, now)}
    return None
