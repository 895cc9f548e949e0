"""How the ranks of this node have ended, from their exit codes and from the outcomes that they wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agent.ranks import Crash, crash_of, worst
from agent.settings import Pace
from job_contract.node_files import Outcome


@dataclass(frozen=True)
class Ended:
    """All ranks have told their outcome; `troubles` are the processes that did not end with 0 after it."""

    outcome: Outcome
    troubles: tuple[str, ...]


class Exits:
    """An outcome is a rank's last word: how its process then ends, or that it does not, is no failure of the job.

    Frameworks abort or hang in their own teardown, after the training is whole and its last save written.
    """

    def __init__(
        self, ranks: Sequence[int], read: Callable[[int], Outcome | None], *, pace: Pace, clock: Callable[[], float]
    ) -> None:
        self.told: dict[int, Outcome] = {}
        self._ranks, self._read, self._pace, self._clock = ranks, read, pace, clock
        self._told_at = 0.0
        self._bad_since: float | None = None

    def look(self, codes: Mapping[int, int | None]) -> Crash | Ended | None:
        """Return what the exit codes by rank come to, None while that is open."""
        now = self._clock()
        for rank in self._ranks:
            if rank not in self.told and (outcome := self._read(rank)):
                self.told[rank], self._told_at = outcome, now
        running = None in codes.values()
        failed = {rank: code for rank, code in codes.items() if code and rank not in self.told}
        if failed:
            # The rank that failed first need not be the first to be gone; the others get a moment to say why.
            self._bad_since = self._bad_since or now
            return None if running and now - self._bad_since < self._pace.exits_settle_s else worst(failed)
        mute = [rank for rank in self._ranks if rank not in self.told]
        if running and (mute or now - self._told_at < self._pace.last_exit_s):
            return None
        if mute:
            reason = f"rank {mute[0]} ended with 0 and no outcome"
            return Crash(failure="crash", reason=reason, rank=mute[0], exit_code=0)
        return Ended(
            self.told[self._ranks[0]], tuple(_trouble(rank, code) for rank, code in codes.items() if code != 0)
        )


def _trouble(rank: int, code: int | None) -> str:
    return f"rank {rank} never ended" if code is None else crash_of(rank, code).reason
