"""What a rank is at and how long that may take, for the agent that watches it. Standard library only."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from job_contract.node_files import RankPulse, write_message

EVERY_S = 2.0

# Seconds that a phase may take without a sign. What is not listed may take as long as a save.
BOUNDS_S = {
    "starting": 420.0,  # 300 s for all ranks to meet, 120 s for the first collective
    "warming_up": 900.0,  # kernels and compilation
    "restoring": 1800.0,  # the slowest download of the gang
    "loading_weights": 1800.0,  # the next 16 MiB or tensor of a file system that all nodes share
}
OTHER_BOUND_S = 1800.0

# What is fetched for a rank comes at this rate at least: a fifth of the 0.781 Gbit/s that c7i.large, the smallest type
# of the samples, has without bursts (EC2 user guide, network specifications of compute optimized instances).
SLOWEST_FETCH_BYTES_PER_S = 20e6
FETCH_LEAST_S = 600.0

# A step that takes ten times as long as the slowest of the last ten is not slow, it hangs.
STEP_FACTOR, STEP_LEAST_S, FIRST_STEP_S = 10.0, 30.0, 900.0


@dataclass(frozen=True)
class Lack:
    """What a rank waits for that its agent fetches, and how many bytes that may be with all that is fetched before."""

    what: str
    size_bytes: int

    @property
    def bound_s(self) -> float:
        """Seconds after which it will not come any more."""
        return max(FETCH_LEAST_S, self.size_bytes / SLOWEST_FETCH_BYTES_PER_S)


class Pulse:
    """Replaces pulse/rank-<r>.json: at once for another phase, at most every two seconds for another step."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path, self._rank = run_dir / "pulse" / f"rank-{rank}.json", rank
        self._said, self._at = ("", ""), 0.0

    def beat(self, phase: str, *, step: int = 0, slowest_s: float | None = None, lack: Lack | None = None) -> None:
        """The agent can see the phase. `slowest_s` is the longest of the last steps, None before the first.

        The bound of a lack counts from the first such word, however often it is said.
        """
        now, said = time.monotonic(), (phase, lack.what if lack else "")
        if said == self._said and (lack or now - self._at < EVERY_S):
            return
        self._said, self._at = said, now
        bound_s = step_bound_s(slowest_s) if phase == "running" else BOUNDS_S.get(phase, OTHER_BOUND_S)
        pulse = RankPulse(rank=self._rank, phase=phase, step=step, bound_s=bound_s)
        write_message(self._path, replace(pulse, bound_s=lack.bound_s, waits_for=lack.what) if lack else pulse)


def step_bound_s(slowest_s: float | None) -> float:
    return FIRST_STEP_S if slowest_s is None else max(STEP_LEAST_S, STEP_FACTOR * slowest_s)
