"""A deployment in virtual time whose calls take the published time and keep the published quotas.

Real: domain and application, the shipped state machine, the rules for retries of template.yaml. Simulated: tables,
EC2 and Step Functions (the fakes of the tests, made slow), Lambda's concurrency, the pollers of the report queue.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from botocore.exceptions import ClientError

from bench.control_plane import published as p
from bench.control_plane.fibers import Fibers, Slots
from bench.world.agenda import Agenda
from bench.world.machine import Execution, Machine, StepFailed
from bench.world.template import read_template
from bench.world.wire import ApiError
from bench.world.world import run_attempt
from holdfast.adapters.aws_errors import raced
from holdfast.application import record as recording
from holdfast.application.dispatch import dispatch
from holdfast.application.launch import Launch
from holdfast.application.node_reports import NodeReports
from holdfast.application.release import close_attempt, release_fleet
from holdfast.application.sweep import Sweep
from holdfast.application.waiting import leave_token
from holdfast.domain.errors import ExecutionOver, Raced, Rejected, Unavailable
from holdfast.domain.events import AllReady, Event, TrainingStarted
from holdfast.domain.job import Job
from holdfast.domain.ledger import Ledger
from holdfast.domain.phase import Phase
from holdfast.domain.placement import Candidate
from holdfast.domain.purchase import Purchase
from job_contract.orders import Action, Orders, Wait, WaitItem
from job_contract.reports import Report
from tests.application.fakes import FakeCheckpoints, FakeFleets, FakeOutbox, FakeStore

OWN_CPU_S = 0.006
"""A door's own processor time on a whole processor, the call after its order included; measured by first_order.py."""

BOOT_S, BEAT_S, TICK_S = 60.0, 10.0, 60.0
BATCH, REPORT_TIMEOUT_S, VISIBILITY_S, RECEIVES = 10, 15.0, 90.0, 5
ROW_BYTES, INSTANCE_BYTES, HISTORY_BYTES = 1300, 22, 500
LEDGER, LEDGER_BYTES = "LEDGER", 250
SDK_TRIES = 4
TEAM = "research"


class Bucket:
    """Keeps a published quota."""

    def __init__(self, quota: p.Quota) -> None:
        self.quota, self.level, self.at = quota, quota.burst, 0.0

    def take(self, cost: float, now: float) -> bool:
        self.level = min(self.quota.burst, self.level + (now - self.at) * self.quota.per_s)
        self.at = now
        if self.level < cost:
            return False
        self.level -= cost
        return True


@dataclass
class Tally:
    """What happened behind the doors."""

    invocations: Counter[str] = field(default_factory=Counter)
    throttled: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    dead: list[str] = field(default_factory=list)
    conflicts: int = 0
    transactions: int = 0
    table_throttled: int = 0
    most_at_once: int = 0

    def told(self) -> str:
        return (
            f"{self.invocations.total():,} invocations ({self.throttled.total():,} throttled, {self.failed.total():,} "
            f"failed, at most {self.most_at_once:,} at once), {self.transactions:,} transactions "
            f"({self.conflicts:,} in conflict), {self.table_throttled:,} calls throttled by the table"
        )


class Runs(Machine):
    """The interpreter, told by `throttled` that the call which fails next never reached its function."""

    throttled = False

    def _fail(self, execution: Execution, visit: int, error: str) -> None:
        if self.throttled and error == "Lambda.Unknown":
            error = "Lambda.TooManyRequestsException"
        self.throttled = False
        super()._fail(execution, visit, error)


