"""What a rank is at and how long that may take, for the agent that watches it. Standard library only."""

from __future__ import annotations

import time
from pathlib import Path

from job_contract.node_files import RankPulse, write_message

EVERY_S = 2.0

# Seconds that a phase may take without a sign. What is not listed may take as long as a save.
BOUNDS_S = {
    "starting": 420.0,  # 300 s for all ranks to meet, 120 s for the first collective
    "warming_up": 900.0,  # kernels and compilation
    "restoring": 1800.0,  # the slowest download of the gang
    "loading_weights": 1800.0,  # reading and hashing a file system that all nodes share
}
OTHER_BOUND_S = 1800.0

# A step that takes ten times as long as the slowest of the last ten is not slow, it hangs.
STEP_FACTOR, STEP_LEAST_S, FIRST_STEP_S = 10.0, 30.0, 900.0


class Pulse:
    """Replaces pulse/rank-<r>.json: at once for another phase, at most every two seconds for another step."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path, self._rank = run_dir / "pulse" / f"rank-{rank}.json", rank
        self._phase, self._at = "", 0.0

    def beat(self, phase: str, *, step: int = 0, slowest_s: float | None = None) -> None:
        """The agent can see the phase. `slowest_s` is the longest of the last steps, None before the first."""
        now = time.monotonic()
        if phase == self._phase and now - self._at < EVERY_S:
            return
        self._phase, self._at = phase, now
        bound_s = step_bound_s(slowest_s) if phase == "running" else BOUNDS_S.get(phase, OTHER_BOUND_S)
        write_message(self._path, RankPulse(rank=self._rank, phase=phase, step=step, bound_s=bound_s))


def step_bound_s(slowest_s: float | None) -> float:
    return FIRST_STEP_S if slowest_s is None else max(STEP_LEAST_S, STEP_FACTOR * slowest_s)
