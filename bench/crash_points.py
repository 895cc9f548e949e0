"""Does a job outlive the death of any function at any call? `python -m bench.crash_points` answers with a table.

A story is played once undisturbed, and every mutating AWS call of the doors is written down: one point per door,
operation and ordinal. Then it is played again for each point twice, with the function dying just before that call and
just after it; AWS delivers again as it does for that kind of event. Whatever dies: one job, one live fleet at every
moment, no machine left after the sweep, and the job ends soon, with one result. At last the product is damaged on
purpose: each damage must be found.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

from bench.table import Row, report
from bench.world.ec2 import INJECTED
from bench.world.forks import ChildFailed, Forks
from bench.world.nodes import Gang
from bench.world.template import ROOT
from bench.world.wire import Crash, Moment, Point
from bench.world.world import Problem, World, run_attempt
from holdfast.domain.errors import Raced, Unavailable
from holdfast.domain.ownership import ORPHAN_GRACE_S
from local.engine.capacity import Candidate, FleetRequest

WORKERS = 2
MOST_WALL_S = 300
LONGEST_S = 3600.0
LATER_S = 600.0
"""A crash may cost one redelivery of a queue (180 s), of an asynchronous call (60 s), or a wait for the next tick."""

DRAIN_S = 400.0
"""Longer than any redelivery that may still be on its way when the result is out."""

SWEEP_EVERY_S = 60.0
PROMISES = (
    "one job",
    "one live fleet",
    "closed means ended",
    "no orphan",
    "the job ends",
    "one result",
    "all news told",
    "attempts grow",
    "no dead letter",
    "no fault of ours",
)


@dataclass(frozen=True)
class Story:
    """One life of a job. `act` happens after each optimizer step; `prepare` before anything."""

    name: str
    act: Callable[[World, Gang], None] = lambda world, gang: None
    prepare: Callable[[World], None] = lambda world: None
    steps: int = 60
    phase: str = "completed"
    muted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """How a story went: the crashes that struck, what broke, when the job was over, the points that were passed."""

    crashes: tuple[Crash, ...]
    problems: tuple[Problem, ...]
    over_after_s: float
    points: tuple[Point, ...] = ()


def _at(attempt: int, step: int, deed: Callable[[World, Gang], None]) -> Callable[[World, Gang], None]:
    def act(world: World, gang: Gang) -> None:
        if (gang.attempt, gang.step) == (attempt, step):
            deed(world, gang)

    return act


def _cancel(world: World) -> None:
    for row in world.rows():
        control = {"schema": "holdfast.control/1", "job": row["id"], "action": "cancel"}
        world.send("ControlQueue", json.dumps(control))


def _take_back(world: World, gang: Gang) -> None:
    world.ec2.take_back(gang.roster.nodes[0].instance)


def _vanish(world: World, gang: Gang) -> None:
    for node in gang.roster.nodes:
        world.nodes[node.instance].die()
        world.ec2.take_back(node.instance)


def _no_capacity_at_first(world: World) -> None:
    world.ec2.capacity.set_pool(slots=1)
    world.agenda.after(100.0, lambda: world.ec2.capacity.set_pool(slots=None))


def _purchases_unanswered(world: World) -> None:
    """CreateFleet works and nobody hears of it, in each try of the step; the machines show only after the last."""
    world.ec2.unanswered = 4
    world.ec2.capacity.visible_delay_s = 25.0


def _an_orphan(world: World) -> None:
    """A machine with our tag that no item knows: left by a release that never knew of it."""
    candidate = Candidate(instance_type="c7i.large", zone="us-east-1a")
    tags = (("holdfast:stack", "holdfast"), ("holdfast:job", "nobody"), ("holdfast:fleet", "nobody-1-0"))
    world.ec2.capacity.create_fleet(
        FleetRequest(candidates=(candidate,), market="spot", target=1, client_token="nobody", instance_tags=tags),
        now=world.agenda.now,
    )


STORIES = {
    story.name: story
    for story in (
        Story("interrupted", _at(1, 37, lambda world, gang: world.interrupt(gang.roster.nodes[1].instance))),
        Story("cancelled", _at(1, 37, lambda world, gang: _cancel(world)), steps=300, phase="cancelled"),
        Story(
            "cancelled while launching",
            prepare=lambda world: world.agenda.after(0.5, lambda: _cancel(world)),
            phase="cancelled",
        ),
        Story("stopped by hand", _at(1, 37, lambda world, gang: world.machine.abort(f"{gang.spec.job}-1"))),
        Story("taken without notice", _at(1, 37, _take_back)),
        Story("all nodes silent", _at(1, 37, _vanish), muted=("OnInstanceStateChange",)),
        Story("no capacity at first", prepare=_no_capacity_at_first),
        Story("purchases unanswered", prepare=_purchases_unanswered),
        Story("orphan", prepare=_an_orphan),
    )
}  # fmt: skip
MAIN = "interrupted"


def play(name: str, strikes: Callable[[Crash], bool] = lambda crash: False) -> Verdict:
    """Return how the story went; the function at work dies wherever `strikes` says so."""
    story = STORIES[name]
    world = World(strikes=strikes, muted=story.muted)
    world.stepped = partial(story.act, world)
    with world:
        story.prepare(world)
        _submit_three_times(world, story)
        begun_at = world.agenda.now
        world.agenda.run(for_s=LONGEST_S, until=lambda: bool(world.results))
        over_after_s = world.agenda.now - begun_at
        _sweep_up(world)
        _judge(world, story, over_after_s)
        return Verdict(tuple(world.wire.crashed), tuple(world.problems), over_after_s, tuple(world.wire.points))


def _submit_three_times(world: World, story: Story) -> None:
    body = json.loads((ROOT / "events" / "job-request.json").read_text())
    body["training"]["steps"] = story.steps
    text = json.dumps(body)
    world.send("RequestQueue", text)
    world.send("RequestQueue", text)
    world.agenda.after(40.0, lambda: world.send("RequestQueue", text))


def _sweep_up(world: World) -> None:
    """Redeliveries have come in, and the sweep has run often enough to end what nobody owns."""
    world.ticking = False
    world.agenda.run(for_s=DRAIN_S)
    world.agenda.run(for_s=max(0.0, ORPHAN_GRACE_S + 1 - DRAIN_S))
    world.ticking = True
    world.start_ticking("Sweep")
    world.agenda.run(for_s=3.5 * SWEEP_EVERY_S)


def _judge(world: World, story: Story, over_after_s: float) -> None:
    rows = world.rows()
    if len(rows) != 1:
        world.found("one job", f"{len(rows)} rows: {', '.join(row['pk'] for row in rows)}")
    for row in rows:
        if row["phase"] != story.phase or row["attempt_open"]:
            world.found("the job ends", f"{row['phase']}, open: {row['attempt_open']}, after {over_after_s:.0f} s")
        told = {news["id"] for news in world.told}
        missing = {f"{row['id']}#{number}" for number in range(1, int(row["news"]) + 1)} - told
        if missing:
            world.found("all news told", f"never told: {', '.join(sorted(missing))}")
    running = [one.name for one in world.machine.executions.values() if one.status == "RUNNING"]
    if running:
        world.found("the job ends", f"still running: {', '.join(running)}")
    if world.ec2.live:
        world.found("no orphan", f"left: {', '.join(one.instance_id for one in world.ec2.live)}")
    if len({result["id"] for result in world.results}) != 1:
        world.found("one result", f"ids: {sorted({result['id'] for result in world.results})}")
    dead = sum(len(queue.dead) for queue in world.queues.values()) + len(world.failed_calls)
    if dead:
        world.found("no dead letter", f"{dead} given up: {', '.join(door for door, _ in world.failed_calls)}")
    for door, error in world.raised:
        if not isinstance(error, Unavailable | Raced) and INJECTED not in str(error):
            world.found("no fault of ours", f"{door}: {error!r}")


# -- points ----------------------------------------------------------------------------------------------------------


def crashes_of(points: Iterable[Point]) -> list[Crash]:
    """Return two crashes a point: just before the call, and just after it."""
    return [Crash(point, moment) for point in points for moment in Moment]


def seeded(crashes: Sequence[Crash], count: int, seed: int) -> list[Crash]:
    """Return a sample that is the same for the same seed, with as many doors in it as the count allows."""
    draw = random.Random(seed)
    by_door: dict[str, list[Crash]] = {}
    for crash in sorted(crashes):
        by_door.setdefault(crash.point.door, []).append(crash)
    for found in by_door.values():
        draw.shuffle(found)
    rounds = max(map(len, by_door.values()))
    spread = [found[turn] for turn in range(rounds) for found in by_door.values() if turn < len(found)]
    return spread[:count]


def explore(name: str, wanted: Callable[[Crash], bool], slots: int = WORKERS) -> tuple[Verdict, dict[Crash, Verdict]]:
    """Return how the story goes undisturbed, and with each of the wanted crashes, one at a time."""
    with Forks(slots) as forks:

        def branches(crash: Crash) -> bool:
            return not forks.in_child and wanted(crash) and forks.branch(crash)

        def playing() -> Verdict:
            return play(name, branches)

        try:
            calm = playing()
        except BaseException as error:
            if forks.in_child:
                forks.finish(partial(_raise, error))
            raise
        if forks.in_child:
            forks.finish(lambda: replace(calm, points=()))
    return calm, {crash: _late(verdict, calm) for crash, verdict in forks.results.items()}


def _raise(error: BaseException) -> None:
    raise error


def _late(verdict: Verdict | ChildFailed, calm: Verdict) -> Verdict:
    """Return the verdict, with a late end among its problems."""
    if isinstance(verdict, ChildFailed):
        return Verdict((), (Problem("the bench works", str(verdict)),), 0.0)
    allowed_s = calm.over_after_s + LATER_S
    if verdict.over_after_s <= allowed_s:
        return verdict
    late = Problem("the job ends", f"after {verdict.over_after_s:.0f} s; {allowed_s:.0f} s are allowed")
    return replace(verdict, problems=(*verdict.problems, late))


# -- damages ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _two_purchases() -> Iterator[None]:
    """Each call of CreateFleet has a token of its own, and nobody looks by tag for what an earlier one brought."""
    from holdfast.adapters.fleets_ec2 import Ec2Fleets
    from holdfast.application.launch import Launch

    request, numbers = Ec2Fleets._request, iter(range(10**6))

    def another(self: Ec2Fleets, *arguments: Any) -> dict[str, Any]:
        return {**request(self, *arguments), "ClientToken": f"token-{next(numbers)}"}

    with mock.patch.object(Ec2Fleets, "_request", another), mock.patch.object(Launch, "_shown", lambda *_: []):
        yield


@contextlib.contextmanager
def _accepted_in_two_writes() -> Iterator[None]:
    """The row is written first and what belongs to it afterwards, not in one transaction."""
    table = _job_table()
    create = table.create

    def twice(self: Any, job: Any, *rest: Any) -> bool:
        from holdfast.adapters.job_table import row_of

        if not self._put_new(row_of(job)):
            return False
        with mock.patch.object(self, "_put", partial(_put_old, self)):
            return bool(create(self, job, *rest))

    with mock.patch.object(table, "create", twice):
        yield


def _put_old(table: Any, *arguments: Any, new: bool = False) -> dict[str, Any]:
    return dict(type(table)._put(table, *arguments))


@contextlib.contextmanager
def _starts_forgotten() -> Iterator[None]:
    """The sweep does not start what a dispatch left without an execution."""
    from holdfast.application.sweep import Sweep

    with mock.patch.object(Sweep, "_never_started", lambda *_: ()):
        yield


@contextlib.contextmanager
def _nothing_released() -> Iterator[None]:
    """The release sees no machine of the job."""
    from holdfast.adapters.fleets_ec2 import Ec2Fleets

    with (
        mock.patch.object(Ec2Fleets, "of_job", lambda *_: []),
        mock.patch.object(Ec2Fleets, "described", lambda *_: []),
        mock.patch("holdfast.domain.ownership.FleetIntent.may_still_show", lambda *_: False),
    ):
        yield


@contextlib.contextmanager
def _dispatched_early() -> Iterator[None]:
    """A job is dispatched again before its last attempt is closed."""
    from holdfast.domain.job import Job
    from holdfast.domain.phase import WAITING

    with mock.patch.object(Job, "dispatchable", property(lambda job: job.phase in WAITING)):
        yield


@contextlib.contextmanager
def _requests_not_deduplicated() -> Iterator[None]:
    """A request that comes again is not known, and writes its row again."""
    from holdfast.application import intake

    put = _job_table()._put

    def always(self: Any, table: str, data: Mapping[str, Any], *, new: bool = False) -> dict[str, Any]:
        return dict(put(self, table, data, new=new and data.get("sk") != "ROW"))

    with (
        mock.patch.object(_job_table(), "_put", always),
        mock.patch.object(intake, "accepted_before", lambda *_: False),
    ):
        yield


def _job_table() -> Any:
    from holdfast.adapters.job_table import JobTable

    return JobTable


def _closed_before_released() -> Mapping[str, Any]:
    """Return the machine with its last two steps in the wrong order."""
    text = json.dumps(run_attempt())
    for one, other in (("ReleaseFleet", "?"), ("CloseAttempt", "ReleaseFleet"), ("?", "CloseAttempt")):
        text = text.replace(f'"FunctionName": "{one}"', f'"FunctionName": "{other}"')
    return dict(json.loads(text))


DAMAGES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "a new client token each time": _two_purchases,
    "request accepted in two writes": _accepted_in_two_writes,
    "no start in the sweep": _starts_forgotten,
    "release that ends nothing": _nothing_released,
    "dispatch before the close": _dispatched_early,
    "request without dedup": _requests_not_deduplicated,
    "close before release": lambda: mock.patch(f"{World.__module__}.run_attempt", _closed_before_released),
}


TELLING = {
    "a new client token each time": ("launch_fleet", "CreateFleet", Moment.AFTER),
    "request accepted in two writes": ("accept_request", "PutItem", Moment.AFTER),
    "no start in the sweep": ("dispatch_queue", "TransactWriteItems", Moment.AFTER),
    "dispatch before the close": ("release_fleet", "TerminateInstances", Moment.BEFORE),
}
"""Damages that only a crash brings to light, and which crashes do."""


def found_by(damage: str) -> str:
    """Return the first crash of the main story that shows the damage, and what it broke; nothing while it hides."""

    def wanted(crash: Crash) -> bool:
        return (crash.point.door, crash.point.operation, crash.moment) == TELLING.get(damage)

    with DAMAGES[damage]():
        calm, verdicts = explore(MAIN, wanted)
    if calm.problems:
        return f"no crash: {calm.problems[0].kind}"
    for crash, verdict in sorted(verdicts.items()):
        if verdict.problems:
            return f"{crash}: {verdict.problems[0].kind}"
    return ""


# -- the bench -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    story: str
    crash: Crash | None
    verdict: Verdict


def main() -> int:
    """The table is printed; return 0 when every promise was kept at every point."""
    begun = time.monotonic()
    runs = list(_all_runs())
    for run in runs:
        for problem in run.verdict.problems:
            print(f"{run.story}, {run.crash or 'no crash'}: {problem.kind}: {problem.text}")
    findings = {damage: found_by(damage) for damage in DAMAGES}
    return report("crash-points", _rows(runs, findings, time.monotonic() - begun))


def _all_runs() -> Iterator[Run]:
    """Every point of the main story; of the others, calls that no story before had."""
    known: set[tuple[str, str]] = set()
    for name in STORIES:
        before = frozenset(known)
        calm, verdicts = explore(name, lambda crash, b=before: (crash.point.door, crash.point.operation) not in b)
        known |= {(point.door, point.operation) for point in calm.points}
        yield Run(name, None, calm)
        yield from (Run(name, crash, verdict) for crash, verdict in sorted(verdicts.items()))


def _rows(runs: Sequence[Run], findings: Mapping[str, str], wall_s: float) -> Iterator[Row]:
    calm = [run for run in runs if run.crash is None]
    struck = [run for run in runs if run.crash is not None]
    for run in calm:
        demand = "seconds of its own time; nothing broken"
        yield Row(f"{run.story}, undisturbed", round(run.verdict.over_after_s), demand, not run.verdict.problems)
    main_points = len(calm[0].verdict.points)
    mine = {run.crash.point for run in struck if run.crash and run.story == MAIN}
    for door, count in sorted(Counter(point.door for point in mine).items()):
        yield Row(f"points of {door}", count, "each crashed before and after", count > 0)
    more = {(run.story, run.crash.point) for run in struck if run.crash and run.story != MAIN}
    whole = len(mine) == main_points > 0
    yield Row("points of the clean story", main_points, "every mutating call of its doors", whole)
    yield Row("points of other stories", len(more), "calls that the clean story does not make", bool(more))
    yield Row("runs with a crash", len(struck), "two a point", len(struck) == 2 * (main_points + len(more)))
    broken = Counter(kind for run in struck for kind in {problem.kind for problem in run.verdict.problems})
    for promise in (*PROMISES, *sorted(broken.keys() - set(PROMISES))):
        yield Row(f"runs that broke: {promise}", broken[promise], "0", broken[promise] == 0)
    slowest = max(run.verdict.over_after_s for run in struck)
    in_time = not broken["the job ends"]
    yield Row("latest end, s of its own time", round(slowest), f"<= undisturbed + {LATER_S:.0f}", in_time)
    for damage, where in findings.items():
        yield Row(f"damage: {damage}", where or "not found", "found", bool(where))
    yield Row("wall, s", round(wall_s, 1), f"<= {MOST_WALL_S}", wall_s <= MOST_WALL_S)


if __name__ == "__main__":
    sys.exit(main())
