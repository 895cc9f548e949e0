"""After a loss: hold the survivors, shrink to them, or let them go."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from holdfast.domain.cost import HOUR_S, cost, in_words
from holdfast.domain.job import BudgetWarned, Job
from holdfast.domain.phase import Intent, Phase

HOLD_AT_LEAST_S = 60.0
"""One dispatch and one purchase."""

HOLD_AT_MOST_S = 600.0
REFUSED_RETRY_S = 20.0
"""Between two tries to buy the missing nodes while survivors are held."""

USEFUL_S = 300.0
"""An attempt that the budget ends sooner after its boot is not started."""

WARNED_SHARE = 0.8
"""So much of its budget a job has spent when somebody is told, while there is time to raise it."""

HOLDABLE = frozenset({None, "preemption", "peer_lost", "lost"})
"""Ends that say nothing against the nodes that are still there."""


@dataclass(frozen=True)
class Hold:
    """Which survivors to keep and until when (seconds since 1970); none = release all. `why` is for the record."""

    instances: tuple[str, ...]
    until: float
    why: str


class Refused(StrEnum):
    """What to do with held survivors when the missing nodes cannot be bought."""

    WAIT = "wait"
    SHRINK = "shrink"
    RELEASE = "release"


def after_loss(job: Job, alive: Collection[str], now: float) -> Hold:
    """Return the survivors worth holding.

    Holding k nodes for t seconds costs k * t; letting them go costs a boot of all n nodes, n * boot_s, and the risk of
    finding no whole gang. So they are held for at most n * boot_s / k seconds, within bounds; the price of an hour
    cancels out, except where a budget would not bear it.
    """
    nothing = Hold((), now, "")
    if job.phase is not Phase.RESUMING or job.intent is not Intent.RUN:
        return nothing
    if job.failure not in HOLDABLE:
        return Hold((), now, f"{job.failure}: the nodes themselves are in doubt")
    survivors = tuple(sorted(set(alive) - set(job.doomed)))
    if not survivors or len(survivors) >= job.gang:
        return Hold((), now, "nobody is left" if not survivors else "nobody is known to be lost")
    seconds = min(HOLD_AT_MOST_S, max(HOLD_AT_LEAST_S, job.gang * job.boot_s / len(survivors)))
    price = None if job.node_usd_h is None else len(survivors) * seconds / HOUR_S * job.node_usd_h
    if price is not None and job.budget_usd is not None and cost(job, now).usd + price > job.budget_usd:
        return Hold((), now, f"holding would cost {price:.2f} USD, more than the budget has left")
    priced = "" if price is None else f", at most {price:.2f} USD"
    return Hold(survivors, now + seconds, f"{len(survivors)} of {job.gang} held for at most {seconds:.0f} s{priced}")


def after_refusal(job: Job, alive: int, now: float) -> Refused:
    """Return what to do when the pool of the survivors has no more of their kind."""
    if alive == 0:
        return Refused.RELEASE
    if now < (job.held_until or 0.0):
        return Refused.WAIT
    return Refused.SHRINK if alive >= job.min_nodes else Refused.RELEASE


@dataclass(frozen=True)
class Passed:
    """A limit that the job has passed: its class in failure.py, and a sentence with the way out."""

    failure: str
    reason: str


def passed(job: Job, now: float) -> Passed | None:
    """Return which limit a job with machines has passed, None while it is within all."""
    if job.trained_for_s(now) > job.run_s:
        return Passed("limit", f"limits.run_s = {job.run_s} passed")
    if job.budget_usd is None or cost(job, now).usd < job.budget_usd:
        return None
    return Passed("budget_spent", f"{_spent(job, now)}; {_more_money(job)}")


def budget_warning_due(job: Job, now: float) -> bool:
    """True once most of the budget is spent, as long as that was not told of this budget, and it is not passed."""
    if job.budget_usd is None or (job.budget_warned is not None and job.budget_warned.budget_usd == job.budget_usd):
        return False
    return WARNED_SHARE * job.budget_usd <= cost(job, now).usd < job.budget_usd


def budget_warning(job: Job, warned: BudgetWarned) -> str:
    """Return what was told of the budget in words, with the way out."""
    spent = f"about {in_words(warned.cost_usd)} USD of limits.budget_usd = {warned.budget_usd:g} are spent"
    return f"{spent}; when all of it is, the job saves, stops and fails: {_raise(job)}"


def unaffordable(job: Job, now: float) -> Passed | None:
    """Return why what is left of the budget pays for no useful attempt, None while it may.

    An attempt boots as long as the last one did, and trains for USEFUL_S, at the price of the last fleet. Without a
    price only a budget that is spent is an answer.
    """
    if job.budget_usd is None:
        return None
    left = job.budget_usd - cost(job, now).usd
    needed = job.nodes * (job.boot_s + USEFUL_S) / HOUR_S * (job.node_usd_h or 0.0)
    if left > 0 and left >= needed:
        return None
    short = f"; {in_words(left)} USD pay for less than {USEFUL_S:.0f} s of training" if left > 0 else ""
    return Passed("budget_spent", f"{_spent(job, now)}{short}; {_more_money(job)}")


def _spent(job: Job, now: float) -> str:
    unpriced_s = cost(job, now).unpriced_s
    more = f" (and {unpriced_s:.0f} node-seconds of unknown price)" if unpriced_s else ""
    return f"about {in_words(cost(job, now).usd)} USD{more} of limits.budget_usd = {job.budget_usd:g} are spent"


def _more_money(job: Job) -> str:
    return f"{_raise(job)}, then `holdfast retry {job.id}`"


def _raise(job: Job) -> str:
    return f"raise it with `holdfast extend {job.id} --budget-usd USD`"


HANG_AT_LEAST_S = 120.0
HANG_REPORTS = 5
"""So many progress reports without a new step are a hang."""


def hung(job: Job, step_at: float | None, now: float) -> str | None:
    """Return why the training counts as hung, None while it may be moving.

    A heartbeat says that an agent lives; only a new step says that the ranks do. `step_at` is when the newest step was
    reported. Evaluation and saving are shorter than the bound, or the job reports more rarely.
    """
    if job.phase is not Phase.RUNNING:
        return None
    bound_s = max(HANG_AT_LEAST_S, HANG_REPORTS * job.report_s)
    silent_s = now - max(step_at or 0.0, job.phase_at)
    return f"no new step for {silent_s:.0f} s (bound {bound_s:.0f} s)" if silent_s > bound_s else None
