"""Declares ranks hung by what they said themselves: a phase, and how long it may take without another sign."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from job_contract.node_files import RankPulse, read_message
from job_contract.version import ContractError

STOPPED = frozenset("TtD")
"""States of /proc in which a process does nothing: stopped, traced, and waiting for a device."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """The rank to blame as far as this node can tell; `stopped`: its process does nothing at all."""

    pulse: RankPulse
    silent_s: float
    stopped: bool

    @property
    def reason(self) -> str:
        why = "; its process is stopped" if self.stopped else ""
        why += f"; it waits for {self.pulse.waits_for}" if self.pulse.waits_for else ""
        return (
            f"rank {self.pulse.rank} made no progress for {self.silent_s:.0f} s in phase {self.pulse.phase} "
            f"at step {self.pulse.step} (bound {self.pulse.bound_s:.0f} s){why}"
        )


class HangWatch:
    """Looks at the pulses of this node's ranks. A rank that never wrote one is not watched.

    All ranks of a gang stop when one does. A node that sees which of its processes is stopped speaks at once, the
    others `grace_s` later, so that the first report names the rank.
    """

    def __init__(self, run_dir: Path, *, grace_s: float, clock: Callable[[], float]) -> None:
        self._folder, self._grace_s, self._clock = run_dir / "pulse", grace_s, clock
        self._files: dict[str, tuple[int, int]] = {}
        self._seen: dict[int, tuple[RankPulse, float]] = {}

    def look(self, pids: Mapping[int, int]) -> Hang | None:
        """Return the hang of a rank of `pids` whose bound has passed, None while all of them are within theirs."""
        now = self._clock()
        self._read(now)
        overdue = [rank for rank, (pulse, at) in self._seen.items() if rank in pids and now - at > pulse.bound_s]
        if not overdue:
            return None
        stopped = [rank for rank in overdue if state_of(pids[rank]) in STOPPED]
        suspect = (stopped or sorted(overdue, key=lambda rank: self._seen[rank][0].step))[0]
        pulse, at = self._seen[suspect]
        if not stopped and now - at <= pulse.bound_s + self._grace_s:
            return None
        return Hang(pulse=pulse, silent_s=now - at, stopped=bool(stopped))

    def phases(self) -> dict[int, RankPulse]:
        """Return the newest pulse by rank."""
        return {rank: pulse for rank, (pulse, _) in self._seen.items()}

    def _read(self, now: float) -> None:
        for path in self._folder.glob("rank-*.json"):
            try:
                status = os.stat(path)
                if self._files.get(path.name) == (status.st_ino, status.st_mtime_ns):
                    continue
                pulse = read_message(path, RankPulse)
            except (FileNotFoundError, ContractError, ValueError):
                continue
            self._files[path.name] = status.st_ino, status.st_mtime_ns
            if pulse is not None:
                self._seen[pulse.rank] = pulse, now


def state_of(pid: int) -> str:
    """Return the process's state as /proc writes it, empty when it is gone."""
    try:
        # The name before it may hold spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
