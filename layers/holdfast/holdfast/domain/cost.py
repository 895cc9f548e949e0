"""What a job's machines have cost: node-seconds that they were its own, times the price known when they were bought.

An estimate, and no bill: disks, traffic and rounding are left out, the spot price is the one at purchase, and a machine
that AWS took early counts until its attempt was closed. It is read off the row: counted intervals, and the one that is
open, so that telling an event twice cannot count it twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.domain.job import Job
from holdfast.domain.records import replace

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """`usd` is what the priced machine time comes to; `unpriced_s` are node-seconds whose price is not known."""

    usd: float
    unpriced_s: float

    @property
    def known_usd(self) -> float | None:
        """US dollars; None when machines ran and no price of any is known."""
        return None if self.unpriced_s and not self.usd else self.usd


def in_words(usd: float) -> str:
    """Return US dollars for people: cents, and less than that of small sums."""
    return f"{usd:.2f}" if usd == 0 or usd >= 0.1 else f"{usd:.4f}"


def cost(job: Job, now: float) -> Cost:
    """Return what the job has cost until now (seconds since 1970), all attempts and held machines included."""
    usd, unpriced_s = _priced(job, _open_s(job, now))
    return Cost(usd=round(job.counted_usd + usd, 6), unpriced_s=round(job.unpriced_s + unpriced_s, 1))


def counted(job: Job, now: float) -> Job:
    """Return the job with its open interval counted up to now; the caller ends that interval, or begins it anew."""
    seconds = _open_s(job, now)
    usd, unpriced_s = _priced(job, seconds)
    return replace(
        job,
        node_seconds=round(job.node_seconds + seconds, 1),
        counted_usd=round(job.counted_usd + usd, 6),
        unpriced_s=round(job.unpriced_s + unpriced_s, 1),
        held_from=None,
    )


def _open_s(job: Job, now: float) -> float:
    """Node-seconds of the machines that are the job's now: the fleet of its attempt, or those held for the next."""
    fleet = job.gang * (now - job.bought_at) if job.attempt_open and job.bought_at is not None else 0.0
    # Past the end of the hold they are let go, whenever the next attempt says so.
    until = min(now, job.held_until if job.held_until is not None else now)
    held = len(job.held) * (until - job.held_from) if job.held_from is not None else 0.0
    return max(0.0, fleet) + max(0.0, held)


def _priced(job: Job, seconds: float) -> tuple[float, float]:
    """Return (US dollars, node-seconds without a price)."""
    if job.node_usd_h is None:
        return 0.0, seconds
    return seconds / HOUR_S * job.node_usd_h, 0.0
