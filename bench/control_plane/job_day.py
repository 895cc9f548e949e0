"""What a day of one job costs: state transitions, invocations and write units, counted on the real doors.

Sixteen spot nodes train for 24 hours, save at the automatic interval and lose one node five times; each loss is told by
a warning, by the node itself and by EC2's change of state. The nodes are scripted as the agent's own paces say; doors,
state machine, event sources, filters and batches are the shipped ones. Time is virtual.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from agent.settings import Pace
from bench.table import Row, show
from bench.world import ec2
from bench.world.ec2 import NOTICE_S
from bench.world.world import World, run_attempt
from job_contract import reports
from job_contract.checkpoint_layout import save_name
from job_contract.orders import Action, Orders, Wait, WaitItem, orders_key, wait_key
from job_contract.spec import JobSpec
from job_contract.version import decode
from local.engine.capacity import Instance
from tests import builders as b

NODES, RECOVERIES, DAY_S = 16, 5, 86_400.0
BOOT_S, START_S, SAVE_S = 150.0, 30.0, 20.0
STEP_S, PROGRESS_AFTER_S = 2.0, 7.0
TRANSITIONS, INVOCATIONS, WRITE_UNITS = 67, 200, 3000
INDEX_KEYS = {
    "waiting": ("waiting_team", "waiting_rank"),
    "alive": ("alive_shard",),
    "ended": ("ended_team", "ended_at"),
}
HASH = "0" * 64
STEADY = reports.Steady(
    steps=100, world_size=NODES, step_ms=1e3 * STEP_S, tokens_per_s=1e6, data_wait_ms=1.25, comm_ms=412.75
)


@dataclass
class Counts:
    invocations: Counter[str] = field(default_factory=Counter)
    write_units: Counter[str] = field(default_factory=Counter)


class Day(World):
    """A world whose nodes are one script, and that counts what its doors are charged for."""

    def __init__(self) -> None:
        super().__init__(muted=("Sweep",))
        self.ticking = False
        self.counts = Counts()
        self.kind = ""
        self.alive: dict[str, float] = {}
        self.heard: defaultdict[str, int] = defaultdict(int)
        self.pace = Pace()
        self.attempt_begun = 0
        self.saves = 0
        self.started_at = self.told_at = 0.0
        self.final: Mapping[str, Any] = {}

    # -- counting --------------------------------------------------------------------------------------------------

    def call(self, door: str, event: Any) -> Any:
        self.kind = f"{door}: {_kind_of(event)}" if "Records" in event or "detail-type" in event else door
        self.counts.invocations[self.kind] += 1
        try:
            return super().call(door, event)
        finally:
            self.kind = ""

    def _took_effect(self, operation: str, params: Mapping[str, Any]) -> None:
        if self.kind:
            self.counts.write_units[self.kind] += self._units(operation, params)
        super()._took_effect(operation, params)

    def _units(self, operation: str, params: Mapping[str, Any]) -> int:
        match operation:
            case "TransactWriteItems":  # twice the units of a plain write
                return sum(2 * _units_of(write["Put"]["Item"]) for write in params["TransactItems"])
            case "PutItem":
                return _units_of(params["Item"])
            case "UpdateItem" | "DeleteItem":
                return 1  # node items and wait items are below 1 KB
        return 0

    def _check_row(self, record: Mapping[str, Any]) -> None:
        """Each index entry that comes or goes is a write of its own."""
        images = record["dynamodb"]
        for keys in INDEX_KEYS.values():
            old, new = ([images.get(image, {}).get(key) for key in keys] for image in ("OldImage", "NewImage"))
            if self.kind and old != new:
                self.counts.write_units[self.kind] += (None not in old) + (None not in new)
        super()._check_row(record)

    @property
    def transitions(self) -> int:
        """Entered states, and tries of a task beyond the first."""
        tasks = {name for name, state in self.machine.definition["States"].items() if state["Type"] == "Task"}
        return sum(
            len(one.path) + one.visit - sum(name in tasks for name in one.path)
            for one in self.machine.executions.values()
        )

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _instance_changed(self, instance: Instance, state: str) -> None:
        if state != "running":
            self.alive.pop(instance.instance_id, None)
        super()._instance_changed(instance, state)

    def _boot(self, instance: Instance) -> None:
        number = len(self.nodes)
        self.alive[instance.instance_id] = self.agenda.now
        # No two machines boot in the same time.
        self.agenda.after(2.0 * (number % NODES), lambda: self._check_in(instance, self.pace.ready_s, 0))

    def _check_in(self, instance: Instance, pause_s: float, attempt: int) -> None:
        """The node says that it is ready until its orders name a roster."""
        orders = self._orders(instance.tags["holdfast:job"])
        if instance.instance_id not in self.alive or orders is None:
            return
        if orders.attempt != attempt:
            attempt, pause_s = orders.attempt, self.pace.ready_s
        if orders.roster_id and orders.action is Action.RUN:
            self.agenda.after(0, lambda: self._join(instance, orders))
            return
        self._say(reports.Ready, instance.instance_id, ip=f"10.0.{len(self.nodes)}.9", port=29500, interface="eth0",
                  instance_type=instance.candidate.instance_type, zone=instance.candidate.zone)  # fmt: skip
        longer_s = min(2 * pause_s, self.pace.ready_most_s)
        self.agenda.after(pause_s, lambda: self._check_in(instance, longer_s, attempt))

    def _join(self, instance: Instance, orders: Orders) -> None:
        """The first to see the roster starts the gang's script; every node looks at its orders from now on."""
        if orders.attempt > self.attempt_begun:
            self.attempt_begun = orders.attempt
            self.agenda.after(START_S, lambda: self._start(orders.attempt))
            self._beat(orders.attempt)
        self._look(instance, orders.attempt)

    def _look(self, instance: Instance, attempt: int) -> None:
        orders = self._orders(instance.tags["holdfast:job"])
        if instance.instance_id not in self.alive or orders is None:
            return
        if orders.attempt == attempt and orders.action is Action.CHECKPOINT_STOP:
            self._say(reports.Heard, instance.instance_id, generation=orders.generation, action=orders.action.value)
            self.agenda.after(SAVE_S, lambda: self._save(instance.instance_id, attempt, answers=orders.generation))
            self._await_next(instance, attempt)
            return
        if orders.attempt == attempt and orders.action is Action.RUN:
            self.agenda.after(self.pace.orders_other_s, lambda: self._look(instance, attempt))

    def _await_next(self, instance: Instance, attempt: int) -> None:
        orders = self._orders(instance.tags["holdfast:job"])
        if orders is not None and orders.attempt > attempt:
            self._check_in(instance, self.pace.ready_s, orders.attempt)
        elif instance.instance_id in self.alive:
            self.agenda.after(self.pace.orders_idle_s, lambda: self._await_next(instance, attempt))

    @property
    def leaders(self) -> list[str]:
        return sorted(self.alive)[: self.pace.heartbeat_nodes]

    def _start(self, attempt: int) -> None:
        self._say(reports.Started, self.leaders[0], step=self.step, world_size=NODES)
        self.agenda.after(PROGRESS_AFTER_S, lambda: self._progress(attempt))
        self._each(self.spec.checkpoint.interval_s or DAY_S, attempt, lambda: self._save_all(attempt))

    def _each(self, every_s: float, attempt: int, deed: Callable[[], object]) -> None:
        def again() -> None:
            if self._trains(attempt):
                deed()
                self.agenda.after(every_s, again)

        self.agenda.after(every_s, again)

    def _progress(self, attempt: int) -> None:
        """Node rank 0 tells where training is when no save has told it for as long as the job's reports are apart."""
        if not self._trains(attempt):
            return
        quiet_s = self.agenda.now - self.told_at
        if quiet_s >= self.spec.report_s:
            self.told_at, quiet_s = self.agenda.now, 0.0
            self._say(reports.Progress, self.leaders[0], step=self.step, loss=2.0, tokens_per_s=1e6, steady=STEADY)
        self.agenda.after(self.spec.report_s - quiet_s, lambda: self._progress(attempt))

    def _save_all(self, attempt: int) -> None:
        """Node rank 0 tells of a save that answers no order."""
        self.saves += 1
        self.told_at = self.agenda.now
        self._save(self.leaders[0], attempt, answers=0)

    def _save(self, instance: str, attempt: int, *, answers: int) -> None:
        if instance in self.alive:
            name = save_name(self.step, attempt, self.saves + (answers > 0))
            speed = 1e6 if instance == self.leaders[0] else None
            self._say(reports.CheckpointSaved, instance, attempt, save=name, manifest_sha256=HASH, step=self.step,
                      final=answers > 0, answers_generation=answers, loss=2.0, tokens_per_s=speed,
                      steady=STEADY if speed else None)  # fmt: skip

    def finish(self) -> None:
        """The ranks have done their last step."""
        save = save_name(self.step, self.attempt_begun, self.saves + 1)
        self._say(reports.CheckpointSaved, self.leaders[0], save=save, manifest_sha256=HASH, step=self.step, final=True,
                  answers_generation=0)  # fmt: skip
        self._say(reports.Finished, self.leaders[0], step=self.step, loss=1.0, save="")

    def _beat(self, attempt: int) -> None:
        item = self.orders_item(wait_key(self.job, Wait.TRAINING))
        wait = decode(WaitItem, item) if item else None
        if wait is not None and wait.attempt == attempt and self.alive:
            self.machine.heartbeat(wait.token)
        if self.attempt_begun == attempt:
            self.agenda.after(self.pace.heartbeat_s, lambda: self._beat(attempt))

    # -- looking ---------------------------------------------------------------------------------------------------

    @property
    def job(self) -> str:
        return next(iter(self._newest))

    @property
    def spec(self) -> JobSpec:
        orders = self._orders(self.job)
        assert orders is not None
        item = self.orders_item(f"{self.job}/spec/{orders.spec_id}")
        return decode(JobSpec, item or {})

    @property
    def step(self) -> int:
        return int((self.agenda.now - self.started_at) / STEP_S)

    def _trains(self, attempt: int) -> bool:
        orders = self._orders(self.job)
        return orders is not None and (orders.attempt, orders.action) == (attempt, Action.RUN) and bool(self.alive)

    def _orders(self, job: str) -> Orders | None:
        item = self.orders_item(orders_key(job))
        return decode(Orders, item) if item else None

    def _say(self, kind: type[reports.Report], instance: str, attempt: int = 0, **fields: object) -> None:
        """The node says it of this attempt, or of the one it last read of."""
        orders = self._orders(self.job)
        assert orders is not None
        about = {"job": self.job, "attempt": attempt or orders.attempt, "instance": instance, "at": self.agenda.now}
        report = kind(**about, **fields)  # type: ignore[arg-type]
        if instance in self.alive:
            self.report(report)

    def lose_one(self) -> None:
        """AWS takes the last node back: warned of, told by the node itself, and ended after the notice."""
        victim = sorted(self.alive)[-1]
        deadline_at = self.agenda.now + NOTICE_S
        self.interrupt(victim, metadata=False)
        say = lambda: self._say(reports.NoticeSeen, victim, action="terminate", deadline_at=deadline_at)  # noqa: E731
        self.agenda.after(2.0, say)