class Cloud:
    """Keeps ports.Ports. `ordered` is told of every job whose orders no longer say run."""

    def __init__(self, concurrency: int, seed: int, ordered: Callable[[Job], None]) -> None:
        self.agenda = Agenda(1_800_000_000.0)
        self.chance = random.Random(seed)
        self.fibers = Fibers(self.agenda)
        self.ordered = ordered
        self.tally = Tally()
        self.slots = Slots(concurrency)
        self.idle: Counter[str] = Counter()
        self.doors = read_template().doors
        self.raw = FakeStore()
        self.machines = FakeFleets(self.clock)  # type: ignore[arg-type]
        self.store, self.fleets = SlowStore(self), SlowFleets(self)
        self.checkpoints, self.outbox = FakeCheckpoints(), FakeOutbox()
        self.runs = Runs(run_attempt(), self._in_fibers(), invoke=self._step, ended=lambda _: None)
        self.workflow = SlowWorkflow(self)
        self.messages: deque[tuple[Report, int]] = deque()
        self.pollers, self.first_message_at = 0, None
        self.reader_busy = self.reader_due = False

    def clock(self) -> float:
        return self.agenda.now

    def pause(self, seconds: float) -> None:
        self.fibers.sleep(seconds)

    def _in_fibers(self) -> Any:
        cloud = self

        class InFibers:
            now = property(lambda self: cloud.agenda.now)

            def after(self, delay_s: float, deed: Callable[[], object]) -> None:
                cloud.fibers.spawn(deed, delay_s)

        return InFibers()

    def takes(self, latency: p.Latency, times: int = 1) -> None:
        """The caller waits as long as such a call, or so many one after the other, takes."""
        self.fibers.sleep(sum(latency.draw_s(self.chance) for _ in range(times)))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Pauses of `record` are drawn by this cloud's chance."""
        with mock.patch.object(recording, "random", self.chance):
            yield
        self.fibers.close()

    # -- Lambda ----------------------------------------------------------------------------------------------------

    def _run(self, door: str, work: Callable[[], Any]) -> Any:
        """The slot is taken already. A new environment is built where none is idle."""
        self.tally.invocations[door] += 1
        self.tally.most_at_once = max(self.tally.most_at_once, self.slots.used)
        try:
            if self.idle[door]:
                self.idle[door] -= 1
            else:
                self.takes(p.COLD_START)
            self.fibers.sleep(OWN_CPU_S * max(1.0, p.LAMBDA_MB_PER_CPU / self.doors[door].memory_mb))
            return work()
        finally:
            self.idle[door] += 1
            self.slots.give_back()

    def event(self, door: str, work: Callable[[], object]) -> None:
        """An event for the door is on its way to Lambda."""
        born_at = self.agenda.now
        delay_s = p.EVENTBRIDGE_TO_LAMBDA.draw_s(self.chance)
        self.fibers.spawn(lambda: self._asynchronously(door, work, born_at), delay_s)

    def _asynchronously(self, door: str, work: Callable[[], object], born_at: float) -> None:
        rules = self.doors[door]
        pause_s, tries = p.THROTTLED_FIRST_S, 0
        while True:
            if self.agenda.now - born_at > rules.async_age_s:
                self.tally.dead.append(door)
                return
            if not self.slots.take():
                self.tally.throttled[door] += 1
                self.fibers.sleep(pause_s * self.chance.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, p.THROTTLED_LONGEST_S)
                continue
            try:
                self._run(door, work)
            except (Raced, Unavailable, ClientError):
                self.tally.failed[door] += 1
                if tries >= rules.async_retries:
                    self.tally.dead.append(door)
                    return
                self.fibers.sleep(p.ASYNC_RETRIES_AFTER_S[min(tries, 1)])
                tries += 1
            else:
                return

    def _step(self, function: str, payload: Mapping[str, Any]) -> Any:
        self.takes(p.STEP_TO_LAMBDA)
        if not self.slots.take():
            self.tally.throttled[function] += 1
            self.runs.throttled = True
            raise StepFailed("throttled")
        try:
            return self._run(function, lambda: self._do_step(function, payload["job"], payload["attempt"], payload))
        except (Raced, Unavailable, ClientError) as error:
            self.tally.failed[function] += 1
            raise StepFailed(str(error)) from error

    def _do_step(self, function: str, job: str, attempt: int, payload: Mapping[str, Any]) -> Any:
        match function:
            case "LaunchFleet":
                nodes = self.raw.rows[job].nodes
                wanted = Candidate(instance_type="p5.48xlarge", market="spot", nodes=nodes, zones=("us-east-1a",))
                answer = Launch(self).run(job, attempt, candidates=[wanted], prefix=job, time_left_s=120)
                if answer["outcome"] == "launched":
                    self.fibers.spawn(lambda: self._boot(job, attempt), BOOT_S)
                return answer
            case "LeaveToken":
                item = WaitItem(job=job, attempt=attempt, wait=Wait(payload["wait"]), token=payload["token"])
                return leave_token(item, self, after_silence=payload.get("again", False))
            case "ReleaseFleet":
                return {"ended": release_fleet(job, attempt, self)}
        return {"phase": close_attempt(job, attempt, self).phase.value}

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _boot(self, job: str, attempt: int) -> None:
        row = self.raw.rows[job]
        if row.attempt != attempt or row.phase is not Phase.LAUNCHING:
            return
        for told in (
            AllReady(at=self.clock(), attempt=attempt, roster_id=f"{attempt}-roster"),
            TrainingStarted(at=self.clock(), attempt=attempt, step=1),
        ):
            recording.record(told, job, self)
        self._beat(job, attempt)

    def _beat(self, job: str, attempt: int) -> None:
        """The agents of the attempt beat while a machine of it lives."""
        row = self.raw.rows[job]
        intent = self.raw.intents[row.fleet] if row.fleet else None
        if row.attempt != attempt or intent is None or not row.attempt_open:
            return
        if any(self.machines.instances[one].live for one in intent.instances):
            item = self.raw.wait_items.get((job, Wait.TRAINING))
            if item is not None and item.attempt == attempt:
                self.runs.heartbeat(item.token)
            self.agenda.after(BEAT_S, lambda: self._beat(job, attempt))

    # -- the report queue ------------------------------------------------------------------------------------------

    def report(self, report: Report, receives: int = 0) -> None:
        """The report is on the queue."""
        if self.first_message_at is None:
            self.first_message_at = self.agenda.now
        self.messages.append((report, receives + 1))
        self._pump()

    def _pump(self) -> None:
        if not self.messages:
            return
        waited_s = self.agenda.now - (self.first_message_at or self.agenda.now)
        most = min(p.SQS_POLLERS + int(p.SQS_POLLERS_PER_S * waited_s), p.SQS_POLLERS_MOST)
        if self.pollers < most:
            self.pollers += 1
            self.fibers.spawn(self._poll, p.SQS_TO_LAMBDA.draw_s(self.chance))
        if self.pollers >= most:
            self.agenda.after(1.0 / p.SQS_POLLERS_PER_S, self._pump)

    def _poll(self) -> None:
        while self.messages:
            if not self.slots.take():
                self.tally.throttled["OnNodeReport"] += 1
                self.fibers.sleep(self.chance.uniform(0.5, 1.0))
                continue
            batch = [self.messages.popleft() for _ in range(min(BATCH, len(self.messages)))]
            if batch:
                self._run("OnNodeReport", lambda batch=batch: self._take_batch(batch))
            else:
                self.slots.give_back()
            self.fibers.sleep(p.SQS_TO_LAMBDA.draw_s(self.chance))
        self.pollers -= 1

    def _take_batch(self, batch: list[tuple[Report, int]]) -> None:
        begun = self.agenda.now
        reports = NodeReports(self, [report for report, _ in batch])
        for report, receives in batch:
            try:
                if self.agenda.now - begun > REPORT_TIMEOUT_S:
                    raise Unavailable("the function timed out")
                reports.take(report)
            except Rejected:
                continue
            except (Raced, Unavailable, ClientError):
                self.tally.failed["OnNodeReport"] += 1
                if receives >= RECEIVES:
                    self.tally.dead.append("OnNodeReport")
                else:
                    again = (report, receives)
                    self.agenda.after(VISIBILITY_S, lambda again=again: self.report(*again))

    # -- the stream and the schedule -------------------------------------------------------------------------------

    def stream(self) -> None:
        """A row became dispatchable. The stream has one reader a shard, and so one at a time."""
        if self.reader_busy:
            self.reader_due = True
            return
        self.reader_busy = True
        self.fibers.spawn(self._dispatch, p.STREAM_TO_LAMBDA.draw_s(self.chance))

    def _dispatch(self) -> None:
        while not self.slots.take():
            self.tally.throttled["DispatchQueue"] += 1
            self.fibers.sleep(self.chance.uniform(0.5, 1.0))
        try:
            self._run("DispatchQueue", lambda: dispatch(self))
        except (Raced, Unavailable, ClientError):
            self.tally.failed["DispatchQueue"] += 1
            self.reader_due = True
        self.reader_busy, due = False, self.reader_due
        self.reader_due = False
        if due:
            self.stream()

    def tick(self) -> None:
        """The sweep and the dispatcher are woken by their schedules from now on."""
        self.event("Sweep", lambda: Sweep(self).run())
        self.event("DispatchQueue", lambda: dispatch(self))
        self.agenda.after(TICK_S, self.tick)


