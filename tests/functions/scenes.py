"""Jobs as they stand before a door is called, and ways to break what a door leans on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from bench.world.wire import ApiError, wired_client
from bench.world.world import JOBS, ORDERS, DoorFailed, World
from holdfast.adapters.items import to_item
from holdfast.adapters.job_table import JobTable, row_of
from holdfast.domain.job import Job
from holdfast.domain.obligations import orders_for
from holdfast.domain.ownership import FleetIntent, Node
from job_contract.orders import Orders, Wait, WaitItem, orders_key
from job_contract.version import decode, encode
from tests import builders as b

JOB = "tiny-llama-on-the-standard-li-fcea9e2ede"
INSTANCE, PEER = "i-0a1b2c3d4e5f60001", "i-0a1b2c3d4e5f60002"
REQUESTS, NODE_REPORTS = "sqs-job-requests.json", "sqs-node-reports.json"


def table() -> JobTable:
    return JobTable(wired_client("dynamodb"), jobs=JOBS, orders=ORDERS)


def holding(world: World, job: Job) -> Job:
    """The tables hold the job as it is, with its orders."""
    client = wired_client("dynamodb")
    client.put_item(TableName=JOBS, Item=to_item(row_of(job)))
    orders = orders_for(job, world.agenda.now)
    client.put_item(TableName=ORDERS, Item=to_item({"key": orders_key(job.id), **encode(orders)}))
    return job


def training(world: World, attempt: int = 1) -> Job:
    """The job of the recorded events trains on INSTANCE and PEER, which it bought an hour ago."""
    fleet = f"{JOB}-{attempt}-0"
    job = b.after(
        b.a_job(id=JOB, attempt=attempt - 1),
        b.started(attempt),
        b.intended(attempt, fleet),
        replace(b.bought(attempt), fleet=fleet),
        b.ready(attempt),
        b.training(attempt),
    )
    then = world.agenda.now - 3600
    members = (INSTANCE, PEER)
    table().own([Node(instance=one, job=JOB, fleet=fleet, attempt=attempt, since_at=then) for one in members])
    table().close_intent(
        FleetIntent(
            fleet=fleet, job=JOB, attempt=attempt, candidate=0, nodes=2, opened_at=then, instances=members,
            closed_at=then, outcome="bought",
        )
    )  # fmt: skip
    return holding(world, job)


def job_now() -> Job:
    job = table().load(JOB)
    assert job is not None
    return job


def orders_now(world: World) -> Orders:
    item = world.orders_item(orders_key(JOB))
    assert item is not None
    return decode(Orders, item)


def wait_now(wait: Wait) -> WaitItem | None:
    found = table().waits(JOB, [wait])
    return found[0] if found else None


def written(world: World) -> list[dict[str, Any]]:
    """Everything in the jobs table, to compare a before with an after."""
    return sorted(world.items(), key=lambda item: (item["pk"], item["sk"]))


def records(name: str, *numbers: int) -> dict[str, Any]:
    """The recorded batch, or only these of its records; every record has an id of its own."""
    recorded = b.sample(name)["Records"]
    return {"Records": [recorded[number] for number in numbers or range(len(recorded))]}


def delivered(name: str, body: str) -> dict[str, Any]:
    """The first record of the batch with this body."""
    return {"Records": [{**b.sample(name)["Records"][0], "body": body}]}


def failures(answer: Mapping[str, Any]) -> list[str]:
    """The message ids that go back to the queue."""
    return [failure["itemIdentifier"] for failure in answer["batchItemFailures"]]


def breaks(
    world: World, service: str, operation: str, when: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> None:
    """From now on AWS fails the operation, where its parameters are such."""
    usual = world.wire.answers.get(service)

    def answer(name: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
        if name == operation and when(params):
            raise ApiError("InternalServerError", "injected")
        return usual(name, params) if usual else None

    world.wire.answers[service] = answer


def fails(world: World, door: str, event: Any) -> bool:
    """True when the door raises, so that AWS brings the event again."""
    with suppress(DoorFailed):
        world.call(door, event)
        return False
    return True


def stream(world: World, *jobs: Job) -> dict[str, Any]:
    """The stream's records of a row that became each of these in turn."""
    images: list[dict[str, Any]] = [{}, *(to_item(row_of(job)) for job in jobs)]
    return {
        "Records": [
            {
                "eventID": str(number),
                "eventName": "MODIFY" if before else "INSERT",
                "eventSource": "aws:dynamodb",
                "dynamodb": {
                    "SequenceNumber": str(number),
                    "Keys": {key: after[key] for key in ("pk", "sk")},
                    "NewImage": after,
                    **({"OldImage": before} if before else {}),
                },
            }
            for number, (before, after) in enumerate(itertools.pairwise(images))
        ]
    }


def text(event: Mapping[str, Any]) -> str:
    return json.dumps(event)
