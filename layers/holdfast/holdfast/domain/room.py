"""How much of one limit is free from now on, if everything in flight ends at its run limit and promises are kept."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import accumulate

FOR_EVER = float("inf")


class Room:
    """A step function of time: `free[n]` is free from `times[n]` until the next time. It never looks before `now`."""

    def __init__(self, limit: int, *, now: float, ends: Iterable[tuple[float, int]]) -> None:
        """`ends`: when each place in flight ends, and what it takes until then."""
        gains: dict[float, int] = {}
        for at, amount in ends:
            gains[at] = gains.get(at, 0) + amount
        self.limit = limit
        self.times = [now, *sorted(gains)]
        self.free = list(accumulate((gains[at] for at in self.times[1:]), initial=limit - sum(gains.values())))
        self._lows: list[int] | None = None

    @property
    def now(self) -> int:
        """What is free now."""
        return self.free[0]

    def lowest(self, start: float, end: float) -> int:
        """Return the least that is free at any moment from start until before end."""
        first = max(0, bisect_right(self.times, start) - 1)
        last = max(first, bisect_left(self.times, end) - 1)
        if first:
            return min(self.free[first : last + 1])
        if self._lows is None:
            self._lows = list(accumulate(self.free, min))
        return self._lows[last]

    def earliest(self, amount: int, length: float, after: float) -> float:
        """Return the first moment from `after` on at which so much is free for so long; FOR_EVER when there is none."""
        start = max(after, self.times[0])
        for n in range(max(0, bisect_right(self.times, start) - 1), len(self.times)):
            if self.times[n] >= start + length:
                break
            if self.free[n] < amount:
                start = self.times[n + 1] if n + 1 < len(self.times) else FOR_EVER
        return start

    def take(self, amount: int, start: float, end: float) -> None:
        """So much less is free from start until before end."""
        if end <= start or not amount:
            return
        for at in (start, end):
            n = bisect_left(self.times, at)
            if at != FOR_EVER and (n == len(self.times) or self.times[n] != at):
                self.times.insert(n, at)
                self.free.insert(n, self.free[n - 1])
        for n in range(bisect_left(self.times, start), bisect_left(self.times, end)):
            self.free[n] -= amount
        self._lows = None
