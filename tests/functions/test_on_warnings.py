"""Rebalance, Health, Capacity Block, reservation and eviction events -> graded answers; nothing for anybody else's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

import on_health_event
from bench.world.wire import wired_client
from bench.world.world import JOBS, World
from holdfast.adapters.items import to_item
from holdfast.runtime import observability
from tests import builders as b
from tests.functions.scenes import (
    INSTANCE,
    JOB,
    PEER,
    REQUESTS,
    breaks,
    fails,
    failures,
    holding,
    job_now,
    orders_now,
    text,
    training,
    written,
)

REBALANCE, EVICTED = "ec2-rebalance-recommendation.json", "cloudtrail-bid-evicted-event.json"
WARNING = "ec2-spot-interruption-warning.json"
BLOCK = "cr-0abc1234def567890"
DOOR_OF = {
    "ec2-spot-interruption-warning": "OnSpotInterruption",
    "ec2-instance-state-change": "OnInstanceStateChange",
    "ec2-rebalance": "OnRebalanceRecommendation",
    "health": "OnHealthEvent",
    "capacity": "OnCapacityBlockEvent",
    "cloudtrail": "OnBidEvicted",
}
SAMPLES = sorted(
    path.name for path in (b.ROOT / "events").glob("*.json") if any(path.name.startswith(name) for name in DOOR_OF)
)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the metrics, one for each count."""
    names: list[str] = []
    for module in (observability, on_health_event):
        monkeypatch.setattr(module, "count", names.append)
    return names


@pytest.fixture
def call(world: World, counted: list[str]) -> Callable[[str, Any], None]:
    """Brings the event to the door that the template has for it."""

    def bring(name: str, event: Any) -> None:
        world.call(next(door for prefix, door in DOOR_OF.items() if name.startswith(prefix)), event)

    return bring


def running(instance: str) -> dict[str, Any]:
    """A machine of the job, as EC2 describes it."""
    return {
        "InstanceId": instance,
        "InstanceType": "c7i.large",
        "State": {"Name": "running", "Code": 16},
        "Placement": {"AvailabilityZone": "us-east-1a"},
        "LaunchTime": datetime.now(UTC),
        "Tags": [{"Key": "holdfast:job", "Value": JOB}, {"Key": "holdfast:stack", "Value": "holdfast"}],
    }


def pending(world: World, days: float) -> dict[str, Any]:
    """A retirement of INSTANCE, so many days from now."""
    from email.utils import formatdate

    event = b.sample("health-ec2-instance-retirement-scheduled-id-entity.json")
    event["detail"]["startTime"] = formatdate(world.agenda.now + days * 86400, usegmt=True)
    return event


@pytest.mark.parametrize("name", SAMPLES)
def test_every_recorded_event_of_a_stranger_is_acknowledged_and_touches_nothing(
    world: World, call: Callable[[str, Any], None], counted: list[str], name: str
) -> None:
    before = written(world)
    call(name, b.sample(name))
    assert written(world) == before
    assert set(counted) <= {"ForeignInstance", "PublicHealthIssue"}


def test_advice_brings_one_early_save_and_leaves_the_job_running(
    world: World, call: Callable[[str, Any], None]
) -> None:
    training(world)
    for _ in range(5):
        call(REBALANCE, b.sample(REBALANCE))
    assert (job_now().phase, orders_now(world).action, job_now().version) == ("running", "checkpoint", 7)