def _kind_of(event: Any) -> str:
    """Return what woke the door, in a word."""
    if "detail-type" in event:
        return event["detail"].get("state", event["detail-type"])
    records = event["Records"]
    if records[0].get("eventSource") == "aws:dynamodb":
        return "stream"
    return "+".join(sorted({json.loads(record["body"]).get("kind", "request") for record in records}))


def _units_of(item: Mapping[str, Any]) -> int:
    return -(-sum(len(name) + _size_of(value) for name, value in item.items()) // 1024)


def _size_of(value: Mapping[str, Any]) -> int:
    (kind, held), *_ = value.items()
    match kind:
        case "S":
            return len(held.encode())
        case "N":
            return len(held) // 2 + 2
        case "M":
            return 3 + sum(len(name) + 1 + _size_of(one) for name, one in held.items())
        case "L":
            return 3 + sum(1 + _size_of(one) for one in held)
    return 1


def _request() -> str:
    body = json.loads(b.sample("sqs-job-requests.json")["Records"][0]["body"])
    body["fleet"] |= {"nodes": NODES}
    body |= {"checkpoint": {"keep": 3}, "limits": {"run_s": 200_000, "wait_s": 90_000, "attempts": 5}}
    del body["report_s"]
    return json.dumps(body)


def lived() -> Day:
    """Return the day after it is over."""
    with mock.patch.object(ec2, "BOOT_S", BOOT_S), Day() as day:
        day.started_at = day.agenda.now
        day.send("RequestQueue", _request())
        for number in range(1, RECOVERIES + 1):
            day.agenda.after(number * DAY_S / (RECOVERIES + 1), day.lose_one)
        day.agenda.after(DAY_S, day.finish)
        day.agenda.run(for_s=DAY_S + 900)
        day.final = day.row(day.job) or {}
    return day


def written_while_idle() -> tuple[int, int]:
    """Return (mutating calls, transitions) of an hour of ticks on an empty stack."""
    with World() as world:
        world.agenda.run(for_s=3600)
        return len(world.wire.points), sum(len(one.path) for one in world.machine.executions.values())


def paths() -> Iterator[tuple[str, ...]]:
    """Yield every way through the machine that enters no state twice."""
    states = run_attempt()["States"]

    def walk(path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        state = states[path[-1]]
        if state.get("End"):
            yield path
            return
        arcs = [state.get("Next"), state.get("Default")]
        arcs += [branch["Next"] for branch in [*state.get("Choices", ()), *state.get("Catch", ())]]
        for arc in dict.fromkeys(arc for arc in arcs if arc):
            if arc not in path:
                yield from walk((*path, arc))

    yield from walk((run_attempt()["StartAt"],))


def rows() -> Iterator[Row]:
    """Yield the day's sums with the bars, after the table by kind."""
    day = lived()
    how = "{phase}, {interruptions}, {attempt}".format(**day.final)
    planned = f"completed, {RECOVERIES}, {RECOVERIES + 1}"
    yield Row("job-day: phase, interruptions, attempts", how, planned, how == planned)
    for kind, calls in sorted(day.counts.invocations.items(), key=lambda one: -one[1]):
        print(f"    {kind:<64} {calls:>5} invocations {day.counts.write_units[kind]:>6} write units")
    for name, execution in day.machine.executions.items():
        print(f"    {name}: {len(execution.path)} transitions: {' > '.join(execution.path)}")
    lengths = [len(path) for path in paths()]
    yield Row(
        "ways through the machine: shortest and longest in transitions",
        f"{min(lengths)}, {max(lengths)}",
        "reported",
        True,
    )
    yield Row("job-day: transitions", day.transitions, f"<= {TRANSITIONS}", day.transitions <= TRANSITIONS)
    invocations, units = day.counts.invocations.total(), day.counts.write_units.total()
    yield Row("job-day: invocations", invocations, f"<= {INVOCATIONS}", invocations <= INVOCATIONS)
    yield Row("job-day: write units", units, f"<= {WRITE_UNITS}", units <= WRITE_UNITS)
    mutations, transitions = written_while_idle()
    yield Row("idle hour: mutating calls of 60 ticks each", mutations, "0", mutations == 0)
    yield Row("idle hour: transitions", transitions, "0", transitions == 0)


if __name__ == "__main__":
    sys.exit(show(list(rows())))
