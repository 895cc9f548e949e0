"""Every world that can be reached from the first, each once; and whether the job can end from each of them."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.exploration.activity import without_pauses
from bench.exploration.invariants import check
from bench.exploration.steps import Label, Steps, finished
from bench.exploration.world import Broken, World
from holdfast.domain import ownership

ENDS = "the job ends, and every machine with it"


@dataclass
class Explored:
    """What a search saw. `broken` is the first rule that did not hold, `path` the steps that led there."""

    states: int = 0
    steps: int = 0
    unexplored: int = 0
    ends: int = 0
    seconds: float = 0.0
    broken: str | None = None
    path: list[Label] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.broken is None and self.unexplored == 0


@contextmanager
def harsh_time() -> Iterator[None]:
    """No grace protects anybody: what the order of reads and writes does not guarantee is found."""
    grace = ownership.ORPHAN_GRACE_S
    ownership.ORPHAN_GRACE_S = 0
    with without_pauses():
        try:
            yield
        finally:
            ownership.ORPHAN_GRACE_S = grace


def explore(first: World, *, at_once: int = 2, most_states: int = 10**9, most_s: float = 1e9) -> Explored:
    """All worlds are visited, breadth first, until a rule does not hold or the bound is reached.

    From what the bound left unexplored the job is run to its end by a fair scheduler; from all others an end must be
    reachable in the graph, so under fair scheduling every path ends.
    """
    with harsh_time():
        return _Search(first, at_once).run(most_states, time.monotonic() + most_s)


def later_on(world: World, reached: Callable[[World], bool], *forced: str) -> World:
    """The world at the first moment at which `reached` is true, on the way that a fair scheduler takes; the functions
    at work then have come to their end.

    `forced` are kinds of steps that go wrong first, one of each.
    """
    with harsh_time():
        steps = Steps(at_once=1)
        for kind in forced:
            world = steps.after(world, next(label for label in steps.enabled(world) if label[0] == kind))
        last: dict[Label, int] = {}
        for turn in range(FAIR_STEPS):
            if reached(world):
                while world.flights:
                    world = steps.after(world, ("call", 0))
                return world
            label = least_lately(steps, world, last)
            last[label] = turn
            world = steps.after(world, label)
    raise Broken(ENDS, f"{FAIR_STEPS} steps without what was waited for")


def least_lately(steps: Steps, world: World, last: dict[Label, int]) -> Label:
    """The step that is owed and was done least lately. Raises Broken when there is none."""
    owed = [label for label in steps.enabled(world) if label[0] not in NOT_OWED]
    if not owed:
        raise Broken(ENDS, f"nothing can happen in {world.row.phase}")
    return min(owed, key=lambda label: last.get(label, -1))


class _Search:
    def __init__(self, first: World, at_once: int) -> None:
        self.steps = Steps(at_once)
        self.seen = {first.key(self.steps.activities.serials): 0}
        self.came_from: list[tuple[int, Label | None]] = [(0, None)]
        self.sources, self.targets = array("i"), array("i")
        self.ended: list[int] = []
        self.todo = deque([(0, first)])
        self.good: set[int] = set()
        self.walked: list[Label] = []
        self.found = Explored()

    def run(self, most_states: int, until: float) -> Explored:
        began = time.monotonic()
        while self.todo and len(self.seen) < most_states and time.monotonic() < until and not self.found.broken:
            self._expand(*self.todo.popleft())
        found = self.found
        found.states, found.steps, found.unexplored = len(self.seen), len(self.sources), len(self.todo)
        if not found.broken:
            self._all_end()
        found.ends = len(self.ended)
        found.seconds = time.monotonic() - began
        return found

    def _expand(self, number: int, world: World) -> None:
        serials = self.steps.activities.serials
        if finished(world):
            self.ended.append(number)
        for label in self.steps.enabled(world):
            try:
                after = self.steps.after(world, label)
                check(world, after)
            except Broken as broken:
                self.found.broken, self.found.path = str(broken), [*self._path(number), label]
                return
            key = after.key(serials)
            target = self.seen.get(key)
            if target is None:
                target = self.seen[key] = len(self.seen)
                self.came_from.append((number, label))
                self.todo.append((target, after))
            self.sources.append(number)
            self.targets.append(target)

    def _path(self, number: int) -> list[Label]:
        path: list[Label] = []
        while number:
            number, label = self.came_from[number]
            assert label is not None
            path.append(label)
        return path[::-1]

    def _all_end(self) -> None:
        """Sets `broken` when there is a world from which no end can be reached."""
        before: list[list[int]] = [[] for _ in self.seen]
        for source, target in zip(self.sources, self.targets, strict=True):
            before[target].append(source)
        good = bytearray(len(self.seen))
        self._spread(good, before, self.ended)
        for number, world in self.todo:
            if not good[number]:
                broken = self._ends_fairly(number, world, good)
                if broken:
                    self.found.broken, self.found.path = broken, [*self._path(number), *self.walked]
                    return
                self._spread(good, before, [number])
        stuck = good.find(0)
        if stuck >= 0:
            self.found.broken, self.found.path = ENDS, self._path(stuck)

    def _spread(self, good: bytearray, before: list[list[int]], reached: list[int]) -> None:
        """Everything that leads to what is good is good."""
        reached = list(reached)
        for number in reached:
            good[number] = 1
        while reached:
            for source in before[reached.pop()]:
                if not good[source]:
                    good[source] = 1
                    reached.append(source)

    def _ends_fairly(self, number: int, world: World, good: bytearray) -> str | None:
        """Return which rule broke on the way to an end, None when one was reached."""
        last: dict[Label, int] = {}
        passed: list[int] = []
        self.walked = []
        for turn in range(FAIR_STEPS):
            key = world.key(self.steps.activities.serials)
            known = self.seen.get(key)
            if finished(world) or key in self.good or (known is not None and good[known]):
                self.good.update(passed)
                return None
            passed.append(key)
            try:
                label = least_lately(self.steps, world, last)
                last[label] = turn
                self.walked.append(label)
                after = self.steps.after(world, label)
                check(world, after)
            except Broken as broken:
                return str(broken)
            world = after
        return f"{ENDS}: not after {FAIR_STEPS} steps from world {number}"


FAIR_STEPS = 2_000
NOT_OWED = frozenset({"crash", "lose", "again", "cancel", "notice", "refuse", "abort"})
"""Steps that nobody waits for."""