def test_after_advice_the_sweep_looks_where_the_gang_would_go_and_nothing_is_asked_of_ec2_that_changes_anything(
    world: World, call: Callable[[str, Any], None]
) -> None:
    training(world)
    body = json.loads(b.sample(REQUESTS)["Records"][0]["body"])
    body["fleet"] = {"instance_types": ["c7i.large"], "nodes": 2, "market": "spot", "zones": "any"}
    request = {"pk": f"JOB#{JOB}", "sk": "REQUEST", "body": json.dumps(body)}
    wired_client("dynamodb").put_item(TableName=JOBS, Item=to_item(request))
    world.machine.answer("StartExecution", {"name": f"{JOB}-1", "input": "{}"})
    usual, called = world.wire.answers["ec2"], list[str]()

    def noted(operation: str, params: Any) -> Any:
        called.append(operation)
        if operation == "DescribeInstances":
            return {"Reservations": [{"Instances": [running(one) for one in (INSTANCE, PEER)]}]}
        return usual(operation, params)

    world.wire.answers["ec2"] = noted
    call(REBALANCE, b.sample(REBALANCE))
    assert (orders_now(world).action, called) == ("checkpoint", [])
    world.call("Sweep", {})
    looked, found = len(called), job_now().elsewhere
    world.call("Sweep", {})
    assert found is not None
    assert found.words == (
        "2 c7i.large (spot) in us-east-1b; its own pool, c7i.large in us-east-1a (spot), is asked last"
    )
    assert (job_now().phase, job_now().elsewhere) == ("running", found)
    assert ("DescribeSubnets" in called[:looked], "DescribeSubnets" in called[looked:]) == (True, False)
    assert [name for name in called if not name.startswith("Describe")] == []


@pytest.mark.parametrize(
    "name",
    [
        "health-ec2-instance-retirement-scheduled-id-entity.json",
        "health-ec2-instance-retirement-scheduled-arn-entity.json",
        "health-ec2-instance-reboot-maintenance-scheduled.json",
        "health-ec2-instance-retirement-page-1-of-2.json",
        "health-ec2-instance-retirement-page-2-of-2.json",
        "health-ec2-persistent-instance-retirement-scheduled.json",
    ],
)
def test_maintenance_that_has_begun_moves_the_job_that_it_names(
    world: World, call: Callable[[str, Any], None], name: str
) -> None:
    training(world)
    call(name, b.sample(name))
    assert (job_now().phase, orders_now(world).action) == ("interrupted", "checkpoint_stop")
    assert orders_now(world).doomed == ()


def test_maintenance_weeks_away_is_remembered(world: World, call: Callable[[str, Any], None]) -> None:
    training(world)
    call("health", pending(world, days=14))
    assert (job_now().phase, orders_now(world).action) == ("running", "run")
    assert job_now().move_by_at == pytest.approx(world.agenda.now + 14 * 86400 - 1800, abs=1)


def test_pages_and_backup_copies_in_any_order_are_one_fact(world: World, call: Callable[[str, Any], None]) -> None:
    training(world)
    event = pending(world, days=14)
    copy = {**event, "region": "us-west-2", "detail": {**event["detail"], "backupEvent": "true"}}
    for one in (copy, event, copy, event):
        call("health", one)
    assert job_now().version == 7


@pytest.mark.parametrize("copy", ["primary", "backup-copy"])
def test_a_failing_disk_is_an_issue_that_moves_the_job_after_a_save(
    world: World, call: Callable[[str, Any], None], copy: str
) -> None:
    training(world)
    call("health", b.sample(f"health-ec2-instance-store-drive-degraded-{copy}.json"))
    assert (job_now().phase, orders_now(world).action) == ("running", "checkpoint")
    assert job_now().move_after_save_at is not None


def test_a_public_issue_is_an_alarm_and_moves_nobody(
    world: World, call: Callable[[str, Any], None], counted: list[str]
) -> None:
    job = training(world)
    call("health", b.sample("health-ec2-operational-issue-public.json"))
    assert (job_now(), counted) == (job, ["PublicHealthIssue"])


@pytest.mark.parametrize(
    "name",
    [
        "health-ec2-instance-retirement-closed.json",
        "health-ec2-odcr-underutilization.json",
        "health-ec2-odcr-underutilization-summary.json",
    ],
)
def test_what_is_closed_or_a_mere_notification_does_nothing(
    world: World, call: Callable[[str, Any], None], counted: list[str], name: str
) -> None:
    job = training(world)
    call(name, b.sample(name))
    assert (job_now(), counted) == (job, [])


