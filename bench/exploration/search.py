"""Every world that can be reached from the first, each once; and whether the job can end from each of them."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from bench.exploration.activity import without_pauses
from bench.exploration.canonical import Canonical
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
    cpu_s: float = 0.0
    outcomes: set[str] = field(default_factory=set)
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


def explore(
    first: World, *, at_once: int = 2, most_states: int = 10**9, most_s: float = 1e9, reduced: bool = False
) -> Explored:
    """All worlds are visited, until a rule does not hold or the bound is reached: those in which least has gone wrong
    first, breadth first among them.

    A world that was visited with at least as much that may still go wrong is not visited again with less: whatever can
    happen to it could happen there. `reduced` leaves out more, see steps.py and canonical.py.

    From what the bound left unexplored the job is run to its end by a fair scheduler; from all others an end must be
    reachable in the graph by steps that are owed, so under fair scheduling every path ends.
    """
    with harsh_time():
        return _Search(first, at_once, reduced).run(most_states, time.monotonic() + most_s)


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


def outcome(world: World) -> str:
    """What a world in which nothing is left to do says of its job: the row but for its versions, and the head."""
    return f"{replace(world.row, version=0, news=0, generation=0)} {world.head}"


class _Search:
    """`seen`: for each world, the budgets apart, the numbers of those it was found with; none covers another."""

    def __init__(self, first: World, at_once: int, reduced: bool) -> None:
        self.reduced = reduced
        self.steps = Steps(at_once, reduced=reduced, judge=check)
        self.canonical = Canonical(self.steps.activities.serials)
        self.seen: dict[int, int | tuple[int, ...]] = {self._key(first): 0}
        self.budgets = [first.budgets]
        self.parents, self.labels = array("i", [0]), array("i", [0])
        self.label_of: dict[Label, int] = {}
        self.sources, self.targets = array("i"), array("i")
        self.count = 0
        self.ended: list[int] = []
        self.todo: dict[int, deque[tuple[int, World]]] = {0: deque([(0, first)])}
        self.all_budgets = first.budgets.left()
        self.good: set[int] = set()
        self.walked: list[Label] = []
        self.found = Explored()

    def run(self, most_states: int, until: float) -> Explored:
        began = time.process_time()
        found = self.found
        while self.todo and len(self.budgets) < most_states and time.monotonic() < until and not found.broken:
            spent = min(self.todo)
            self._expand(*self.todo[spent].popleft())
            if not self.todo[spent]:
                del self.todo[spent]
        found.states, found.steps = len(self.budgets), self.count
        found.unexplored = sum(map(len, self.todo.values()))
        if not found.broken:
            self._all_end()
        found.ends = len(self.ended)
        found.cpu_s = time.process_time() - began
        return found

    def _expand(self, number: int, world: World) -> None:
        if finished(world):
            self.ended.append(number)
            self.found.outcomes.add(outcome(world))
        label: Label = ()
        try:
            for label in self.steps.enabled(world):
                after = self.steps.after(world, label)
                check(self.steps.judged, after)
                target = self._number(self._key(after), number, label, after)
                self.count += 1
                if after.budgets is world.budgets:
                    self.sources.append(number)
                    self.targets.append(target)
        except Broken as broken:
            self.found.broken, self.found.path = str(broken), [*self._path(number), label]

    def _key(self, world: World) -> int:
        if self.reduced:
            return self.canonical.key(world)
        return hash((world.key(self.steps.activities.serials), world.budgets))

    def _number(self, key: int, source: int, label: Label, world: World) -> int:
        """The number of a world that can do all that this one can; this one's own when there is none yet."""
        budgets = world.budgets
        known = self.seen.get(key)
        numbers = () if known is None else known if isinstance(known, tuple) else (known,)
        for number in numbers:
            if self.budgets[number] is budgets or self.budgets[number].cover(budgets):
                return number
        new = len(self.budgets)
        self.seen[key] = (*numbers, new) if numbers else new
        self.budgets.append(budgets)
        self.parents.append(source)
        self.labels.append(self.label_of.setdefault(label, len(self.label_of)))
        self.todo.setdefault(self.all_budgets - budgets.left(), deque()).append((new, world))
        return new

    def _path(self, number: int) -> list[Label]:
        labels = list(self.label_of)
        path: list[Label] = []
        while number:
            path.append(labels[self.labels[number]])
            number = self.parents[number]
        return path[::-1]

    def _all_end(self) -> None:
        """Sets `broken` when there is a world from which no end can be reached without anything more going wrong."""
        good = bytearray(len(self.budgets))
        for number in self.ended:
            good[number] = 1
        self._spread(good)
        for number, world in [item for todo in self.todo.values() for item in todo]:
            if not good[number]:
                broken = self._ends_fairly(number, world, good)
                if broken:
                    self.found.broken, self.found.path = broken, [*self._path(number), *self.walked]
                    return
                good[number] = 1
        self._spread(good)
        stuck = good.find(0)
        if stuck >= 0:
            self.found.broken, self.found.path = ENDS, self._path(stuck)

    def _spread(self, good: bytearray) -> None:
        """Everything that leads to what is good is good."""
        sources, targets = self.sources[::-1], self.targets[::-1]
        changed = True
        while changed:
            changed = False
            for source, target in zip(sources, targets, strict=True):
                if good[target] and not good[source]:
                    good[source] = changed = True

    def _ends_fairly(self, number: int, world: World, good: bytearray) -> str | None:
        """Return which rule broke on the way to an end, None when one was reached."""
        last: dict[Label, int] = {}
        passed: list[int] = []
        self.walked = []
        for turn in range(FAIR_STEPS):
            key = self._key(world)
            known = self.seen.get(key)
            if finished(world) or key in self.good or (isinstance(known, int) and good[known]):
                self.good.update(passed)
                return None
            passed.append(key)
            try:
                label = least_lately(self.steps, world, last)
                last[label] = turn
                self.walked.append(label)
                after = self.steps.after(world, label)
                check(self.steps.judged, after)
            except Broken as broken:
                return str(broken)
            world = after
        return f"{ENDS}: not after {FAIR_STEPS} steps from world {number}"


FAIR_STEPS = 2_000
NOT_OWED = frozenset({"crash", "death", "lose", "again", "cancel", "notice", "refuse", "abort"})
"""Steps that nobody waits for."""
