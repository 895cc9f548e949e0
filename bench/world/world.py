"""A whole deployment in one process and in virtual time, with the real doors in it.

Real: the doors and everything behind them, the shipped state machine, event patterns, filters, retries and time-outs of
template.yaml. moto keeps DynamoDB, S3, the result queue and the bus. Ours, in virtual time: EC2, Step Functions,
the queues in front of the doors, the stream's readers, Lambda's retries of asynchronous calls, the nodes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from boto3.dynamodb.types import TypeDeserializer
from moto import mock_aws
from moto.dynamodb.models import dynamodb_backends

from agent.cloud import Bucket
from bench.world.agenda import Agenda
from bench.world.ec2 import NOTICE_S, SUBNETS, Ec2
from bench.world.machine import Execution, Machine, StepFailed
from bench.world.nodes import Gang, Node
from bench.world.template import PSEUDO, ROOT, Door, QueueRules, Template, Wake, read_template
from bench.world.wire import Crash, Crashed, Wire, put_in, wired_client, wired_session
from job_contract import reports
from job_contract.reports import encode_report
from local.engine.capacity import Instance

START = 1_800_000_000.0
STACK, REGION, ACCOUNT = PSEUDO["AWS::StackName"], PSEUDO["AWS::Region"], PSEUDO["AWS::AccountId"]
BUCKET, JOBS, ORDERS = "holdfast-checkpoints", "holdfast-jobs", "holdfast-orders"
MACHINE_ARN = f"arn:aws:states:{REGION}:{ACCOUNT}:stateMachine:{STACK}-run-attempt"
SQS_HOP_S, STREAM_HOP_S, EVENT_HOP_S = 0.1, 0.3, 0.4
STREAM_RETRY_S = 1.0
ASYNC_RETRIES_AFTER_S = (60.0, 120.0)
DISTINCT_NODES = 250

os.environ.setdefault("POWERTOOLS_TRACE_DISABLED", "1")
os.environ.setdefault("POWERTOOLS_METRICS_DISABLED", "true")
os.environ.setdefault("POWERTOOLS_LOG_LEVEL", "CRITICAL")


class DoorFailed(Exception):
    """The function did not return."""


@dataclass(frozen=True)
class Problem:
    """Something that must never be, with what was seen. `kind` is the promise that it breaks."""

    kind: str
    text: str


@dataclass
class Message:
    body: str
    sender: str
    receives: int = 0


@dataclass
class Queue:
    rules: QueueRules
    door: str
    batch: int
    visible: list[Message] = field(default_factory=list)
    dead: list[Message] = field(default_factory=list)


@dataclass
class Reader:
    """A door's own place in the table's stream."""

    door: str
    wake: Wake
    waiting: list[dict[str, Any]] = field(default_factory=list)
    tries: int = 0
    busy: bool = False


@cache
def the_template() -> Template:
    return read_template()


class World:
    """Everything of one deployment. Use as a context manager; `agenda` moves it on.

    `muted` names doors that nothing wakes. `on_step(gang)` is called after each optimizer step.
    """

    def __init__(
        self,
        *,
        strikes: Callable[[Crash], bool] = lambda crash: False,
        muted: Sequence[str] = (),
        on_step: Callable[[Gang], None] = lambda gang: None,
        definition: Mapping[str, Any] | None = None,
    ) -> None:
        self.template = the_template()
        self.agenda = Agenda(START)
        self.muted, self.stepped = frozenset(muted), on_step
        self.ec2 = Ec2(self.agenda, self._instance_changed)
        self.machine = Machine(
            definition or run_attempt(), self.agenda, invoke=self._run_step, ended=self._execution_ended
        )
        self.wire = Wire(
            answers={"ec2": self.ec2.answer, "stepfunctions": self.machine.answer}, effects=[self._took_effect],
            strikes=strikes,
        )  # fmt: skip
        self.queues = {
            wake.queue: Queue(self.template.queues[wake.queue], door.logical_id, wake.batch)
            for door, wake in self._wakes("queue")
        }
        self.readers = [Reader(door.logical_id, wake) for door, wake in self._wakes("stream")]
        self.nodes: dict[str, Node] = {}
        self.gangs: dict[tuple[str, int], Gang] = {}
        self.told: list[dict[str, Any]] = []
        self.results: list[dict[str, Any]] = []
        self.failed_calls: list[tuple[str, Any]] = []
        self.raised: list[tuple[str, Exception]] = []
        self.problems: list[Problem] = []
        self.ticking = True
        self._orders_read: dict[str, Mapping[str, Any] | None] = {}
        self._newest: dict[str, Mapping[str, int]] = {}
        self._exits = contextlib.ExitStack()

    # -- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> World:
        with contextlib.ExitStack() as exits:
            exits.enter_context(mock_aws())
            put_in(self.wire)
            self.bucket = Bucket(wired_client("s3"), BUCKET)
            environment = self._furnish()
            exits.enter_context(mock.patch.dict(os.environ, environment))
            exits.enter_context(_doors_on(self.agenda))
            exits.callback(put_in, Wire())
            self._exits = exits.pop_all()
        self.start_ticking()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _furnish(self) -> dict[str, str]:
        """Tables, bucket, bus and result queue exist; returns the doors' environment."""
        for name, logical_id in ((JOBS, "JobsTable"), (ORDERS, "OrdersTable")):
            properties = dict(self.template.tables[logical_id])
            if "StreamSpecification" in properties:
                properties["StreamSpecification"] = {"StreamEnabled": True, **properties["StreamSpecification"]}
            wired_client("dynamodb").create_table(TableName=name, **properties)
        wired_client("s3").create_bucket(Bucket=BUCKET)
        wired_client("events").create_event_bus(Name=STACK)
        results = wired_client("sqs").create_queue(QueueName="results.fifo", Attributes={"FifoQueue": "true"})
        return {
            "HOLDFAST_STACK": STACK,
            "HOLDFAST_JOBS_TABLE": JOBS,
            "HOLDFAST_ORDERS_TABLE": ORDERS,
            "HOLDFAST_BUCKET": BUCKET,
            "HOLDFAST_BUS": STACK,
            "HOLDFAST_RESULT_QUEUE_URL": results["QueueUrl"],
            "HOLDFAST_STATE_MACHINE_ARN": MACHINE_ARN,
            "HOLDFAST_LAUNCH_TEMPLATE_ID": "lt-0123456789abcdef0",
            "HOLDFAST_SUBNET_IDS": ",".join(SUBNETS),
        }

    def _wakes(self, kind: str) -> Iterator[tuple[Door, Wake]]:
        for door in self.template.doors.values():
            for wake in door.wakes:
                if wake.kind == kind and door.logical_id not in self.muted:
                    yield door, wake

    # -- doors -----------------------------------------------------------------------------------------------------

    def call(self, door: str, event: Any) -> Any:
        """Return what the door answers. Raises DoorFailed when it raised, or died of the planned crash."""
        rules = self.template.doors[door]
        try:
            with self.wire.used_by(rules.module):
                return importlib.import_module(rules.module).handler(json.loads(json.dumps(event)), _context(rules))
        except Crashed as crash:
            _forget_environment(rules.module)
            raise DoorFailed(str(crash)) from crash
        except Exception as error:
            # As Lambda does, whatever it is.
            self.raised.append((door, error))
            raise DoorFailed(f"{door}: {error!r}") from error
        finally:
            self._check_fleets()

    def _run_step(self, function: str, payload: Mapping[str, Any]) -> Any:
        try:
            return self.call(function, payload)
        except DoorFailed as failure:
            raise StepFailed(str(failure)) from failure

    def start_ticking(self, *doors: str) -> None:
        """The schedules of these doors, or of all, run until `ticking` is false."""
        for door, wake in self._wakes("schedule"):
            if not doors or door.logical_id in doors:
                self._tick(door.logical_id, wake.every_s)

    def _tick(self, door: str, every_s: float) -> None:
        def tick() -> None:
            if self.ticking:
                self._call_later(door, _scheduled(self.agenda.now), born_at=self.agenda.now)
                self.agenda.after(every_s, tick)

        self.agenda.after(every_s, tick)

    def _call_later(self, door: str, event: Any, *, born_at: float, tries: int = 0) -> None:
        """Lambda's asynchronous invocation: tried again after one minute, and after two more."""
        rules = self.template.doors[door]
        try:
            self.call(door, event)
        except DoorFailed:
            if tries < rules.async_retries:
                delay_s = ASYNC_RETRIES_AFTER_S[min(tries, 1)]
                if self.agenda.now + delay_s - born_at <= rules.async_age_s:
                    self.agenda.after(delay_s, lambda: self._call_later(door, event, born_at=born_at, tries=tries + 1))
                    return
            self.failed_calls.append((door, event))

    # -- queues ----------------------------------------------------------------------------------------------------

    def send(self, queue: str, body: str, sender: str = "AIDAEXAMPLE") -> None:
        """The message is on the queue, and will be delivered."""
        self._show(self.queues[queue], [Message(body, sender)])

    def report(self, report: reports.Report) -> None:
        """A node's report is on the queue; SQS knows who sent it."""
        self.send("NodeReportQueue", json.dumps(encode_report(report)), f"AROAEXAMPLE:{report.instance}")

    def _show(self, queue: Queue, messages: Sequence[Message]) -> None:
        queue.visible += messages
        self.agenda.after(SQS_HOP_S, lambda: self._deliver(queue))

    def _deliver(self, queue: Queue) -> None:
        batch, queue.visible = queue.visible[: queue.batch], queue.visible[queue.batch :]
        for message in batch:
            message.receives += 1
        queue.dead += [message for message in batch if message.receives > queue.rules.receives]
        batch = [message for message in batch if message.receives <= queue.rules.receives]
        if not batch:
            return
        try:
            answer = self.call(queue.door, {"Records": [_sqs_record(n, one) for n, one in enumerate(batch)]})
            failed = {int(failure["itemIdentifier"]) for failure in (answer or {}).get("batchItemFailures", ())}
        except DoorFailed:
            failed = set(range(len(batch)))
        back = [message for number, message in enumerate(batch) if number in failed]
        if back:
            self.agenda.after(queue.rules.visibility_s, lambda: self._show(queue, back))
        if queue.visible:
            self.agenda.after(SQS_HOP_S, lambda: self._deliver(queue))

    # -- what calls bring about ------------------------------------------------------------------------------------

    def _took_effect(self, operation: str, params: Mapping[str, Any]) -> None:
        match operation:
            case "PutItem" | "UpdateItem" | "DeleteItem" | "TransactWriteItems":
                self._orders_read.clear()
                self._read_stream()
            case "PutEvents":
                self.told += [json.loads(entry["Detail"]) for entry in params["Entries"]]
            case "SendMessage":
                self.results.append(json.loads(params["MessageBody"]))
            case "CreateFleet":
                self._check_fleets()

    def _read_stream(self) -> None:
        shard = dynamodb_backends[ACCOUNT][REGION].tables[JOBS].stream_shard
        records = [json.loads(json.dumps(record.to_json(), default=str)) for record in shard.items]
        # moto copies the table, stream included, in every transaction.
        shard.items.clear()
        for record in records:
            self._check_row(record)
            for reader in self.readers:
                if reader.wake.pattern is None or reader.wake.pattern.matches_event(record):
                    reader.waiting.append(record)
                    self._wake(reader)

    def _wake(self, reader: Reader, delay_s: float = STREAM_HOP_S) -> None:
        if not reader.busy:
            reader.busy = True
            self.agenda.after(delay_s, lambda: self._feed(reader))

    def _feed(self, reader: Reader) -> None:
        """One batch is handed over; a failed one comes again, up to the door's number of retries."""
        reader.busy = False
        batch = reader.waiting[: reader.wake.batch]
        try:
            answer = self.call(reader.door, {"Records": batch})
            failed = [failure["itemIdentifier"] for failure in (answer or {}).get("batchItemFailures", ())]
        except DoorFailed:
            failed = [batch[0]["dynamodb"]["SequenceNumber"]]
        numbers = [record["dynamodb"]["SequenceNumber"] for record in batch]
        done = min((numbers.index(number) for number in failed), default=len(batch))
        if done == 0 and reader.tries >= reader.wake.retries:
            self.failed_calls.append((reader.door, batch))
            done = len(batch)
        reader.tries = reader.tries + 1 if done == 0 else 0
        reader.waiting = reader.waiting[done:]
        if reader.waiting:
            self._wake(reader, STREAM_RETRY_S)

    def emit(self, event: Mapping[str, Any]) -> None:
        """An event of AWS is on the default bus, for whichever rule it matches."""
        for door, wake in self._wakes("rule"):
            if wake.pattern is not None and wake.pattern.matches_event(event):  # type: ignore[arg-type]
                call = partial(self._call_later, door.logical_id, event, born_at=self.agenda.now)
                self.agenda.after(EVENT_HOP_S, call)

    def _execution_ended(self, execution: Execution) -> None:
        self.emit(
            self._aws_event(
                "aws.states",
                "Step Functions Execution Status Change",
                {
                    "executionArn": f"{MACHINE_ARN.replace(':stateMachine:', ':execution:')}:{execution.name}",
                    "stateMachineArn": MACHINE_ARN,
                    "name": execution.name,
                    "status": execution.status,
                    "input": execution.input,
                    "stopDate": round(self.agenda.now * 1000),
                },
            )
        )

    def _aws_event(self, source: str, kind: str, detail: Mapping[str, Any]) -> dict[str, Any]:
        time = datetime.fromtimestamp(self.agenda.now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "version": "0",
            "id": "00000000-0000-4000-8000-000000000000",
            "detail-type": kind,
            "source": source,
            "account": ACCOUNT,
            "time": time,
            "region": REGION,
            "resources": [],
            "detail": dict(detail),
        }

    # -- machines and nodes ----------------------------------------------------------------------------------------

    def _instance_changed(self, instance: Instance, state: str) -> None:
        self.emit(
            self._aws_event(
                "aws.ec2",
                "EC2 Instance State-change Notification",
                {"instance-id": instance.instance_id, "state": state},
            )
        )
        if state == "running":
            self._boot(instance)
        elif instance.instance_id in self.nodes:
            self.nodes[instance.instance_id].die()

    def _boot(self, instance: Instance) -> None:
        node = Node(
            around=self,
            job=instance.tags["holdfast:job"],
            instance=instance.instance_id,
            instance_type=instance.candidate.instance_type,
            zone=instance.candidate.zone,
            ip=f"10.0.0.{4 + len(self.nodes) % DISTINCT_NODES}",
        )
        self.nodes[instance.instance_id] = node
        node.boot()

    def interrupt(self, instance: str, *, event: bool = True, metadata: bool = True) -> None:
        """AWS wants the machine back: told by event, by the node's metadata, or not at all; gone after the notice."""
        if event:
            self.emit(
                self._aws_event(
                    "aws.ec2",
                    "EC2 Spot Instance Interruption Warning",
                    {"instance-id": instance, "instance-action": "terminate"},
                )
            )
        if metadata:
            deadline_at = self.agenda.now + NOTICE_S
            self.agenda.after(4.0, lambda: self.nodes[instance].notice(deadline_at))
        self.agenda.after(NOTICE_S, lambda: self.ec2.take_back(instance))

    def orders_item(self, key: str) -> Mapping[str, Any] | None:
        """Return what a node reads under the key of the orders table."""
        if key not in self._orders_read:
            self._orders_read[key] = self._item(ORDERS, {"key": {"S": key}})
        return self._orders_read[key]

    def beat(self, token: str) -> bool:
        return self.machine.heartbeat(token)

    # -- looking ---------------------------------------------------------------------------------------------------

    def row(self, job: str) -> dict[str, Any] | None:
        """Return the job's row as plain data."""
        return self._item(JOBS, {"pk": {"S": f"JOB#{job}"}, "sk": {"S": "ROW"}})

    def rows(self) -> list[dict[str, Any]]:
        """Return every job's row."""
        return [item for item in self.items() if item["sk"] == "ROW" and item["pk"] != "LEDGER"]

    def items(self) -> list[dict[str, Any]]:
        """Return everything in the jobs table."""
        found = wired_client("dynamodb").scan(TableName=JOBS)["Items"]
        return [_values(item) for item in found]

    def _item(self, table: str, key: Mapping[str, Any]) -> dict[str, Any] | None:
        item = wired_client("dynamodb").get_item(TableName=table, Key=key, ConsistentRead=True).get("Item")
        return _values(item) if item else None

    # -- what holds at every moment --------------------------------------------------------------------------------

    def _check_fleets(self) -> None:
        """At most one live fleet of a job, survivors of older attempts counted in."""
        live: dict[str, list[Any]] = {}
        for instance in self.ec2.live:
            live.setdefault(instance.tags["holdfast:job"], []).append(instance)
        for job, machines in live.items():
            names = sorted({one.tags["holdfast:fleet"] for one in machines if not self._survives(one)})
            if len(names) > 1:
                self.found("one live fleet", f"{job} has {len(names)}: {', '.join(names)}")
            if job in self._newest and len(machines) > self._newest[job]["nodes"]:
                self.found("one live fleet", f"{job} has {len(machines)} machines, wants {self._newest[job]['nodes']}")

    def _survives(self, instance: Any) -> bool:
        """True for a machine that was kept for another attempt than the one it was bought for."""
        if self._newest.get(instance.tags["holdfast:job"], {}).get("attempt", 0) < 2:
            return False
        node = self._item(JOBS, {"pk": {"S": f"NODE#{instance.instance_id}"}, "sk": {"S": "NODE"}})
        return node is not None and (node["state"] == "held" or node["fleet"] != instance.tags["holdfast:fleet"])

    def _check_row(self, record: Mapping[str, Any]) -> None:
        """Attempts only grow, by one, and nothing lives on when the last is closed."""
        image = record["dynamodb"].get("NewImage", {})
        if image.get("sk", {}).get("S") != "ROW" or image["pk"]["S"] == "LEDGER":
            return
        job = image["pk"]["S"].removeprefix("JOB#")
        row = {name: int(image[name]["N"]) for name in ("attempt", "nodes")}
        before = self._newest.get(job, {"attempt": 0})["attempt"]
        if not before <= row["attempt"] <= before + 1:
            self.found("attempts grow", f"the attempt of {job} went from {before} to {row['attempt']}")
        self._newest[job] = row
        held = {one["S"] for one in image.get("held", {}).get("L", [])}
        mine = {one.instance_id for one in self.ec2.live if one.tags["holdfast:job"] == job}
        alive = sorted(mine - held)
        if alive and not image["attempt_open"]["BOOL"]:
            self.found("closed means ended", f"attempt {row['attempt']} is closed while {', '.join(alive)} live")

    def found(self, kind: str, text: str) -> None:
        """The problem is on the list, once."""
        if Problem(kind, text) not in self.problems:
            self.problems.append(Problem(kind, text))