@pytest.mark.parametrize("form", ["capacity-block", "interruptible"])
def test_a_reservation_that_is_taken_back_interrupts_its_job(
    world: World, call: Callable[[str, Any], None], form: str
) -> None:
    training(world)
    event = b.sample(f"capacity-reservation-instance-interruption-warning-{form}.json")
    call("capacity", event)
    assert (job_now().phase, orders_now(world).doomed) == ("interrupted", (INSTANCE,))
    assert orders_now(world).deadline_at == 1796209200.0


@pytest.mark.parametrize("name", ["delivered", "delivered-older-name", "expiration-warning"])
def test_events_of_a_block_without_machines_of_ours_do_nothing(
    world: World, call: Callable[[str, Any], None], name: str
) -> None:
    job = training(world)
    call("capacity", b.sample(f"capacity-block-{name}.json"))
    assert job_now() == job


def test_an_eviction_that_names_several_loses_each_to_its_job(
    world: World, call: Callable[[str, Any], None], counted: list[str]
) -> None:
    training(world)
    event = b.sample(EVICTED)
    event["detail"]["serviceEventDetails"]["instanceIdSet"] += ["i-0fffffffffffffff9", "mine", PEER.upper()]
    call(EVICTED, event)
    assert (job_now().phase, job_now().failure) == ("resuming", "preemption")
    assert counted == ["SetAside", "ForeignInstance"]


def test_a_notice_asks_the_other_jobs_of_the_pool_for_a_save(world: World, call: Callable[[str, Any], None]) -> None:
    job = training(world)
    other = holding(world, replace(job, id="other-0123456789", fleet="other-0123456789-1-0"))
    call(WARNING, b.sample(WARNING))
    item = world.orders_item("other-0123456789/orders")
    assert item is not None
    assert (job_now().phase, item["action"], other.phase) == ("interrupted", "checkpoint", "running")


@pytest.mark.parametrize(
    ("door", "name"),
    [
        ("OnRebalanceRecommendation", REBALANCE),
        ("OnHealthEvent", "health-ec2-instance-retirement-scheduled-id-entity.json"),
        ("OnCapacityBlockEvent", "capacity-reservation-instance-interruption-warning-capacity-block.json"),
        ("OnBidEvicted", EVICTED),
    ],
)
def test_our_own_fault_raises_so_that_lambda_calls_again(world: World, door: str, name: str) -> None:
    training(world)
    breaks(world, "dynamodb", "TransactWriteItems")
    assert fails(world, door, b.sample(name))


@pytest.mark.parametrize("event", [{}, {"detail": None}, {"detail-type": 5}, {"time": "now", "detail": {}}, []])
@pytest.mark.parametrize("door", sorted(set(DOOR_OF.values())))
def test_an_event_of_another_form_is_set_aside(world: World, counted: list[str], door: str, event: Any) -> None:
    world.call(door, event if isinstance(event, dict) else {"detail": event})
    assert counted == ["SetAside"]


# -- cases -------------------------------------------------------------------------------------------------------------


