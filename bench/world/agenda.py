"""Virtual time: what is due happens in order of time, and of planning where the times are equal."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Deed = Callable[[], object]


class Agenda:
    """`now` is seconds since 1970 and moves only from one deed to the next."""

    def __init__(self, now: float) -> None:
        self.now = now
        self._due: list[tuple[float, int, Deed]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, deed: Deed) -> None:
        """The deed happens `delay_s` from now."""
        heapq.heappush(self._due, (self.now + delay_s, next(self._order), deed))

    def pass_by(self, seconds: float) -> None:
        """A deed waits so long; what falls due meanwhile happens after it."""
        self.now += seconds

    def run(self, *, for_s: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Everything due within `for_s` has happened, or `until` has come true; returns whether it has."""
        end = self.now + for_s
        while not until():
            if not self._due or self._due[0][0] > end:
                self.now = max(self.now, end)
                return False
            at, _, deed = heapq.heappop(self._due)
            self.now = max(self.now, at)
            deed()
        return True