@cache
def run_attempt() -> Mapping[str, Any]:
    """Return the shipped machine, functions named by their logical ids."""
    text = (ROOT / "statemachines" / "run_attempt.asl.json").read_text()
    for name in the_template().doors:
        text = text.replace(f"${{{name}Arn}}", name)
    return dict(json.loads(text))


@contextlib.contextmanager
def _doors_on(agenda: Agenda) -> Iterator[None]:
    """The doors' wiring has this world's clock and the process's wired clients."""
    from holdfast.runtime import wiring
    from holdfast.runtime.observability import logger
    from holdfast.runtime.settings import settings

    class Supervisor(wiring.Supervisor):
        clock, pause = staticmethod(lambda: agenda.now), staticmethod(agenda.pass_by)
        session = property(lambda self: wired_session())  # type: ignore[assignment]

        def client(self, service: str, config: Any = None) -> Any:
            return wired_client(service)

    logger.setLevel("CRITICAL")
    with mock.patch.object(wiring, "Supervisor", Supervisor), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings.cache_clear()
        wiring.supervisor.cache_clear()
        try:
            yield
        finally:
            settings.cache_clear()
            wiring.supervisor.cache_clear()


def _forget_environment(module: str) -> None:
    """The next call finds a fresh environment."""
    from holdfast.runtime import wiring
    from holdfast.runtime.settings import settings

    sys.modules.pop(module, None)
    settings.cache_clear()
    wiring.supervisor.cache_clear()


def _context(door: Door) -> Any:
    return SimpleNamespace(
        function_name=door.logical_id,
        function_version="1",
        memory_limit_in_mb=512,
        invoked_function_arn=f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{door.logical_id}",
        aws_request_id="00000000-0000-4000-8000-000000000000",
        get_remaining_time_in_millis=lambda: int(door.timeout_s * 1000),
    )


def _sqs_record(number: int, message: Message) -> dict[str, Any]:
    return {
        "messageId": str(number),
        "receiptHandle": "handle",
        "body": message.body,
        "attributes": {"ApproximateReceiveCount": str(message.receives), "SenderId": message.sender},
        "messageAttributes": {},
        "eventSource": "aws:sqs",
        "eventSourceARN": f"arn:aws:sqs:{REGION}:{ACCOUNT}:queue",
        "awsRegion": REGION,
    }


def _scheduled(now: float) -> dict[str, Any]:
    return {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {}, "time": now}


_deserialize = TypeDeserializer().deserialize


def _values(item: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _deserialize(value) for key, value in item.items()}
