"""Which node of a gang is slow by its own doing. A synchronous gang is as slow as its slowest node.

The nodes' own times exclude what they waited for each other, so only differences between nodes show in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

SLOW_FACTOR = 1.3
"""So much slower than the median of the others."""

SLOW_LEAST_MS = 10.0
"""And by so much: below that it is noise of a short step."""

SLOW_REPORTS = 5
"""In so many reports running: a slow disk, or one long garbage collection, passes."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """In how many reports running a node was slow. The attempt is kept with it, since ranks change hands."""

    attempt: int
    node_rank: int
    reports: int


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A node of the attempt by its rank, its own time and the median of the others', in milliseconds a step."""

    node_rank: int
    own_ms: float
    median_ms: float

    def sentence(self, instance: str) -> str:
        return (
            f"{instance} needs {self.own_ms:.0f} ms a step where the others need {self.median_ms:.0f}, "
            f"in {SLOW_REPORTS} reports running: it is swapped after the next save"
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


def counted(before: Sequence[Slow], attempt: int, slow: Mapping[int, Straggler]) -> tuple[Slow, ...]:
    """Return in how many reports running each node that is slow now has been so."""
    known = {one.node_rank: one.reports for one in before if one.attempt == attempt}
    return tuple(Slow(attempt=attempt, node_rank=rank, reports=known.get(rank, 0) + 1) for rank in slow)


def straggler(counts: Sequence[Slow], slow: Mapping[int, Straggler]) -> Straggler | None:
    """Return the slowest of the nodes that were slow often enough, None when none was."""
    ripe = [slow[one.node_rank] for one in counts if one.reports >= SLOW_REPORTS and one.node_rank in slow]
    return max(ripe, key=lambda one: one.own_ms / one.median_ms, default=None)
