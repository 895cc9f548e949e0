"""What is owed because of the row: the orders the nodes read, and the answers the waiting states get.

Both are read off the row, so doing them again after a crash heals it.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from holdfast.domain.job import Job
from holdfast.domain.notices import checkpoint_wait_s, trains
from holdfast.domain.phase import ENDED, Intent, Phase
from job_contract.orders import Action, Orders, Wait

RUN_MARGIN_S = 3600
HEARTBEAT_S = 30
"""The agents of two nodes beat every 10 s."""

ALL_ENDED: Mapping[Wait, Mapping[str, Any]] = {wait: {"outcome": "ended"} for wait in Wait}


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


READ_BY_ORDERS = (
    "attempt", "attempt_open", "phase", "intent", "roster_id", "reserved", "doomed", "deadline_at", "resume_from",
    "asked_generation",
)  # fmt: skip
"""The fields that `projection` reads; most events change none of them."""

_read = attrgetter(*READ_BY_ORDERS)


def orders_differ(before: Job, after: Job) -> bool:
    """Return whether the nodes are to be told something else."""
    return _read(before) != _read(after) and projection(before) != projection(after)


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


def answers_for(job: Job, now: float) -> Mapping[Wait, Mapping[str, Any]]:
    """Return what the states that wait in the current attempt are to be told; those that must wait on are left out."""
    if job.phase in ENDED or job.phase is Phase.RESUMING or not job.attempt_open:
        return ALL_ENDED
    answers: dict[Wait, dict[str, Any]] = {}
    if job.roster_id is not None:
        # The sweep ends a run at its limit, after a save; the state's own end is the net below it.
        run_s = round(max(job.run_s - job.trained_s, 0)) + RUN_MARGIN_S
        answers[Wait.READY] = {"outcome": "started", "heartbeat_s": HEARTBEAT_S, "run_s": run_s}
    elif job.intent is not Intent.RUN:
        answers[Wait.READY] = {"outcome": "withdrawn"}
    if action_for(job) is Action.CHECKPOINT_STOP:
        answers[Wait.TRAINING] = {"outcome": "interrupted", "checkpoint_wait_s": checkpoint_wait_s(job, now)}
    return answers
