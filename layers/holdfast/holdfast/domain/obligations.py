"""What is owed because of the row: the orders the nodes read, and the answers the waiting states get.

Both are read off the row, so doing them again after a crash heals it.
"""

from __future__ import annotations

from typing import Any

from holdfast.domain.job import Job
from holdfast.domain.notices import checkpoint_wait_s, trains
from holdfast.domain.phase import ENDED, Intent, Phase
from job_contract.orders import Action, Orders, Wait

RUN_MARGIN_S = 3600
HEARTBEAT_S = 30
"""The agents of two nodes beat every 10 s."""


def action_for(job: Job) -> Action:
    """Return what the nodes of the current attempt are to do."""
    if job.phase in ENDED:
        return Action.RELEASE
    if job.phase is Phase.RESUMING:
        # Survivors may be held for the next attempt; those that are not are ended by EC2.
        return Action.WAIT
    if job.roster_id is None:
        return Action.WAIT if job.intent is Intent.RUN else Action.RELEASE
    if job.phase in (Phase.INTERRUPTED, Phase.CHECKPOINTING) or job.intent is not Intent.RUN:
        return Action.CHECKPOINT_STOP
    if (trains(job) and job.asked_generation is not None) or (job.yields and job.phase is Phase.RUNNING):
        return Action.CHECKPOINT
    return Action.RUN


def projection(job: Job) -> tuple[Any, ...]:
    """Everything of the orders but their generation and time."""
    action = action_for(job)
    # Ranks answer a `checkpoint` by its generation, so a second ask must be an order of its own.
    asked = job.asked_generation if action is Action.CHECKPOINT else None
    return (job.attempt, action, job.roster_id, job.doomed, job.deadline_at, job.resume_from, asked)


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
            # The sweep ends a run at its limit, after a save; the state's own end is the net below it.
            run_s = round(max(job.run_s - job.trained_s, 0)) + RUN_MARGIN_S
            return {"outcome": "started", "heartbeat_s": HEARTBEAT_S, "run_s": run_s}
        return {"outcome": "withdrawn"} if job.intent is not Intent.RUN else None
    if wait is Wait.TRAINING and action_for(job) is Action.CHECKPOINT_STOP:
        return {"outcome": "interrupted", "checkpoint_wait_s": checkpoint_wait_s(job, now)}
    return None
