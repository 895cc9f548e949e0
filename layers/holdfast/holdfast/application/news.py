"""What leaves the supervisor: one event a change of phase, one result a job. At least once, under the same id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.application.ports import JobStore, Outbox
from holdfast.domain.cost import cost
from holdfast.domain.job import BudgetWarned, Job
from holdfast.domain.keys import KEEP_S
from holdfast.domain.recovery import budget_warning
from holdfast.messages.result_message import known_usd, result_id, result_message

PHASE_CHANGED = "Training Job Phase Changed"
BUDGET_WARNING = "Training Job Budget Warning"


def publish(before: Job | None, after: Job, *, bucket: str, outbox: Outbox) -> bool:
    """What the row's change has to tell is told; False when it was nothing."""
    warned = after.budget_warned
    told = before is not None and warned is not None and warned != before.budget_warned
    if told and warned is not None:
        outbox.publish(_warning_id(after, warned), BUDGET_WARNING, budget_warned(after, warned))
    if before is not None and after.news <= before.news:
        return told
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


def budget_warned(job: Job, warned: BudgetWarned) -> Mapping[str, Any]:
    """Return the detail of the event that most of the budget is spent, schema holdfast.budget-warning/1."""
    return {
        "schema": "holdfast.budget-warning/1",
        "id": _warning_id(job, warned),
        "job": job.id,
        "name": job.name,
        "team": job.team,
        "phase": job.phase.value,
        "attempt": job.attempt,
        "budget_usd": warned.budget_usd,
        "cost_usd": warned.cost_usd,
        "reason": budget_warning(job, warned),
        "at": warned.at,
    }


def _warning_id(job: Job, warned: BudgetWarned) -> str:
    return f"{job.id}#budget#{warned.budget_usd:g}"


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