READS = {"request", "load", "load_all", "load_for", "waits", "intent", "node", "nodes", "roster", "teams", "line",
         "ledger", "quotas", "alive", "suspected", "left_notices", "cold", "patience", "quarantined"}  # fmt: skip
EACH = {"own", "hold", "mark_ending"}


class SlowStore:
    """Keeps ports.JobStore: the fake, behind DynamoDB's latencies, limits and conflicts of transactions."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.fake = cloud, cloud.raw
        self._writes: defaultdict[str, Bucket] = defaultdict(lambda: Bucket(p.PARTITION_WRITES))
        self._reads: defaultdict[str, Bucket] = defaultdict(lambda: Bucket(p.PARTITION_READS))
        self._table = Bucket(p.TABLE_WRITES)
        self._in_transaction: set[str] = set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.fake, name)

        def call(*given: Any, **named: Any) -> Any:
            if name in READS:
                if name in ("load", "load_for"):
                    self._throttled(lambda: self._reads[given[0]].take(self._units(given[0], 4096) + 1, self._now))
                self.cloud.takes(p.TABLE_READ, 1 + len(given[0]) // 100 if name == "nodes" else 1)
            else:
                times = max(1, len(given[0])) if name in EACH else 1
                self._throttled(lambda: self._table.take(times, self._now))
                self.cloud.takes(p.TABLE_WRITE, times)
            return method(*given, **named)

        return call

    @property
    def _now(self) -> float:
        return self.cloud.agenda.now

    def _units(self, job: str, unit: int) -> int:
        """Return the row's size; it grows with the machines under notice."""
        row = self.fake.rows.get(job)
        return -(-(ROW_BYTES + INSTANCE_BYTES * len(row.doomed if row else ())) // unit)

    def _throttled(self, allowed: Callable[[], bool]) -> None:
        """The SDK tries a throttled call again; a few times."""
        for number in range(SDK_TRIES):
            if allowed():
                return
            self.cloud.tally.table_throttled += 1
            if number + 1 < SDK_TRIES:
                self.cloud.fibers.sleep(self.cloud.chance.random() * min(2**number, 20))
        raise ClientError({"Error": {"Code": "ThrottlingException"}}, "dynamodb")

    def save(self, before: Job, after: Job, event: Event, key: str, ledger: Ledger | None = None) -> None:
        row, tally = after.id, self.cloud.tally
        items = {row: 2 * (self._units(row, 1024) + -(-HISTORY_BYTES // 1024))}
        if after.reserved != before.reserved:
            items[LEDGER] = 2 * -(-LEDGER_BYTES * (1 + len(self.fake.ledger_row.in_flight)) // 1024)
            if ledger is None:
                self.cloud.takes(p.TABLE_READ)
        tally.transactions += 1
        allowed = all(self._writes[item].take(units, self._now) for item, units in items.items())
        if not (allowed and self._table.take(sum(items.values()), self._now)):
            tally.table_throttled += 1
            self._cancelled("ThrottlingError")
        if not self._in_transaction.isdisjoint(items):
            tally.conflicts += 1
            self.cloud.takes(p.TABLE_WRITE)
            self._cancelled("TransactionConflict")
        self._in_transaction |= items.keys()
        try:
            self.cloud.takes(p.TRANSACTION)
            known: Orders | None = self.fake.orders.get(row)
            self.fake.save(before, after, event, key, ledger)
        except Raced:
            tally.conflicts += 1
            raise
        finally:
            self._in_transaction -= items.keys()
        now: Orders | None = self.fake.orders.get(row)
        if now is not known and now is not None and now.action is not Action.RUN:
            self.cloud.ordered(after)
        if after.dispatchable:
            self.cloud.stream()

    def _cancelled(self, reason: str) -> None:
        """The adapter decides what the answer means."""
        told: Any = {"Error": {"Code": "TransactionCanceledException"}, "CancellationReasons": [{"Code": reason}]}
        error = ClientError(told, "TransactWriteItems")
        if raced(error):
            raise Raced(reason) from error
        raise error


class SlowFleets:
    """Keeps ports.Fleets behind EC2's latencies and buckets. `bought` has every gang; two alive at once are a fault."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud, self.fake = cloud, cloud.machines
        self._describe, self._mutate = Bucket(p.EC2_DESCRIBE), Bucket(p.EC2_MUTATE)
        self.doubled: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.fake, name)
        mutates = name in ("buy", "terminate")

        def call(*given: Any) -> Any:
            bucket = self._mutate if mutates else self._describe
            if not bucket.take(1, self.cloud.agenda.now):
                raise Unavailable("RequestLimitExceeded")
            self.cloud.takes(p.EC2_CALL)
            if name == "buy":
                self._expect_one_fleet(*given)
            return method(*given)

        return call

    def _expect_one_fleet(self, purchase: Purchase) -> None:
        job, fleet = purchase.job, purchase.fleet
        others = [one.id for one in self.fake.instances.values() if one.live and one.job == job and one.fleet != fleet]
        if others:
            self.doubled.append(f"{fleet}: {len(others)} machines of another fleet live")


class SlowWorkflow:
    """Keeps ports.Workflow on the shipped machine behind Step Functions' latencies and buckets."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self._starts, self._settles = Bucket(p.START_EXECUTION), Bucket(p.SEND_TASK_SUCCESS)

    def start(self, job_id: str, attempt: int) -> None:
        name, text = f"{job_id}-{attempt}", f'{{"job": "{job_id}", "attempt": {attempt}}}'
        self._call(self._starts)
        try:
            self.cloud.runs.answer("StartExecution", {"name": name, "input": text})
        except ApiError as error:
            raise ExecutionOver(name) from error

    def status(self, job_id: str, attempt: int) -> str | None:
        self.cloud.takes(p.STEP_FUNCTIONS_CALL)
        known = self.cloud.runs.executions.get(f"{job_id}-{attempt}")
        return known.status if known else None

    def settle(self, token: str, answer: Mapping[str, Any]) -> None:
        self._call(self._settles)
        execution, _, visit = token.rpartition("/")
        if self.cloud.runs._is_open(self.cloud.runs.executions[execution], int(visit)):
            self.cloud.runs._settle(token, dict(answer))

    def _call(self, bucket: Bucket) -> None:
        if not bucket.take(1, self.cloud.agenda.now):
            raise Unavailable("ThrottlingException")
        self.cloud.takes(p.STEP_FUNCTIONS_CALL)
