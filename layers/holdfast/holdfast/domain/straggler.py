"""Which node of a gang is slow by its own doing. A synchronous gang is as slow as its slowest node.

The nodes' own times exclude what they waited for each other, so only differences between nodes show in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

SLOW_FACTOR = 1.3
"""So much slower than the median of the others."""

SLOW_LEAST_MS = 10.0
"""And by so much: below that it is noise of a short step."""

SLOW_REPORTS, SLOW_LEAST_S = 5, 300.0
"""In so many reports running, and for so long: a slow disk, a neighbour, one long garbage collection pass."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """In how many reports running, and since when, a node was slow. The attempt says whose the rank was."""

    attempt: int
    node_rank: int
    reports: int
    since_at: float

    def grown(self) -> Slow:
        return replace(self, reports=self.reports + 1)

    def ripe(self, now: float) -> bool:
        return self.reports >= SLOW_REPORTS and now - self.since_at >= SLOW_LEAST_S


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A node of the attempt by its rank, its own time and the median of the others', in milliseconds a step."""

    node_rank: int
    own_ms: float
    median_ms: float

    def sentence(self, instance: str) -> str:
        return (
            f"{instance} needs {self.own_ms:.0f} ms a step where the others need {self.median_ms:.0f}, "
            f"for {SLOW_LEAST_S / 60:.0f} minutes and more: it is swapped after the next save"
        )


def slow_nodes(node_ms: Sequence[float]) -> dict[int, Straggler]:
    """Return the nodes that were slow in this report, by node rank."""
    found = {}
    for rank, own_ms in enumerate(node_ms):
        others = [*node_ms[:rank], *node_ms[rank + 1 :]]
        if not others or min(node_ms) <= 0:
            continue
        median_ms = median(others)
        if own_ms > SLOW_FACTOR * median_ms and own_ms - median_ms > SLOW_LEAST_MS:
            found[rank] = Straggler(node_rank=rank, own_ms=own_ms, median_ms=median_ms)
    return found


def counted(before: Sequence[Slow], attempt: int, slow: Mapping[int, Straggler], now: float) -> tuple[Slow, ...]:
    """Return for how long each node that is slow now has been so, in reports running."""
    known = {one.node_rank: one.grown() for one in before if one.attempt == attempt}
    first = {rank: Slow(attempt=attempt, node_rank=rank, reports=1, since_at=now) for rank in slow}
    return tuple({**first, **known}[rank] for rank in slow)


def straggler(counts: Sequence[Slow], slow: Mapping[int, Straggler], now: float) -> Straggler | None:
    """Return the slowest of the nodes that were slow often and long enough, None when none was."""
    ripe = [slow[one.node_rank] for one in counts if one.ripe(now) and one.node_rank in slow]
    return max(ripe, key=lambda one: one.own_ms / one.median_ms, default=None)
