"""What a step takes while nothing but training goes on: what rank 0 shows, without starts, saves and evaluations."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from job_contract.node_files import MEASURED_STEPS, RankProgress
from job_contract.reports import Steady

SETTLE_STEPS = 10
"""So many steps after a start are slower: caches, allocators, compilers."""

SHOWN_SINCE = 2
"""So many times something new must have been shown since a disturbance was seen to be over."""

MOST_SAMPLES = 1_000
"""Of a long attempt every second sample is forgotten when there are so many."""

STEADY_STATES = frozenset({"running", "waiting_for_data"})
WAITS_MS = ("data_wait_ms", "comm_ms")


class SteadySteps:
    """Gathers means of MEASURED_STEPS steps that do not overlap; `memory_share` is the fullest GPU's, as far as known.

    Rank 0 shows means over its last steps, so those of a start, a save or an evaluation must have left them first.
    """

    def __init__(self) -> None:
        self._clear_from: int | None = None
        self._last_step, self._unsure = -1, 0
        self._new: deque[RankProgress] = deque(maxlen=MOST_SAMPLES)
        self._all: list[RankProgress] = []
        self._every, self._seen = 1, 0
        self.memory_share: float | None = None

    def look(self, progress: RankProgress, *, saving: bool) -> None:
        """What rank 0 shows now is a sample, if nothing but training went on in its steps."""
        if not progress.started or progress.step_ms is None:
            return
        if self._clear_from is None:
            self._clear_from = progress.step + SETTLE_STEPS
        disturbed = saving or progress.state not in STEADY_STATES
        if disturbed or self._unsure:
            self._clear_from = max(self._clear_from, progress.step)
        # Of what is shown after a disturbance the first may have been written before it ended.
        self._unsure = SHOWN_SINCE if disturbed else max(0, self._unsure - (progress.step != self._last_step))
        self._last_step = progress.step
        if progress.step - self._clear_from >= MEASURED_STEPS:
            self._clear_from = progress.step
            # Each node's own time would make a thousand samples of a large gang long.
            self._keep(replace(progress, node_ms=None))

    def saw_memory(self, shares: Sequence[float]) -> None:
        """The share of its memory that each GPU has in use; before the first sample it says nothing."""
        if self._all and shares:
            self.memory_share = max(*shares, self.memory_share or 0.0)

    def take(self) -> Steady | None:
        """Return what the samples since the last call say, None when there are none."""
        told = _steady(self._new)
        self._new.clear()
        return told

    def line(self, attempt: int, at: float) -> dict[str, object] | None:
        """Return what all samples say, as a line beside the curve; None when there are none."""
        whole = _steady(self._all, every=self._every)
        if whole is None:
            return None
        shares = [one.mfu for one in self._all if one.mfu is not None]
        told = {
            "step": self._all[-1].step,
            "attempt": attempt,
            "at": at,
            "steady": {name: value for name, value in vars(whole).items() if value is not None},
            "mfu": round(median(shares), 4) if shares else None,
            "gpu_memory": self.memory_share,
        }
        return {name: value for name, value in told.items() if value is not None}

    def _keep(self, sample: RankProgress) -> None:
        self._new.append(sample)
        if self._seen % self._every == 0:
            self._all.append(sample)
        self._seen += 1
        if len(self._all) >= MOST_SAMPLES:
            self._all, self._every = self._all[::2], 2 * self._every


def _steady(samples: Sequence[RankProgress], *, every: int = 1) -> Steady | None:
    if not samples:
        return None
    data_wait_ms, comm_ms = (_median([getattr(one, name) for one in samples]) for name in WAITS_MS)
    return Steady(
        steps=len(samples) * MEASURED_STEPS * every,
        world_size=samples[-1].world_size,
        step_ms=_median([one.step_ms for one in samples]) or 0.0,
        tokens_per_s=_median([one.tokens_per_s for one in samples]) or 0.0,
        data_wait_ms=data_wait_ms or 0.0,
        comm_ms=comm_ms,
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 2) if known else None
