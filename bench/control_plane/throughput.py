"""How many events a core decides in a second: domain and application on the fakes, against a plain loop in this run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from bench.control_plane import plain_loop
from bench.table import Row, show
from holdfast.adapters.items import to_item
from holdfast.adapters.job_table import JobTable
from holdfast.application.node_reports import NodeReports
from holdfast.application.notices import interrupted, lost
from holdfast.domain.job import Job
from holdfast.domain.ownership import Node
from holdfast.messages.instance_state_change import read_instance_state_change
from holdfast.messages.node_report import read_report
from holdfast.messages.spot_interruption import read_spot_interruption
from job_contract import reports
from job_contract.checkpoint_layout import save_name
from job_contract.orders import Action, Wait, WaitItem
from job_contract.reports import encode_report
from job_contract.version import plain
from tests import builders as b
from tests.application.fakes import FakePorts, FakeStore

JOBS, PAIRS = 400, 7
AT_LEAST_PER_S, AT_LEAST_RATIO = 3000, 0.3
HASH = "0" * 64
SHUTTING_DOWN = "ec2-instance-state-change-shutting-down.json"

Event = dict[str, Any]
Loop = Callable[[Sequence["Event"]], tuple[float, list[tuple[Any, ...]]]]


def rows() -> list[Row]:
    """Return events a second, and the share of the plain loop's; the median of pairs run one after the other."""
    return [*_compared("decisions", _ours, _plain), *_compared("message texts to items", _ours_whole, _plain_whole)]


def _compared(what: str, own: Loop, other: Loop) -> Iterator[Row]:
    events = list(_events())
    ours, plain = [], []
    for _ in range(PAIRS):
        seconds, end = own(events)
        ours.append(seconds)
        seconds, other_end = other(events)
        plain.append(seconds)
        if end != other_end:
            raise AssertionError(f"the plain loop decides otherwise: {end[0]} is not {other_end[0]}")
    per_s = len(events) / _median(ours)
    ratio = _median([other / own for own, other in zip(ours, plain, strict=True)])
    spread = f"{len(events) / max(ours):,.0f} to {len(events) / min(ours):,.0f}"
    name = f"{what}, events/s and core, median of {PAIRS} ({spread})"
    yield Row(name, per_s, f">= {AT_LEAST_PER_S}", per_s >= AT_LEAST_PER_S)
    yield Row(f"{what}, plain dict loop, events/s", len(events) / _median(plain), "for comparison", True)
    yield Row(f"{what}, share of the plain dict loop", ratio, f">= {AT_LEAST_RATIO}", ratio >= AT_LEAST_RATIO)


def _events() -> Iterator[Event]:
    """Yield what reaches the supervisor from each job's two nodes: saves, and an interruption told three times."""
    for number in range(JOBS):
        job, doomed, other = f"job-{number:010d}", f"i-{2 * number:017x}", f"i-{2 * number + 1:017x}"
        told: Event = {"job": job, "at": b.NOW + 10}
        for count in (1, 2, 3):
            yield told | {"kind": "progress", "instance": doomed, "step": 25 * count, "loss": 1.5, "about": ""}
            for instance in (doomed, other):
                yield told | _save(instance, 25 * count, count)
        for source in ("warning", "report", "warning"):
            yield told | {
                "kind": "noticed",
                "instance": doomed,
                "about": doomed,
                "deadline_at": b.NOW + 130,
                "by": source,
            }
        for instance in (doomed, other):
            yield told | {"kind": "heard", "instance": instance, "about": "9"}
        for instance in (doomed, other):
            yield told | _save(instance, 80, 4, final=True)
        yield told | {"kind": "lost", "instance": doomed, "about": doomed}
        yield told | {"kind": "lost", "instance": doomed, "about": doomed}


def _save(instance: str, step: int, number: int, *, final: bool = False) -> Event:
    name = save_name(step, 1, number)
    about = name + ("#final" if final else "")
    return {"kind": "saved", "instance": instance, "step": step, "order": (1, number, step), "final": final,
            "about": about, "save": name}  # fmt: skip


def _ours(events: Sequence[Event]) -> tuple[float, list[tuple[Any, ...]]]:
    ports = _world()
    deeds = [(event, _report(event)) for event in events]
    take = NodeReports(ports).take
    begun = time.process_time()
    for event, report in deeds:
        if report is not None:
            take(report)
        elif event["kind"] == "noticed":
            interrupted(event["instance"], ports, deadline_at=event["deadline_at"])
        else:
            lost(event["instance"], ports)
    seconds = time.process_time() - begun
    return seconds, _ends(ports)


def _world() -> FakePorts:
    ports = FakePorts()
    for number in range(JOBS):
        job = ports.holding(b.a_running_job(id=f"job-{number:010d}"))
        ports.owning(job, f"i-{2 * number:017x}", f"i-{2 * number + 1:017x}")
        ports.store.put_wait(WaitItem(job=job.id, attempt=1, wait=Wait.TRAINING, token=f"{job.id}/token"))
    return ports


# -- with messages to read and items to make ------------------------------------------------------------------------


