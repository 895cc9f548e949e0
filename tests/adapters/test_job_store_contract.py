"""One suite for ports.JobStore: the fake that the application is tested on, and DynamoDB."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from holdfast.adapters.items import from_item, to_item
from holdfast.adapters.job_table import JobTable, job_of, row_of
from holdfast.application.ports import JobStore
from holdfast.domain.errors import Raced
from holdfast.domain.keys import dedup_key
from holdfast.domain.ownership import FleetIntent, Node, Ownership, Ready
from holdfast.messages.acceptance import read_acceptance
from job_contract.orders import Leader, Orders, Roster, Wait, WaitItem, orders_key, spec_key
from job_contract.spec import JobSpec
from job_contract.version import decode
from tests import builders as b
from tests.application.fakes import FakeStore

BODY = (b.ROOT / "events" / "job-request.json").read_text()


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with mock_aws():
        yield boto3.client("dynamodb", region_name="us-east-1", aws_access_key_id="t", aws_secret_access_key="t")


def a_table(client: Any, name: str) -> JobTable:
    """Two fresh tables, as template.yaml has them."""
    jobs, orders = f"jobs-{name}", f"orders-{name}"
    for known in client.list_tables()["TableNames"]:
        client.delete_table(TableName=known)
    indexes = {"waiting": ("waiting_team", "S", "waiting_rank", "N"), "alive": ("alive_shard", "N", "pk", "S"),
               "ended": ("ended_team", "S", "ended_at", "N")}  # fmt: skip
    types = {"pk": "S", "sk": "S"} | {name: kind for index in indexes.values() for name, kind in (index[:2], index[2:])}
    client.create_table(
        TableName=jobs,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": name, "AttributeType": kind} for name, kind in types.items()],
        KeySchema=[{"AttributeName": "pk", "KeyType": "HASH"}, {"AttributeName": "sk", "KeyType": "RANGE"}],
        GlobalSecondaryIndexes=[
            {
                "IndexName": name,
                "KeySchema": [
                    {"AttributeName": index[0], "KeyType": "HASH"},
                    {"AttributeName": index[2], "KeyType": "RANGE"},
                ],
                "Projection": {"ProjectionType": "KEYS_ONLY"},
            }
            for name, index in indexes.items()
        ],
    )
    client.create_table(
        TableName=orders,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": "key", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "key", "KeyType": "HASH"}],
    )
    return JobTable(client, jobs=jobs, orders=orders)


@pytest.fixture(params=["fake", "dynamodb"])
def store(request: pytest.FixtureRequest, client: Any) -> JobStore:
    return FakeStore() if request.param == "fake" else a_table(client, "suite")


def created(store: JobStore) -> Any:
    order = read_acceptance(BODY, now=b.NOW)
    assert store.create(order.job, order.request, order.spec)
    return order.job


def moved(store: JobStore, job: Any, *happened: Any) -> Any:
    for event in happened:
        after = b.after(job, event)
        store.save(job, after, event, dedup_key(event))
        job = after
    return job


def test_a_request_is_created_once(store: JobStore) -> None:
    job = created(store)
    order = read_acceptance(BODY, now=b.NOW + 5)
    assert store.create(order.job, order.request, order.spec) is False
    assert store.load(job.id) == job
    assert store.request(job.id)["body_sha256"] == order.request["body_sha256"]  # type: ignore[index]
    assert store.waiting("research") == [job.id]
    assert store.teams() == ["research"]


def test_what_was_saved_is_loaded_whole(store: JobStore) -> None:
    job = moved(store, created(store), b.started(), b.training(), b.saved(25), b.noticed())
    assert store.load(job.id) == job
    assert store.load_for(job.id, dedup_key(b.noticed())) == (job, True)
    assert store.load_for(job.id, dedup_key(b.noticed(b.LEADER))) == (job, False)
    assert store.load("nobody") is None
    assert store.load_for("nobody", "k") == (None, False)


def test_the_second_of_two_writers_raced(store: JobStore) -> None:
    job = moved(store, created(store), b.started())
    moved(store, job, b.training())
    with pytest.raises(Raced):
        moved(store, job, b.noticed())


def test_the_same_key_is_never_written_twice(store: JobStore) -> None:
    job = moved(store, created(store), b.started())
    noticed = moved(store, job, b.noticed())
    again = replace(noticed, version=noticed.version + 1)
    with pytest.raises(Raced):
        store.save(noticed, again, b.noticed(), dedup_key(b.noticed()))


def test_notices_left_for_an_attempt_are_found_by_whoever_writes_next(store: JobStore) -> None:
    job = created(store)
    store.leave_notice(job.id, 1, b.OTHER, b.NOW + 120)
    store.leave_notice(job.id, 1, b.OTHER, b.NOW + 120)
    store.leave_notice(job.id, 1, b.LEADER, b.NOW + 110)
    assert store.left_notices(job.id, 1) == {b.OTHER: b.NOW + 120, b.LEADER: b.NOW + 110}
    assert store.left_notices(job.id, 2) == {}


def test_only_a_write_that_brings_news_says_so_to_the_stream(client: Any) -> None:
    table = a_table(client, "tells")
    job = created(table)
    key = to_item({"pk": f"JOB#{job.id}", "sk": "ROW"})

    def tells() -> bool:
        return "tells" in client.get_item(TableName=table.jobs, Key=key)["Item"]

    told = [tells()]
    for event in (b.started(), b.intended(), b.training(), b.saved(25), b.noticed(), b.saved(30, number=2)):
        job = moved(table, job, event)
        told.append(tells())
    assert told == [True, True, False, True, False, True, False]


def test_a_job_is_in_the_index_of_its_state_only(store: JobStore) -> None:
    job = moved(store, created(store), b.started())
    assert (store.waiting("research"), store.alive()) == ([], [job.id])
    job = moved(store, job, b.training(), b.lost())
    assert (store.waiting("research"), store.alive()) == ([], [job.id])
    job = moved(store, job, b.closed())
    assert (store.waiting("research"), store.alive()) == ([job.id], [])
    moved(store, job, b.cancelled())
    assert (store.waiting("research"), store.alive()) == ([], [])


def test_a_wait_item_is_dropped_only_with_its_own_token(store: JobStore) -> None:
    old = WaitItem(job="j", attempt=1, wait=Wait.TRAINING, token="old")
    new = replace(old, token="new")
    store.put_wait(old)
    store.put_wait(new)
    store.drop_wait(old)
    assert store.waits("j", list(Wait)) == [new]
    store.drop_wait(new)
    assert store.waits("j", list(Wait)) == []


def test_the_first_intent_stands(store: JobStore) -> None:
    intent = FleetIntent(fleet="j-1-0", job="j", attempt=1, candidate=0, nodes=2, opened_at=b.NOW)
    assert store.open_intent(intent) == intent
    assert store.open_intent(replace(intent, opened_at=b.NOW + 9)) == intent
    closed = replace(intent, instances=("i-1", "i-2"), closed_at=b.NOW + 1, outcome="bought")
    store.close_intent(closed)
    assert store.intent("j-1-0") == closed
    assert store.intent("nobody") is None


def test_an_owner_is_written_once_and_what_a_node_reports_never_changes_it(store: JobStore) -> None:
    node = Node(instance="i-1", job="j", fleet="j-1-0", attempt=1, since_at=b.NOW)
    store.own([node])
    store.mark_ending(["i-1"], "j", b.NOW + 1)
    store.mark_ending(["i-1"], "j", b.NOW + 2)
    store.own([node])
    ready = Ready(ip="10.0.0.1", port=4, instance_type="c7i.large", zone="us-east-1a")
    store.update_node(replace(node, ready=ready, step=3, loss=1.5))
    kept = store.node("i-1")
    assert kept is not None
    assert (kept.state, kept.since_at, kept.ready, kept.step, kept.loss) == (Ownership.ENDING, b.NOW + 1, ready, 3, 1.5)
    assert store.nodes(["i-1", "i-unknown"]) == [kept]


def test_a_suspicion_is_remembered(store: JobStore) -> None:
    assert store.suspected("i-1", b.NOW) is None
    assert store.suspected("i-1", b.NOW + 60) == b.NOW


# -- what only the tables show -----------------------------------------------------------------------------------------


def test_orders_and_spec_are_the_ones_of_the_contract(client: Any) -> None:
    table = a_table(client, "contract")
    job = moved(table, created(table), b.started(), b.ready(), b.noticed())
    item = client.get_item(TableName=table.orders, Key=to_item({"key": orders_key(job.id)}))["Item"]
    orders = decode(Orders, from_item(item))
    assert (orders.generation, orders.attempt, orders.doomed) == (job.generation, 1, (b.OTHER,))
    assert len(str(from_item(item))) < 1024
    item = client.get_item(TableName=table.orders, Key=to_item({"key": spec_key(job.id, job.spec_id)}))["Item"]
    assert decode(JobSpec, from_item(item)).spec_id == job.spec_id


def test_a_row_stays_small_and_comes_back_from_the_stream(client: Any) -> None:
    job = b.a_running_job(charged={"crash": 2, "preemption": 40}, reason="x" * 500)
    assert len(str(to_item(row_of(job)))) < 4096
    assert job_of(to_item(row_of(job))) == job
    assert job_of(to_item({"pk": "NODE#i-1", "sk": "NODE"})) is None


def test_the_history_is_in_the_order_it_happened(client: Any) -> None:
    table = a_table(client, "history")
    job = moved(table, created(table), b.started(), b.training(), b.noticed())
    assert [item["kind"] for item in table.history(job.id)] == [
        "attempt_started", "training_started", "interruption_noticed",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (["ConditionalCheckFailed", "None", "None"], Raced),
        (["None", "ConditionalCheckFailed", "None"], Raced),
        (["None", "None", "TransactionConflict"], Raced),
        (["None", "ThrottlingError", "None"], Raced),
        (["ProvisionedThroughputExceeded", "None", "None"], Raced),
        (["None", "ValidationError", "None"], ClientError),
    ],
)
def test_conflicts_and_busy_partitions_that_moto_never_has_are_races_too(
    client: Any, monkeypatch: pytest.MonkeyPatch, reasons: list[str], expected: type[Exception]
) -> None:
    table = a_table(client, "conflict")
    job = created(table)

    def cancelled(**_: Any) -> None:
        response = {
            "Error": {"Code": "TransactionCanceledException"},
            "CancellationReasons": [{"Code": reason} for reason in reasons],
        }
        raise ClientError(response, "TransactWriteItems")  # type: ignore[arg-type]

    monkeypatch.setattr(client, "transact_write_items", cancelled)
    with pytest.raises(expected):
        moved(table, job, b.started())


def test_a_node_is_held_adopted_once_and_never_taken_back_from_its_end(store: JobStore) -> None:
    ready = Ready(ip="10.0.0.1", port=4, instance_type="c7i.large", zone="us-east-1a")
    node = Node(instance="i-1", job="j", fleet="j-1-0", attempt=1, since_at=b.NOW)
    store.own([node, replace(node, instance="i-2")])
    store.update_node(replace(node, ready=ready))
    store.mark_ending(["i-2"], "j", b.NOW)
    store.hold(["i-1", "i-2"], b.NOW + 60)
    assert [found.state for found in store.nodes(["i-1", "i-2"])] == [Ownership.HELD, Ownership.ENDING]
    assert store.adopt("i-1", fleet="j-2-s", attempt=2, now=b.NOW + 9)
    assert store.adopt("i-1", fleet="j-2-s", attempt=2, now=b.NOW + 9)
    assert not store.adopt("i-2", fleet="j-2-s", attempt=2, now=b.NOW + 9)
    adopted = store.node("i-1")
    assert adopted is not None
    assert (adopted.state, adopted.fleet, adopted.attempt, adopted.ready, adopted.until) == (
        Ownership.MEMBER, "j-2-s", 2, None, None,
    )  # fmt: skip


def test_a_roster_is_found_again(store: JobStore) -> None:
    roster = Roster(job="j", attempt=1, roster_id="1-r", nodes=(), leader=Leader(ip="10.0.0.1", port=4))
    store.put_roster(roster)
    assert store.roster("j", "1-r") == roster
    assert store.roster("j", "2-r") is None
