"""One suite for ports.JobStore: the fake that the application is tested on, and DynamoDB."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from bench.control_plane.job_day import _units_of
from holdfast.adapters.items import from_item, to_item
from holdfast.adapters.job_table import TTL_LAG_S, WAITING_CARRIES, JobTable, job_of, row_of, wakes_dispatch
from holdfast.application.dispatch import dispatch
from holdfast.application.ports import JobStore
from holdfast.domain.baseline import Baseline, BaselineKey, Watch
from holdfast.domain.because import Because, Code
from holdfast.domain.errors import Raced, Rejected
from holdfast.domain.events import BudgetNearlySpent, Failed, FleetLost, RetryRequested
from holdfast.domain.failure import CLASSES
from holdfast.domain.gate import Quarantined
from holdfast.domain.keys import KEEP_S, dedup_key
from holdfast.domain.ledger import Ledger, Quota, QuotaChange, Quotas, Reserved
from holdfast.domain.obligations import orders_for
from holdfast.domain.ownership import FleetIntent, Node, Ownership, Ready
from holdfast.domain.placement import Cold, Patience, Pool
from holdfast.domain.purchase import Expected, Place, Purchase, Template
from holdfast.domain.queueing import Waiter
from holdfast.domain.straggler import Slow
from holdfast.messages.acceptance import read_acceptance
from job_contract.orders import Leader, Orders, Roster, Wait, WaitItem, orders_key, spec_key
from job_contract.spec import JobSpec
from job_contract.version import decode, encode
from tests import builders as b
from tests.application.fakes import FakePorts, FakeStore

USUAL = Baseline(
    job="tiny-llama-on-the-standard-li-fcea9e2ede", at=b.NOW + 0.123456, nodes=16, world_size=128,
    tokens_per_s=1234567.89, step_ms=1234.56, data_wait_ms=12.34, comm_ms=123.45,
)  # fmt: skip
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
                "Projection": {"ProjectionType": "INCLUDE", "NonKeyAttributes": list(WAITING_CARRIES)}
                if name == "waiting"
                else {"ProjectionType": "KEYS_ONLY"},
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


def test_an_identity_belongs_to_the_first_job_that_came_under_it(store: JobStore) -> None:
    job = created(store)
    other = read_acceptance(json.dumps({**json.loads(BODY), "name": "another name"}), now=b.NOW)
    assert other.job.id != job.id
    assert store.create(other.job, other.request, other.spec) is False
    assert store.load(other.job.id) is None
    holder = store.holder(other.request["identity"])
    assert holder is not None
    assert (holder["job"], holder["name"]) == (job.id, job.name)
    assert store.holder("nobody") is None


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
    spent = BudgetNearlySpent(at=b.NOW, attempt=1, budget_usd=job.budget_usd, cost_usd=4.0)
    for event in (b.started(), b.intended(), b.training(), b.saved(25), spent, b.noticed(), b.saved(30, number=2)):
        job = moved(table, job, event)
        told.append(tells())
    assert told == [True, True, False, True, False, True, True, False]


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


def test_an_open_intent_is_renewed_and_a_closed_one_stands(store: JobStore) -> None:
    intent = FleetIntent(fleet="j-1-0", job="j", attempt=1, candidate=0, nodes=2, opened_at=b.NOW)
    assert store.open_intent(intent) == intent
    later = replace(intent, opened_at=b.NOW + 9)
    assert store.open_intent(later) == later == store.intent("j-1-0")
    closed = replace(intent, instances=("i-1", "i-2"), closed_at=b.NOW + 10, outcome="bought")
    store.close_intent(closed)
    assert store.open_intent(intent) == closed == store.intent("j-1-0")
    assert store.intent("nobody") is None


def test_an_owner_is_written_once_and_what_a_node_reports_never_changes_it(store: JobStore) -> None:
    node = Node(instance="i-1", job="j", fleet="j-1-0", attempt=1, since_at=b.NOW)
    store.own([node])
    store.mark_ending(["i-1"], "j", b.NOW + 1)
    store.mark_ending(["i-1"], "j", b.NOW + 2)
    store.own([node])
    ready = Ready(ip="10.0.0.1", port=4, instance_type="c7i.large", zone="us-east-1a")
    slow = (Slow(attempt=1, node_rank=3, reports=2, since_at=b.NOW),)
    watch = Watch(attempt=1, usual=USUAL, reports=1, since_at=b.NOW, told="slow", signals=1)
    store.update_node(replace(node, ready=ready, step=3, loss=1.5, evaluation_loss=2.5, slow=slow, watch=watch))
    kept = store.node("i-1")
    assert kept is not None
    assert (kept.state, kept.since_at, kept.ready, kept.step, kept.loss) == (Ownership.ENDING, b.NOW + 1, ready, 3, 1.5)
    assert (kept.slow, kept.watch, kept.evaluation_loss) == (slow, watch, 2.5)
    assert store.nodes(["i-1", "i-unknown"]) == [kept]


def test_a_baseline_is_kept_under_its_key_and_those_of_a_model_on_a_type_are_listed(store: JobStore) -> None:
    key = BaselineKey(model="m", instance_type="c7i.large", world_size=2, work="w")
    others = [replace(key, world_size=20), replace(key, work="v"), replace(key, instance_type="c7i.large2"),
              replace(key, model="n")]  # fmt: skip
    assert (store.baseline(key), store.baselines("m", "c7i.large")) == (None, [])
    for number, one in enumerate([key, *others]):
        store.keep_baseline(one, replace(USUAL, tokens_per_s=float(number)))
    assert store.baseline(key) == replace(USUAL, tokens_per_s=0.0)
    assert sorted(one.tokens_per_s for one in store.baselines("m", "c7i.large")) == [0.0, 1.0, 2.0]
    store.keep_baseline(key, USUAL)
    assert store.baseline(key) == USUAL


def test_the_item_of_a_leader_stays_within_one_write_unit(client: Any) -> None:
    table = a_table(client, "size")
    ready = Ready(ip="10.0.0.1", port=29555, instance_type="p5.48xlarge", zone="us-east-1a", gpus=8, efa_devices=32,
                  driver="580.95.05", placement_group="holdfast-tiny-llama-fcea9e2ede-us-east-1a",
                  bandwidth_gbps=3200.0, host="gpu-5e1f0c", efa_provider="efa", disk_free_gb=28000,
                  memory_free_gb=2000)  # fmt: skip
    node = Node(
        instance="i-0a1b2c3d4e5f60001", job=USUAL.job, fleet=f"{USUAL.job}-12-0", attempt=12, market="spot",
        since_at=b.NOW + 0.123456, ready=ready, step=123456, step_at=b.NOW + 0.123456, loss=2.3456789012345,
        tokens_per_s=1234567.89, evaluation_loss=2.3456789012345, reported_at=b.NOW + 0.123456,
    )  # fmt: skip
    table.own([node])
    table.update_node(replace(node, watch=Watch(attempt=12, usual=USUAL, reports=2, since_at=b.NOW, signals=1)))
    item = client.get_item(TableName=table.jobs, Key=to_item({"pk": f"NODE#{node.instance}", "sk": "NODE"}))["Item"]
    assert _units_of(item) == 1


def test_o11_ordinary_decimals_of_a_progress_report_come_back_as_they_were(client: Any) -> None:
    table = a_table(client, "decimals")
    node = Node(instance="i-1", job="j", fleet="j-1-0", attempt=1, since_at=b.NOW)
    table.own([node])
    for loss in (2.3841858e-07, 30.40, 1e-8, 1e-130, 1.7976931348623157e125, -0.1):
        table.update_node(replace(node, step=3, loss=loss, tokens_per_s=30.40))
        kept = table.node("i-1")
        assert kept is not None
        assert (kept.loss, kept.tokens_per_s) == (loss, 30.40)


@pytest.mark.parametrize(("loss", "kept"), [(5e-324, 0.0), (1e-131, 0.0), (1e300, 9.9e125), (-1e300, -9.9e125)])
def test_o11_a_bad_loss_that_the_table_cannot_hold_is_kept_as_the_nearest_that_it_can(
    client: Any, loss: float, kept: float
) -> None:
    table = a_table(client, "bad-loss")
    node = Node(instance="i-1", job="j", fleet="j-1-0", attempt=1, since_at=b.NOW)
    table.own([node])
    table.update_node(replace(node, step=3, loss=loss))
    found = table.node("i-1")
    assert found is not None
    assert (found.step, found.loss) == (3, kept)


def test_a_suspicion_is_remembered(store: JobStore) -> None:
    assert store.suspected("i-1", b.NOW) is None
    assert store.suspected("i-1", b.NOW + 60) == b.NOW


def test_a_cold_pool_is_remembered_for_every_job_and_forgotten_when_it_gives(store: JobStore) -> None:
    pool = Pool(instance_type="p5.48xlarge", zone="us-east-1a", market="spot", group="cluster")
    other = replace(pool, group="")
    cold = Cold(pool=pool, until=b.NOW + 60.5, misses=2, code="InsufficientInstanceCapacity")
    store.cool(cold)
    assert store.cold([pool, other]) == {pool: cold}
    store.warm([pool])
    assert store.cold([pool])[pool].until < b.NOW


def test_a_jobs_patience_is_its_own(store: JobStore) -> None:
    assert store.patience("j") == Patience()
    patience = Patience(asked_at=(b.NOW, b.NOW + 0.5), refused_since=b.NOW, soon=1, unknown=2)
    store.keep_patience("j", patience, b.NOW)
    assert (store.patience("j"), store.patience("k")) == (patience, Patience())


def test_a_machine_stays_in_quarantine_until_its_time_is_up(store: JobStore) -> None:
    found = Quarantined(host="gpu-1", until=b.NOW + 60, reason="efa_missing")
    store.quarantine(found)
    assert store.quarantined(["gpu-1", "gpu-2"], b.NOW) == {"gpu-1": found}
    assert store.quarantined(["gpu-1"], b.NOW + 61) == {}


def test_a_purchase_comes_back_to_the_letter(store: JobStore) -> None:
    purchase = Purchase(
        fleet="j-1-0",
        job="j",
        instance_type="p5.48xlarge",
        market="mixed",
        nodes=8,
        minimum=8,
        on_demand_nodes=1,
        places=(Place(subnet="subnet-a", zone="us-east-1a", group="g"),),
        template=Template(id="lt-1", version="3", image="ami-1"),
        expected=Expected(instance_type="p5.48xlarge", zones=("us-east-1a",), group="g", gpus=8, efas=32),
    )
    store.open_intent(
        FleetIntent(fleet="j-1-0", job="j", attempt=1, candidate=0, nodes=8, opened_at=b.NOW, purchase=purchase)
    )
    intent = store.intent("j-1-0")
    assert intent is not None
    assert intent.purchase == purchase


# -- the ledger and the line -------------------------------------------------------------------------------------------

GANG = Reserved(vcpus=384, gpus=16, nodes=2, market="spot")
STARTED = replace(b.started(), reserved=GANG)
BECAUSE = Because(code=Code.MARKET_QUOTA, sentence="s", unblock="u", until=b.NOW + 60.5, head_since=b.NOW)


def test_a_start_and_a_closing_move_the_ledger_with_the_row(store: JobStore) -> None:
    assert store.ledger() == Ledger()
    job = moved(store, created(store), STARTED)
    ledger = store.ledger()
    [place] = ledger.in_flight
    assert (ledger.version, place.job, place.reserved, place.attempt) == (1, job.id, GANG, 1)
    assert store.load(job.id).reserved == GANG  # type: ignore[union-attr]
    moved(store, job, b.training(), b.lost(), b.closed())
    ledger = store.ledger()
    assert (ledger.version, ledger.in_flight, ledger.freed) == (2, (), 1)
    assert ledger.usage["research/spot"] == pytest.approx(16 * 24 * 60, rel=0.001)


def test_a_start_on_a_ledger_that_moved_raced_and_wrote_nothing(store: JobStore) -> None:
    job = created(store)
    decided_on = store.ledger()
    store.put_ledger(decided_on, decided_on.held("vision", b.NOW, "ann"))
    after = b.after(job, STARTED)
    with pytest.raises(Raced):
        store.save(job, after, STARTED, dedup_key(STARTED), decided_on)
    assert (store.load(job.id), store.waiting("research")) == (job, [job.id])
    assert store.ledger().in_flight == ()
    store.save(job, after, STARTED, dedup_key(STARTED), store.ledger())
    assert store.load(job.id) == after


def test_the_second_of_two_who_change_the_ledger_raced(store: JobStore) -> None:
    first = store.ledger()
    store.put_ledger(first, first.held("vision", b.NOW, "ann"))
    with pytest.raises(Raced):
        store.put_ledger(first, first.held("audio", b.NOW, "bob"))
    held = store.ledger()
    assert [hold.scope for hold in held.holds] == ["vision"]
    store.put_ledger(held, held.unheld("vision"))
    with pytest.raises(Raced):
        store.put_ledger(held, held.unheld("vision"))


def quota_set(store: JobStore, kind: str, name: str, quota: Quota, key: str = "") -> bool:
    before = store.quota(kind, name)
    return store.put_quota(quota_change(kind, name, before, quota, key))


def quota_change(kind: str, name: str, before: Quota, after: Quota, key: str = "") -> QuotaChange:
    version = before.version + 1
    after = replace(after, version=version)
    return QuotaChange(
        kind=kind, name=name, before=before, after=after, by="ann", at=b.NOW + version, key=key or f"v#{version}"
    )


def test_a_quota_that_says_nothing_any_more_is_none(store: JobStore) -> None:
    assert quota_set(store, "team", "research", Quota(nodes=1))
    assert quota_set(store, "team", "research", Quota())
    assert store.quotas() == Quotas()
    assert quota_set(store, "team", "research", Quota(nodes=2))


def test_the_second_of_two_who_set_a_quota_raced_and_left_no_trace(store: JobStore) -> None:
    first = store.quota("market", "spot")
    assert store.put_quota(quota_change("market", "spot", first, Quota(gpus=8), "id#a"))
    with pytest.raises(Raced):
        store.put_quota(quota_change("market", "spot", first, Quota(gpus=9), "id#b"))
    assert store.quota("market", "spot") == Quota(gpus=8)
    assert [change.key for change in store.quota_changes()] == ["id#a"]  # type: ignore[attr-defined]


def test_a_wish_for_a_quota_that_was_obeyed_is_not_obeyed_again(store: JobStore) -> None:
    assert quota_set(store, "team", "research", Quota(gpus=8), "id#a")
    assert quota_set(store, "team", "research", Quota(gpus=9), "id#b")
    assert not quota_set(store, "team", "research", Quota(gpus=8), "id#a")
    assert store.quota("team", "research") == Quota(gpus=9)
    told = store.quota_changes()  # type: ignore[attr-defined]
    assert [(one.by, one.before, one.after) for one in told] == [
        ("ann", Quota(), Quota(gpus=8)),
        ("ann", Quota(gpus=8), Quota(gpus=9)),
    ]


def test_quotas_are_kept_by_team_and_market(store: JobStore) -> None:
    assert store.quotas() == Quotas()
    research = Quota(gpus=64, weight=2.5, preempt_from=90, preemptible=False)
    assert store.quota("team", "research") == Quota()
    assert quota_set(store, "team", "research", Quota(nodes=1))
    assert quota_set(store, "team", "research", research)
    assert quota_set(store, "market", "spot", Quota(vcpus=768))
    assert (store.quota("team", "research"), store.quota("team", "research").version) == (research, 2)
    assert store.quotas() == Quotas(teams={"research": research}, markets={"spot": Quota(vcpus=768)})


def test_the_line_shows_what_the_order_needs(store: JobStore) -> None:
    job = moved(store, created(store), STARTED, b.training(), b.lost(), b.closed())
    [waiter] = store.line("research")
    assert waiter == Waiter.of(job)
    assert store.line("nobody") == []
    assert store.load_all([job.id, "nobody"]) == [job]


def test_a_reason_is_kept_in_the_row_and_changes_nothing_else(store: JobStore) -> None:
    job = created(store)
    assert store.explain(Waiter.of(job), BECAUSE) is True
    told = replace(job, waiting=BECAUSE)
    assert (store.load(job.id), store.line("research")) == (told, [Waiter.of(told)])
    started = moved(store, told, STARTED)
    assert started.waiting is None
    assert store.explain(Waiter.of(told), BECAUSE) is False
    assert store.load(job.id) == started


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
    assert job_of(to_item({"pk": "LEDGER", "sk": "ROW"})) is None


def test_the_history_is_in_the_order_it_happened(client: Any) -> None:
    table = a_table(client, "history")
    job = moved(table, created(table), b.started(), b.training(), b.noticed())
    assert [item["kind"] for item in table.history(job.id)] == [
        "attempt_started", "training_started", "interruption_noticed",
    ]  # fmt: skip


def test_a_dispatch_wakes_on_what_may_let_a_job_start_and_not_on_its_own_words(client: Any) -> None:
    table = a_table(client, "wakes")
    job = created(table)
    told = replace(job, waiting=BECAUSE)
    book = Ledger().moved(job, b.after(job, STARTED), b.NOW)

    def change(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        return {"OldImage": to_item(old), "NewImage": to_item(new)}

    def item(ledger: Ledger) -> dict[str, Any]:
        return from_item(table._ledger_put(Ledger(), ledger)["Item"])

    assert wakes_dispatch({"NewImage": to_item(row_of(job))})
    assert not wakes_dispatch(change(row_of(job), row_of(told)))
    assert not wakes_dispatch(change(item(Ledger()), item(book)))
    assert wakes_dispatch(change(item(book), item(book.without({job.id}, b.NOW))))
    assert ("frees" in item(Ledger()), "frees" in item(book.without({job.id}, b.NOW))) == (False, True)
    assert not wakes_dispatch(change(item(book), item(book.held("vision", b.NOW, "ann"))))
    assert wakes_dispatch(change({"pk": "QUOTA", "sk": "TEAM#a"}, {"pk": "QUOTA", "sk": "TEAM#a", "gpus": 8}))


def test_a_dispatch_of_fifty_teams_reads_one_page_each_and_four_times_more(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = a_table(client, "fifty")
    monkeypatch.setattr("holdfast.adapters.job_table.LINE_PAGE", 1)
    monkeypatch.setattr("holdfast.application.dispatch.MOST_REASONS", 3)
    for n in range(100):
        job = b.a_job(id=f"j{n:03d}", team=f"team-{n % 50:02d}", gpus_per_node=8)
        for data in (row_of(job), {"pk": "TEAMS", "sk": job.team}):
            client.put_item(TableName=table.jobs, Item=to_item(data))
    quota_set(table, "market", "spot", Quota(gpus=64))
    calls: list[str] = []
    client.meta.events.register("before-call.dynamodb.*", lambda model, **_: calls.append(model.name), "count")
    ports = FakePorts()
    ports.store = table  # type: ignore[assignment]
    started = dispatch(ports)
    client.meta.events.unregister("before-call.dynamodb.*", unique_id="count")
    assert len(started) == 4
    reads = Counter(name for name in calls if name in ("GetItem", "BatchGetItem", "Query", "Scan"))
    assert reads == {"Query": 50 + 2, "GetItem": 1, "BatchGetItem": 1}
    assert calls.count("TransactWriteItems") == 4


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


def test_a_claim_is_had_by_one_until_its_time_is_over(store: JobStore) -> None:
    assert store.claim("pool-warning/x", b.NOW, b.NOW + 600)
    assert not store.claim("pool-warning/x", b.NOW + 599, b.NOW + 1200)
    assert store.claim("pool-warning/y", b.NOW, b.NOW + 600)
    assert store.claim("pool-warning/x", b.NOW + 600, b.NOW + 1200)


def test_many_rows_are_read_at_once_and_missing_ones_are_left_out(store: JobStore) -> None:
    job = created(store)
    assert store.load_all(["nobody", job.id]) == [job]
    assert store.load_all([]) == []


def a_template(version: int, body: str = "{}") -> dict[str, Any]:
    return {"name": "tiny", "version": version, "body": body}


def test_a_template_is_found_by_version_and_the_newest_without_one(store: JobStore) -> None:
    assert store.template("tiny", None) is None
    for version in (9, 10, 2):
        assert store.put_template(a_template(version))
    newest, second = store.template("tiny", None), store.template("tiny", 2)
    assert newest is not None
    assert second is not None
    assert (newest["version"], second["version"], second["body"]) == (10, 2, "{}")
    assert (store.template("tiny", 3), store.template("other", None)) == (None, None)


def test_a_version_of_a_template_never_changes(store: JobStore) -> None:
    store.put_template(a_template(1))
    assert not store.put_template(a_template(1))
    with pytest.raises(Rejected) as caught:
        store.put_template(a_template(1, '{"report_s": 5}'))
    assert caught.value.code == "template_version_taken"
    kept = store.template("tiny", 1)
    assert kept is not None
    assert kept["body"] == "{}"


def a_dataset(version: int, **changes: Any) -> dict[str, Any]:
    facts = {"uri": "s3://corpora/web", "digest": "d" * 64, "tokens": 96, "registered_at": b.NOW}
    return {"name": "web", "version": version, **facts, **changes}


def test_a_version_of_a_dataset_never_changes(store: JobStore) -> None:
    assert store.put_dataset(a_dataset(1))
    assert store.put_dataset(a_dataset(10, digest="e" * 64))
    # The same dataset registered again, by anybody at any time, is no change.
    assert not store.put_dataset(a_dataset(1, registered_at=b.NOW + 5))
    for change in ({"digest": "e" * 64}, {"uri": "s3://corpora/other"}):
        with pytest.raises(Rejected) as caught:
            store.put_dataset(a_dataset(1, **change))
        assert caught.value.code == "dataset_version_taken"
    kept = store.dataset("web", 1)
    assert kept is not None
    assert (kept["digest"], kept["tokens"], kept["registered_at"]) == ("d" * 64, 96, b.NOW)
    assert (store.dataset("web", 2), store.dataset("web1", 0)) == (None, None)


def test_all_datasets_are_listed_by_name_and_version(client: Any) -> None:
    table = a_table(client, "datasets")
    for one in (a_dataset(10), a_dataset(2), a_dataset(1, name="books")):
        table.put_dataset(one)
    assert [(one["name"], one["version"]) for one in table.datasets()] == [("books", 1), ("web", 2), ("web", 10)]


def dates(table: JobTable, client: Any) -> dict[str, float | None]:
    """Return when each item of both tables is forgotten, by `pk/sk` or `key`."""
    items = [from_item(item) for name in (table.jobs, table.orders) for item in client.scan(TableName=name)["Items"]]
    return {item.get("key") or f"{item['pk']}/{item['sk']}": item.get("expires_at") for item in items}


def test_what_belongs_to_an_ended_job_is_forgotten_before_its_row_and_kept_when_it_is_tried_again(client: Any) -> None:
    table = a_table(client, "expiry")
    job = moved(table, created(table), b.started())
    fleet = FleetIntent(
        fleet="f", job=job.id, attempt=1, candidate=0, nodes=1, opened_at=b.NOW, instances=("i-1",), closed_at=b.NOW
    )
    table.open_intent(fleet)
    table.own([Node(instance="i-1", job=job.id, fleet="f", attempt=1, since_at=b.NOW)])
    roster = Roster(job=job.id, attempt=1, roster_id="1-roster", nodes=(), leader=Leader(ip="10.0.0.1", port=4))
    table.put_roster(roster)
    table.put_wait(WaitItem(job=job.id, attempt=1, wait=Wait.TRAINING, token="t"))
    job = moved(table, job, b.intended(fleet="f"), b.ready(), b.training(), b.finished(), b.closed())
    assert job.ended_at is not None
    forgotten_at = job.ended_at + KEEP_S
    table.expire(job.id, forgotten_at)
    told = dates(table, client)
    mine = {name: at for name, at in told.items() if not name.startswith("TEAMS")}
    assert len(mine) == 15
    row_at, request_at = mine.pop(f"JOB#{job.id}/ROW"), mine.pop(f"JOB#{job.id}/REQUEST")
    [identity] = [name for name in mine if name.startswith("IDENTITY#")]
    assert row_at == request_at == mine.pop(identity) == forgotten_at + TTL_LAG_S
    assert set(mine.values()) == {forgotten_at}
    assert told["TEAMS/research"] is None
    moved(table, job, RetryRequested(at=b.NOW, request="retry"))
    table.expire(job.id, None)
    assert set(dates(table, client).values()) == {None}


def test_what_is_told_of_a_job_after_its_end_is_forgotten_with_the_rest(client: Any) -> None:
    table = a_table(client, "late")
    job = moved(table, created(table), b.started(), b.training(), b.finished(), b.closed())
    moved(table, job, b.saved(50))
    late = table.history(job.id)[-1]
    assert (late["kind"], late["expires_at"]) == ("checkpoint_saved", job.ended_at + KEEP_S)


MANY = tuple(f"i-{number:017x}" for number in range(256))


def test_o10_a_row_of_256_nodes_all_held_and_all_under_notice_is_under_16_kb(client: Any) -> None:
    job = replace(b.a_running_job(), held=MANY, doomed=MANY, reason="x" * 1_000, charged=dict.fromkeys(CLASSES, 1_000))
    assert 256 * 2 * len(MANY[0]) < len(json.dumps(row_of(job)).encode()) < 16_384
    assert 256 * len(MANY[0]) < len(json.dumps(encode(orders_for(job, b.NOW))).encode()) < 8_192


def test_o10_no_item_of_the_history_grows_with_the_gang_or_the_log(client: Any) -> None:
    table = a_table(client, "large")
    job = moved(table, created(table), b.started(), b.training())
    lost = FleetLost(at=b.NOW, attempt=1, instances=MANY, cause="sweep")
    failed = Failed(at=b.NOW, attempt=1, failure="crash", reason="é" * 9_000, log_tail="ü" * 9_000)
    moved(table, job, failed, lost, b.closed())
    items = table.history(job.id)
    assert max(len(json.dumps(item, ensure_ascii=False).encode()) for item in items) < 16_384
    assert len(table.load(job.id).reason) <= 1_003  # type: ignore[union-attr]


def test_o10_a_job_with_1000_interruptions_has_a_row_as_small_as_with_one(client: Any) -> None:
    def size(interruptions: int) -> int:
        job = b.a_job()
        for attempt in range(1, interruptions + 1):
            job = b.after(job, b.started(attempt), b.training(attempt), b.noticed(attempt=attempt), b.closed(attempt))
        return len(json.dumps(row_of(job)))

    assert size(1_000) < size(1) + 32


def test_o10_a_dedup_key_fits_a_sort_key_and_still_tells_gangs_apart() -> None:
    def key(*instances: str) -> str:
        return dedup_key(FleetLost(at=b.NOW, attempt=1, instances=instances))

    assert len(key(*MANY).encode()) < 200
    assert key(*MANY) == key(*reversed(MANY)) != key(*MANY[1:])
    assert key(MANY[0]) == f"fleet_lost#1#{MANY[0]}"