class Nowhere:
    """A DynamoDB client that takes every write."""

    def transact_write_items(self, **_: Any) -> None: ...
    def update_item(self, **_: Any) -> None: ...


class ItemStore(FakeStore):
    """The fake, with each write made ready for DynamoDB by the adapter."""

    adapter = JobTable(Nowhere(), jobs="jobs", orders="orders")

    def save(self, before: Job, after: Job, event: Any, key: str) -> None:
        super().save(before, after, event, key)
        self.adapter.save(before, after, event, key)

    def update_node(self, node: Node) -> None:
        super().update_node(node)
        self.adapter.update_node(node)


def _ours_whole(events: Sequence[Event]) -> tuple[float, list[tuple[Any, ...]]]:
    ports = _world()
    store = ItemStore()
    store.__dict__.update(ports.store.__dict__)
    ports.store = store
    texts = [(event["kind"], _text(event)) for event in events]
    take = NodeReports(ports).take
    begun = time.process_time()
    for kind, text in texts:
        message = json.loads(text)
        if "detail-type" not in message:
            report, _ = read_report(message)
            take(report)
        elif kind == "noticed":
            notice = read_spot_interruption(message)
            interrupted(notice.instance_id, ports, deadline_at=notice.deadline_at)
        else:
            lost(read_instance_state_change(message).instance_id, ports)
    seconds = time.process_time() - begun
    return seconds, _ends(ports)


def _text(event: Event) -> str:
    """Return what Lambda gets: the queue's record, or the event of AWS."""
    report = _report(event)
    if report is not None:
        sender = {"SenderId": f"AROAEXAMPLE:{report.instance}"}
        return json.dumps({"body": json.dumps(encode_report(report)), "attributes": sender})
    sample = "ec2-spot-interruption-warning.json" if event["kind"] == "noticed" else SHUTTING_DOWN
    message = b.sample(sample)
    message["detail"]["instance-id"] = event["instance"]
    return json.dumps(message)


def _plain_whole(events: Sequence[Event]) -> tuple[float, list[tuple[Any, ...]]]:
    texts = [json.dumps(event) for event in events]
    return _plain_from(lambda: map(json.loads, texts), lambda *items: [to_item(item) for item in items])


def _report(event: Event) -> reports.Report | None:
    """Return the report that tells it, None for what AWS tells."""
    who: dict[str, Any] = {"job": event["job"], "attempt": 1, "instance": event["instance"], "at": event["at"]}
    match event:
        case {"kind": "progress"}:
            return reports.Progress(**who, step=event["step"], loss=event["loss"], tokens_per_s=1.0)
        case {"kind": "saved"}:
            return reports.CheckpointSaved(
                **who, save=event["save"], manifest_sha256=HASH, step=event["step"], final=event["final"],
                answers_generation=int(event["final"]),
            )  # fmt: skip
        case {"kind": "heard"}:
            return reports.Heard(**who, generation=int(event["about"]), action=Action.CHECKPOINT_STOP.value)
        case {"kind": "noticed", "by": "report"}:
            return reports.NoticeSeen(**who, action="terminate", deadline_at=event["deadline_at"])
    return None


def _ends(ports: FakePorts) -> list[tuple[Any, ...]]:
    assert len(ports.workflow.settled) == JOBS
    return [_end(job) for job in ports.store.rows.values()]


def _end(job: Job) -> tuple[Any, ...]:
    assert job.saved is not None
    return (
        job.phase.value,
        job.version,
        job.step,
        job.saved.save,
        job.doomed,
        job.interruptions,
        job.forced_checkpoints,
    )


def _plain(events: Sequence[Event]) -> tuple[float, list[tuple[Any, ...]]]:
    return _plain_from(lambda: events, lambda *items: None)


def _plain_from(
    events: Callable[[], Iterable[Event]], wrote: Callable[..., object]
) -> tuple[float, list[tuple[Any, ...]]]:
    start = b.a_running_job()
    # The columns that no rule here reads are written all the same: the row is the job.
    row = plain(start) | {
        "saved": None, "doomed": (), "deadline_at": None, "interruptions": 0, "forced": 0, "failure": None, "seen": {},
        "orders": {}, "pool": str(start.pool), "asked": None, "asked_at": None,
    }  # fmt: skip
    jobs = {f"job-{number:010d}": {**row, "id": f"job-{number:010d}"} for number in range(JOBS)}
    waits = {(job, Wait.TRAINING.value): f"{job}/token" for job in jobs}
    nodes = {
        f"i-{number:017x}": {"job": f"job-{number // 2:010d}", "attempt": 1, "step": 0} for number in range(2 * JOBS)
    }
    begun = time.process_time()
    told = plain_loop.run(jobs, nodes, waits, events(), wrote)
    seconds = time.process_time() - begun
    assert len(told) == JOBS
    ends = [
        (
            row["phase"],
            row["version"],
            row["step"],
            row["saved"]["save"],
            row["doomed"],
            row["interruptions"],
            row["forced"],
        )
        for row in jobs.values()
    ]
    return seconds, ends


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    sys.exit(show(rows()))
