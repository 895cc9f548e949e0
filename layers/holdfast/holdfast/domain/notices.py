"""What a notice from AWS costs and allows.

Four grades: an interruption saves and stops at once; a date (maintenance, the end of a Capacity Block) is remembered
and the job moves before it; a hint (rebalance, a neighbour's interruption) asks for one save and touches no machine;
anything about a machine that is not ours, or about an attempt that is over, is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.domain.job import Job
from holdfast.domain.phase import Intent, Phase

CHECKPOINT_GRACE_S = 600
"""After the deadline the nodes that live on may still be uploading their parts; agents give up at the same time."""

ORDERED_STOP_S = 600
"""What a stop without a deadline of AWS (cancel, pause, a planned move) may take."""

REBALANCE_COOL_DOWN_S = 600
"""At most one early save a job in this time, and one warning a pool, however many hints come."""

ADVICE_HOLDS_S = 3600
"""After a rebalance advice saves are at most REBALANCE_COOL_DOWN_S apart for so long. Most advice comes to nothing."""

MOVE_LEAD_S = 600
"""The order to move is out this long before the machines must be left."""

MAINTENANCE_MARGIN_S = 1800
"""Machines are left this long before their maintenance may begin: the window opens when AWS says, not later."""

SOONEST_MOVE_S = 120
"""What a move gets whose date is past already: as much as a spot notice gives."""

DEGRADED_MOVE_S = 3600
"""A machine with a failing disk is left by then, even when no further save is committed on it."""

MOST_SWAPS = 2
"""So often a job leaves one machine for being slow or doubtful: after that the cause is more likely the job itself."""

BLOCK_TERMINATES_S = 1800
"""EC2 begins to terminate a Capacity Block's instances this long before the block ends; it warns 40 min before."""

MAINTENANCE = frozenset(
    {"instance-reboot", "system-reboot", "system-maintenance", "instance-retirement", "instance-stop"}
)
"""EC2's codes of scheduled events, in metadata and in DescribeInstanceStatus; every other action ends the instance."""

IMPAIRED_LEAVE_S = 120
"""Status checks are made every minute: two that failed are no blip. The job saves, and then leaves the machine."""

IMPAIRED_LOST_S = 600
"""A machine that could not even be left by a save in this time is lost."""

POOL_JOBS_READ, POOL_JOBS_WARNED = 500, 50
"""Bounds of one pool warning: rows read, and jobs asked for a save."""


@dataclass(frozen=True, kw_only=True)
class ScheduledEvent:
    """One scheduled event of EC2 that is still to come or under way; seconds since 1970 (UTC)."""

    code: str
    starts_at: float


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What EC2 reports of one running machine: scheduled events, and since when a status check of it fails."""

    instance: str
    events: tuple[ScheduledEvent, ...] = ()
    impaired_since: float | None = None

    def impaired_s(self, now: float) -> float:
        """Seconds for which a check has failed, 0 when none does."""
        return max(0.0, now - self.impaired_since) if self.impaired_since is not None else 0.0


def loses_only_doomed(job: Job, instances: Iterable[str]) -> bool:
    """True while a save is under way and nobody is gone but those under notice: the others may still commit it.

    False when the whole gang is gone: then there are no others.
    """
    gone = set(instances)
    saving = job.phase in (Phase.INTERRUPTED, Phase.CHECKPOINTING)
    return saving and gone <= set(job.doomed) and (not job.gang or len(gone) < job.gang)


def checkpoint_wait_s(job: Job, now: float) -> int:
    """Seconds that the run may wait for the ordered save: to the deadline and the grace after it."""
    if job.deadline_at is None:
        return ORDERED_STOP_S
    return max(1, round(job.deadline_at + CHECKPOINT_GRACE_S - now))


def announced(job: Job) -> bool:
    """True when AWS had said that machines of this attempt would go: their loss is no fault of theirs."""
    return bool(job.doomed) or job.deadline_at is not None


def trains(job: Job) -> bool:
    """True while an early save can be asked for: all nodes have joined, and nothing stronger is ordered."""
    return job.phase is Phase.RUNNING and job.attempt_open and job.intent is Intent.RUN


def cooling(job: Job, now: float) -> bool:
    """True while an early save was asked for so recently that another is not."""
    return job.save_asked_at is not None and now - job.save_asked_at < REBALANCE_COOL_DOWN_S


def early_save_due(job: Job, now: float) -> bool:
    """True when advice still holds, and the newest save is older than the interval that it calls for."""
    if not trains(job) or cooling(job, now) or job.advised_until_at is None or now >= job.advised_until_at:
        return False
    return job.saved is None or now - job.saved.at >= REBALANCE_COOL_DOWN_S


def look_due(job: Job, now: float) -> bool:
    """True when advice holds, and it was not looked for other capacity since the last early save was asked for."""
    if not trains(job) or job.pool is None or job.save_asked_at is None:
        return False
    if now >= (job.advised_until_at or 0.0):
        return False
    return job.elsewhere is None or job.elsewhere.at < job.save_asked_at


def may_swap(job: Job) -> bool:
    """True while the job may leave one of its machines: it trains, no move is planned, and it has not done so often."""
    return trains(job) and job.move_by_at is None and job.swaps < MOST_SWAPS


def move_due(job: Job, now: float) -> bool:
    """True when the order to move must go out: the date is near, or the save that the move waited for is committed."""
    if job.phase not in (Phase.LAUNCHING, Phase.RUNNING) or job.move_by_at is None:
        return False
    saved = job.saved is not None and job.move_after_save_at is not None and job.saved.at >= job.move_after_save_at
    return saved or job.move_by_at - now <= MOVE_LEAD_S


def move_deadline_at(by_at: float, now: float) -> float:
    """Return when an ordered move must be done: by the date, but within the time of any ordered stop."""
    return min(max(by_at, now + SOONEST_MOVE_S), now + ORDERED_STOP_S)


def maintenance_left_by(starts_at: float) -> float:
    return starts_at - MAINTENANCE_MARGIN_S


def block_left_by(ends_at: float) -> float:
    return ends_at - BLOCK_TERMINATES_S
