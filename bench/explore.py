"""Can any order of events break a job? `python -m bench.explore` tries every order, call by call.

Domain and application run unchanged on the fakes of the tests. One step is one call of a port: every function (a door,
a step of the run machine, the dispatcher, the sweep) stops before each, and anything else may come in between. A world
is what all of them and AWS, the bucket and the nodes hold; each is visited once. In every world the rules of
exploration/invariants.py hold, and from every world the job can still end, with nothing more going wrong.

*Complete* scenarios visit every world there is, within what their name says, of a job of one training step; one
function is at work at once, beside AWS, the nodes and the deadlines. Those marked *reduced* leave out orders and worlds
that cannot differ in anything that matters: exploration/steps.py and exploration/canonical.py say which and why, and
tests/application/test_exploration.py holds them against the whole search.

The *bounded* ones allow everything that may go wrong at once (two interruptions, a cancel, a lost and a duplicated
event, a crash between any two calls, an early sweep, an early deadline), with two functions at work, beginning at
several moments of the job's life; they visit the worlds breadth first up to their bound, and run the job from each
world at the edge to its end. That product is not exhausted.

What bounds all of them: two functions at most are at work at once, and the deadlines of the run machine pass when
nothing else is left to do, or early once.

Then eight faults are built in, one at a time; each must be found, by the rule that it breaks.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from bench.exploration.faults import FAULTS
from bench.exploration.search import Explored, explore, later_on
from bench.exploration.world import Budgets, World, a_world
from bench.table import Row, report

LEAST_STATES = 100_000
MOST_S = 300
PROCESSES = 2
FAULT_STATES = 30_000

EVERYTHING = Budgets(interruptions=2, cancels=1, lost=1, duplicated=1, crashes=1, sweeps=1, timeouts=1)
HARSHER = replace(EVERYTHING, refusals=1, aborts=1)

MOMENTS: Mapping[str, tuple[Callable[[World], bool], tuple[str, ...]]] = {
    "bought": (lambda world: world.row.gang > 0, ()),
    "training": (lambda world: world.gang.started, ()),
    "last step": (lambda world: world.gang.step == 2, ()),
    "held": (lambda world: bool(world.row.held) and world.row.dispatchable, ("notice", "die")),
}
"""When a bounded scenario begins, and what has gone wrong just before."""


@dataclass(frozen=True)
class Scenario:
    """One search. `moment` None = from the submission on; `most_states` None = to the last world."""

    name: str
    budgets: Budgets
    at_once: int = 2
    steps: int = 2
    late: bool = False
    moment: str | None = None
    most_states: int | None = None
    reduced: bool = False

    def run(self, until: float) -> Explored:
        most_s = max(1.0, until - time.time())
        return explore(
            self.first(),
            at_once=self.at_once,
            most_states=self.most_states or 10**9,
            most_s=most_s,
            reduced=self.reduced,
        )

    def first(self) -> World:
        if self.moment is None:
            return a_world(self.budgets, late=self.late, steps=self.steps)
        reached, gone_wrong = MOMENTS[self.moment]
        world = a_world(Budgets(interruptions=1 if gone_wrong else 0), late=self.late, steps=self.steps)
        if gone_wrong:
            world = later_on(world, MOMENTS["training"][0])
        world = later_on(world, reached, *gone_wrong)
        left = max(0, self.budgets.interruptions - len(gone_wrong[:1]))
        world.budgets = replace(self.budgets, interruptions=left)
        return world


UNDISTURBED = Scenario("complete: nothing goes wrong, two training steps", Budgets(), at_once=1)
REDUCED = tuple(
    Scenario(f"complete, reduced: {name}", budgets, at_once=1, steps=1, reduced=True)
    for name, budgets in (
        ("two interruptions", Budgets(interruptions=2)),
        ("one interruption, a cancel and a duplicated event", Budgets(interruptions=1, cancels=1, duplicated=1)),
        ("one interruption, a lost event and a duplicated one", Budgets(interruptions=1, lost=1, duplicated=1)),
        ("one interruption, a cancel and a lost event", Budgets(interruptions=1, cancels=1, lost=1)),
        ("one interruption and one crash", Budgets(interruptions=1, crashes=1)),
        ("one interruption and one cancel", Budgets(interruptions=1, cancels=1)),
        ("one interruption and one duplicated event", Budgets(interruptions=1, duplicated=1)),
        ("one interruption and one lost event", Budgets(interruptions=1, lost=1)),
        (
            "a cancel, a lost event, a duplicated one and a crash",
            replace(EVERYTHING, interruptions=0, sweeps=0, timeouts=0),
        ),
    )
)
COMPLETE = (
    *REDUCED,
    Scenario("complete: nothing goes wrong, two functions at once", Budgets(), steps=1),
    UNDISTURBED,
    Scenario("complete: one cancel", Budgets(cancels=1), at_once=1, steps=1),
    Scenario("complete: one lost event", Budgets(lost=1), at_once=1, steps=1),
    Scenario("complete: one duplicated event", Budgets(duplicated=1), at_once=1, steps=1),
    Scenario("complete: one crash", Budgets(crashes=1), at_once=1, steps=1),
)
BOUNDED = (
    Scenario("bounded: everything, from the submission", EVERYTHING),
    *(Scenario(f"bounded: everything, from {moment}", EVERYTHING, moment=moment) for moment in MOMENTS),
    *(
        Scenario(f"bounded: everything, from {moment}, one function at once", EVERYTHING, at_once=1, moment=moment)
        for moment in ("training", "held")
    ),
    Scenario("bounded: everything and refused capacity, a stopped execution, late EC2", HARSHER, late=True),
)


def bounded(states: int) -> tuple[Scenario, ...]:
    return tuple(replace(one, most_states=states) for one in BOUNDED)


def find(name: str) -> Explored:
    """Return what a search sees with this fault built in."""
    fault = FAULTS[name]
    gc.disable()
    with fault.injected():
        return explore(a_world(fault.budgets), at_once=fault.at_once, most_states=FAULT_STATES, reduced=False)


def _run(scenario: Scenario, until: float) -> Explored:
    # Worlds are not garbage while they are searched, and this process ends with its search.
    gc.disable()
    return scenario.run(until)


def rows(states: int) -> Iterator[Row]:
    began = time.time()
    scenarios = [*COMPLETE, *bounded(states)]
    with multiprocessing.get_context("fork").Pool(PROCESSES, maxtasksperchild=1) as pool:
        searches = pool.imap(partial(_run, until=began + MOST_S - 60), scenarios, chunksize=1)
        faults = pool.imap(find, FAULTS, chunksize=1)
        total = 0
        for scenario, found in zip(scenarios, searches, strict=True):
            total += found.states
            yield _scenario_row(scenario, found)
        for name, found in zip(FAULTS, faults, strict=True):
            by = (found.broken or "nothing").split(": ")[0]
            yield Row(
                f"fault: {name}", f"after {found.states} states: {by}", FAULTS[name].breaks, by == FAULTS[name].breaks
            )
    yield Row("distinct states, all scenarios", total, f">= {LEAST_STATES}", total >= LEAST_STATES)
    seconds = time.time() - began
    yield Row("seconds on two cores", round(seconds), f"<= {MOST_S}", seconds <= MOST_S)


def _scenario_row(scenario: Scenario, found: Explored) -> Row:
    if found.broken:
        for label in found.path:
            print("   ", *(str(part)[:160] for part in label), file=sys.stderr)
        return Row(scenario.name, found.broken, "no rule broken", ok=False)
    whole = found.complete or scenario.most_states is not None
    edge = f"{found.unexplored} at the edge" if found.unexplored else "none left unexplored"
    return Row(
        scenario.name,
        f"{found.states} states, {found.steps} steps, {edge}, {found.cpu_s:.0f} CPU s",
        "no rule broken",
        whole,
    )


if __name__ == "__main__":
    sys.exit(report("explore", rows(int(sys.argv[1]) if sys.argv[1:] else 30_000)))
