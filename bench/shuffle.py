"""10,000 events shuffled, repeated, delayed or dropped: does every job end the same? `python -m bench.shuffle [seed]`

Application and domain run on the fakes, in the world of exploration/, driven by a seeded random scheduler: events come
in any order, some twice, some never, and functions are interrupted by others between their calls.

What is the same, whatever happened: the job completes; its head names its newest commit, every attempt began where the
one before had got to; no machine is left; one result was told; fleets bought <= 1 + losses, where a loss is a machine
that was taken away, an event that was dropped, or a deadline of the run machine that passed early.

What is equal to the last field of the row and the last call of EC2:
- *repeats*: the same run with every event delivered twice in a row, and old ones again at random later moments. (A
  repeated wake-up of the dispatcher is repeated at once only: later, it is a wake-up of its own.)
- *permutations of what the nodes tell within one attempt*: all but COUNTERS of the row, which count the phases that the
  job was seen to pass: a node's «heard» that comes after its save is not told as a phase of its own.
What is not equal: runs with dropped events, and facts of AWS against those of the nodes. Which of the two ends an
attempt decides what it is charged to, and whether machines are held.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from bench.exploration.invariants import check
from bench.exploration.search import ENDS, harsh_time
from bench.exploration.steps import NEVER_LOST, Label, Steps, finished
from bench.exploration.world import Broken, Budgets, World, a_world
from bench.table import Row, report
from holdfast.domain.job import Job
from holdfast.domain.phase import Phase

EVENTS = 10_000
EC2_CALLS = frozenset({"buy", "terminate"})
COUNTERS = frozenset({"version", "news", "generation"})
MOST_STEPS = 5_000
EVENT_LABELS = frozenset({"deliver", "again", "lose"})
UNLIKELY = {
    "again": 0.1, "lose": 0.03, "notice": 0.1, "crash": 0.02, "sweep": 0.05,
    "timeout": 0.2,
    "cancel": 0.01, "abort": 0.01, "refuse": 0.3,
}  # fmt: skip
"""Weights of steps against 1 for the others."""


@dataclass
class Run:
    """One job on its way, and what it asked of EC2."""

    world: World
    steps: Steps
    ec2: list[tuple[Any, ...]] = field(default_factory=list)
    events: int = 0
    losses: int = 0

    def do(self, label: Label) -> None:
        """The step is done; every rule still holds."""
        if label[0] == "call":
            call = self.world.flights[label[1]].activity.call
            assert call is not None
            if call.method in EC2_CALLS:
                self.ec2.append((call.method, *map(repr, call.args)))
        self.events += label[0] in EVENT_LABELS
        self.losses += label[0] in ("die", "lose") or label[-1] == "early"
        before, self.world = self.world, self.steps.after(self.world, label)
        check(before, self.world)

    def to_its_end(self) -> None:
        """What is at work comes to its end, one function after the other."""
        while self.world.flights:
            self.do(("call", 0))

    @property
    def job(self) -> Job:
        return self.world.row


def begin(budgets: Budgets, steps: Steps, *, training_steps: int = 3, late: bool = False) -> Run:
    world = a_world(budgets, steps=training_steps, late=late)
    world.store.rows[world.row.id] = replace(world.row, attempts_limit=1_000)
    return Run(world, steps)


# -- anything goes -----------------------------------------------------------------------------------------------------


def shuffled(rng: random.Random, steps: Steps) -> Run:
    """Return a job that has come to its end through everything at once."""
    budgets = Budgets(interruptions=rng.randint(0, 4), lost=2, duplicated=8, crashes=2, sweeps=2, timeouts=1)
    return to_the_end(rng, begin(budgets, steps))


def to_the_end(rng: random.Random, run: Run) -> Run:
    """Return the run when its job is over. Raises Broken when a rule does not hold, or it does not end."""
    for _ in range(MOST_STEPS):
        if finished(run.world):
            return run
        labels = list(run.steps.enabled(run.world))
        run.do(rng.choices(labels, [UNLIKELY.get(label[0], 1.0) for label in labels])[0])
    raise Broken(ENDS, f"not after {MOST_STEPS} steps: {run.job}")


def wrong_end(run: Run) -> str | None:
    """Return what is wrong with how the job ended, None when nothing is."""
    world, job = run.world, run.job
    if job.phase is not Phase.COMPLETED:
        return f"{job.phase}: {job.reason}"
    if world.head is None or world.head.pointer != world.commits[-1]:
        return f"the head names {world.head and world.head.save}, the newest commit is {world.commits[-1]}"
    steps_saved = [pointer.step for pointer in world.commits]
    if steps_saved != sorted(set(steps_saved)) or steps_saved[-1] != world.steps:
        return f"steps were trained twice or not at all: {steps_saved}"
    if world.live:
        return f"{len(world.live)} machines are left"
    if len(world.results) != 1:
        return f"{len(world.results)} results"
    if len(world.fleets.answers) > 1 + run.losses:
        return f"{len(world.fleets.answers)} fleets for {run.losses} losses"
    return None


def anything_goes(seed: int, events: int) -> Iterator[Row]:
    rng = random.Random(seed)
    done, jobs, fleets, losses, wrong = 0, 0, 0, 0, []
    while done < events:
        run = shuffled(rng, Steps(at_once=4))
        why = wrong_end(run)
        wrong += [why] if why else []
        done, jobs = done + run.events, jobs + 1
        fleets, losses = fleets + len(run.world.fleets.answers), losses + run.losses
    yield Row("events shuffled, repeated, delayed or dropped", done, f">= {events}", done >= events)
    yield Row("fleets bought, against 1 a job and 1 a loss", fleets, f"<= {jobs} + {losses}", fleets <= jobs + losses)
    yield Row(f"jobs of {jobs} that did not end as they should", len(wrong), f"0 {wrong[:1] or ''}", not wrong)


def the_rules_hold(seed: int, jobs: int) -> Row:
    """Return whether jobs that are cancelled, refused capacity or stopped from outside too keep the rules and end."""
    rng, broken = random.Random(seed), list[str]()
    for _ in range(jobs):
        budgets = Budgets(
            interruptions=rng.randint(0, 3), cancels=rng.randint(0, 1), lost=2, duplicated=3, crashes=2, sweeps=2,
            timeouts=1, refusals=rng.randint(0, 2), aborts=rng.randint(0, 1),
        )  # fmt: skip
        run = begin(budgets, Steps(at_once=rng.randint(1, 4)), late=rng.random() < 0.5)
        try:
            to_the_end(rng, run)
        except Broken as rule:
            broken.append(str(rule))
    name = f"of {jobs} jobs cancelled, refused and stopped too, broke a rule or did not end"
    return Row(name, len(broken), f"0 {broken[:1] or ''}", not broken)


# -- equal to the last field -------------------------------------------------------------------------------------------


def in_turn(seed: int, steps: Steps, after_each: Callable[[Run, Label], None]) -> Run:
    """Return a job driven by this seed, one function after the other; `after_each` may do something more."""
    rng, run = random.Random(seed), begin(Budgets(interruptions=2), steps)
    for _ in range(MOST_STEPS):
        if finished(run.world):
            return run
        label = rng.choice(sorted(run.steps.enabled(run.world), key=repr))
        run.do(label)
        run.to_its_end()
        if label[0] == "deliver":
            after_each(run, label)
    raise Broken(ENDS, f"not after {MOST_STEPS} steps: {run.job}")


def repeated(seed: int, steps: Steps) -> Run:
    """Return the job of `in_turn` with every event delivered again, at once and later."""
    rng, past = random.Random(-seed), list[Label]()

    def again(run: Run, label: Label) -> None:
        chosen = [label, *rng.sample(past, min(2, len(past)))]
        if label[1][0] not in NEVER_LOST | {"dispatch"}:
            past.append(label)
        for one in chosen:
            run.world = run.world.copy()
            run.world.send(*one[1])
            run.do(one)
            run.to_its_end()

    return in_turn(seed, steps, again)


def repeats_change_nothing(seed: int, jobs: int) -> Row:
    events, differ = 0, []
    for number in range(seed, seed + jobs):
        once, twice = in_turn(number, Steps(1), lambda run, label: None), repeated(number, Steps(1))
        events += twice.events
        if (once.job, once.ec2, once.world.store.owners) != (twice.job, twice.ec2, twice.world.store.owners):
            differ.append(number)
    return Row(
        f"jobs of {jobs} changed by {events} repeated deliveries", len(differ), f"0 {differ[:1] or ''}", not differ
    )


def told_of_one_attempt(ending: str) -> Run:
    """Return a job whose nodes have told all of one attempt, and nobody has listened yet."""
    run = begin(Budgets(interruptions=1), Steps(1), training_steps=2)
    nodes = ("gang", "die") if ending == "broken" else ("gang",)
    while not (run.world.gang.over and run.world.gang.started):
        labels = list(run.steps.enabled(run.world))
        told = run.world.gang.attempt == 1
        if told and ending != "finished" and run.world.budgets.interruptions and run.world.gang.saved:
            labels = [label for label in labels if label[0] == "notice"]
        elif told:
            warned = [label for label in labels if label[0] == "deliver" and label[1][0] == "warned"]
            heard = [label for label in labels if label[1:] == ("hear",)]
            labels = warned or heard or [label for label in labels if label[0] in nodes]
        run.do(labels[0])
        run.to_its_end()
    return run


def order_changes_nothing(ending: str) -> Row:
    first = told_of_one_attempt(ending)
    facts = [message for message in first.world.messages if message[0] == "report"]
    rows, ec2, fields = set(), set(), set[str]()
    orders = list(itertools.permutations(facts))
    seen: Job | None = None
    for order in orders:
        run = Run(first.world, first.steps)
        for fact in order:
            run.do(("deliver", fact))
            run.to_its_end()
        while run.job.attempt_open:
            run.do(next(label for label in run.steps.enabled(run.world) if label[0] == "execution"))
            run.to_its_end()
        rows.add(repr(replace(run.job, **dict.fromkeys(COUNTERS, 0))))
        ec2.add(repr(run.ec2))
        seen = seen or run.job
        fields |= {name for name, value in vars(run.job).items() if value != vars(seen)[name]}
    more = sorted(fields - COUNTERS)
    value = f"{len(rows)} rows, {len(ec2)} lists of EC2 calls" + (f"; {more} differ" if more else "")
    name = f"{ending}: {len(orders)} orders of {len(facts)} facts"
    return Row(name, value, "1 row, 1 list of EC2 calls", (len(rows), len(ec2)) == (1, 1))


def rows(seed: int, events: int = EVENTS, jobs: int = 100) -> Iterator[Row]:
    with harsh_time():
        yield from anything_goes(seed, events)
        yield the_rules_hold(seed, 3 * jobs)
        yield repeats_change_nothing(seed, jobs)
        yield from (order_changes_nothing(ending) for ending in ("finished", "stopped", "broken"))


if __name__ == "__main__":
    began = time.time()
    code = report("shuffle", rows(int(sys.argv[1]) if sys.argv[1:] else 7))
    print(f"{time.time() - began:.0f} s")
    sys.exit(code)