def test_o01_a_thousand_foreign_warnings_are_counted_and_do_not_delay_ours(
    world: World, call: Callable[[str, Any], None], counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[str] = []
    monkeypatch.setattr(observability.logger, "error", errors.append)
    training(world)
    foreign = b.sample(WARNING)
    foreign["detail"]["instance-id"] = "i-0fffffffffffffff9"
    before = written(world)
    for _ in range(1000):
        call(WARNING, foreign)
    assert written(world) == before
    assert counted == ["ForeignInstance"] * 1000
    call(WARNING, b.sample(WARNING))
    assert (job_now().phase, job_now().interruptions) == ("interrupted", 1)
    assert (errors, world.failed_calls) == ([], [])


O02 = {
    f"arn:aws:ec2:us-west-2:111122223333:instance/{INSTANCE}": True,
    INSTANCE.upper(): True,
    "": False,
    (INSTANCE,): False,
    None: False,
    "i-0a1b2c3d4e5f6000g": False,
    "instance/": False,
}


@pytest.mark.parametrize("door", ["OnSpotInterruption", "OnInstanceStateChange", "OnRebalanceRecommendation"])
@pytest.mark.parametrize("written_id", O02)
def test_o02_an_odd_instance_id_is_normalised_or_set_aside_once(
    world: World, counted: list[str], door: str, written_id: Any
) -> None:
    job = training(world)
    event = b.sample(WARNING)
    event["detail"] |= {"instance-id": list(written_id) if isinstance(written_id, tuple) else written_id}
    event["detail"] |= {"state": "terminated"}
    world.call(door, event)
    assert (job_now() != job, counted) == ((True, []) if O02[written_id] else (False, ["SetAside"]))


@pytest.mark.parametrize("name", ["health-ec2-instance-reboot-maintenance-scheduled.json", EVICTED])
def test_o02_bad_ids_among_good_ones_spoil_none_of_them(
    world: World, call: Callable[[str, Any], None], counted: list[str], name: str
) -> None:
    training(world)
    event = json.loads(text(b.sample(name)).replace("i-0a1b2c3d4e5f60003", "i-nonsense"))
    if name == EVICTED:
        event["detail"]["serviceEventDetails"]["instanceIdSet"].insert(0, "i-nonsense")
    call(name, event)
    assert job_now().phase in ("interrupted", "resuming")
    assert counted == ["SetAside"]


def five(kinds: list[str]) -> dict[str, Any]:
    """A batch of five: each good one under a name of its own."""
    good = b.sample("job-request.json")
    bodies = {
        "many": text({**good, "nodes": "many"}),
        "list": "[]",
        **{kind: text({**good, "name": kind, "dedup_id": kind}) for kind in kinds if kind.startswith("good")},
    }
    record = b.sample(REQUESTS)["Records"][0]
    return {"Records": [{**record, "messageId": kind, "body": bodies[kind]} for kind in kinds]}


def test_o07_records_that_fail_validation_are_refused_with_a_reason_and_spare_their_batch(world: World) -> None:
    """Bad records are their senders' fault: answered on the result queue and acknowledged, never a dead letter."""
    batch = five(["good-1", "many", "good-2", "list", "good-3"])
    for _ in range(2):
        assert failures(world.call("AcceptRequest", batch)) == []
    assert len(world.rows()) == 3
    assert {row["version"] for row in world.rows()} == {1}
    assert [result["refused"] for result in world.results] == [True] * 4
    assert [result["code"] for result in world.results] == ["unknown_field", "not_json"] * 2
    assert len({result["id"] for result in world.results}) == 2
    assert "nodes" in world.results[0]["reason"]


def test_o07_a_record_that_fails_by_our_fault_goes_back_alone(world: World) -> None:
    def bad(params: Any) -> bool:
        return "good-2" in json.dumps(params, default=str)

    breaks(world, "dynamodb", "TransactWriteItems", bad)
    batch = five(["good-1", "good-2", "good-3"])
    assert failures(world.call("AcceptRequest", batch)) == ["good-2"]
    assert len(world.rows()) == 2


def test_counts_are_metrics_of_their_own_and_zero_is_never_sent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POWERTOOLS_METRICS_DISABLED", raising=False)
    observability.count("ForeignInstance")
    [line] = capsys.readouterr().out.splitlines()
    metric = json.loads(line)
    assert metric["ForeignInstance"] == [1.0]
    assert metric["_aws"]["CloudWatchMetrics"][0]["Namespace"] == "Holdfast"
