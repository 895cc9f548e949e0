"""SQS node reports -> what a member node told of itself is recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.world.wire import wired_client
from bench.world.world import JOBS, World
from holdfast.adapters.items import to_item
from holdfast.messages.acceptance import read_acceptance
from job_contract.reports import Progress, Steady, encode_report
from tests import builders as b
from tests.functions.scenes import (
    INSTANCE,
    JOB,
    NODE_REPORTS,
    PEER,
    breaks,
    delivered,
    fails,
    failures,
    job_now,
    records,
    table,
    training,
    written,
)

KINDS = [json.loads(record["body"])["kind"] for record in b.sample(NODE_REPORTS)["Records"]]


def of_kind(kind: str) -> dict[str, Any]:
    return records(NODE_REPORTS, KINDS.index(kind))


@pytest.mark.parametrize("kind", sorted(set(KINDS)))
def test_a_report_of_a_stranger_is_acknowledged_and_touches_nothing(world: World, kind: str) -> None:
    before = written(world)
    assert failures(world.call("OnNodeReport", of_kind(kind))) == []
    assert written(world) == before


def test_a_node_cannot_speak_for_another_one(world: World) -> None:
    training(world, attempt=2)
    report = of_kind("failed")
    report["Records"][0]["attributes"]["SenderId"] = f"AROAEXAMPLEEXAMPLE123:{PEER}"
    before = written(world)
    assert failures(world.call("OnNodeReport", report)) == []
    assert written(world) == before


def test_every_kind_of_report_of_a_member_is_taken(world: World) -> None:
    training(world, attempt=2)
    assert failures(world.call("OnNodeReport", records(NODE_REPORTS))) == []
    saved = job_now().saved
    assert saved is not None
    assert saved.save == "step-00000050.a0002.s01"


@pytest.mark.parametrize(
    ("kind", "phase"),
    [("checkpoint_saved", "resuming"), ("failed", "failed"), ("finished", "completed"), ("notice_seen", "interrupted")],
)
def test_a_report_moves_the_job(world: World, kind: str, phase: str) -> None:
    training(world, attempt=2)
    world.call("OnNodeReport", of_kind(kind))
    assert job_now().phase == phase


def test_a_report_that_comes_twice_is_one(world: World) -> None:
    training(world, attempt=2)
    world.call("OnNodeReport", of_kind("notice_seen"))
    version = job_now().version
    world.call("OnNodeReport", of_kind("notice_seen"))
    assert (job_now().version, job_now().interruptions) == (version, 1)


def test_progress_stands_on_the_node_and_not_on_the_row(world: World) -> None:
    job = training(world, attempt=2)
    world.call("OnNodeReport", of_kind("progress"))
    node = table().node(INSTANCE)
    assert node is not None
    assert (node.step, node.loss) == (60, 2.5)
    assert job_now().version == job.version


def test_a_message_of_nonsense_does_not_hold_back_its_batch(world: World) -> None:
    training(world, attempt=2)
    batch = records(NODE_REPORTS, KINDS.index("failed"), KINDS.index("finished"))
    batch["Records"][0]["body"] = "{"
    assert failures(world.call("OnNodeReport", batch)) == []
    assert job_now().phase == "completed"


def test_our_own_fault_goes_back_to_the_queue_and_the_rest_of_the_batch_does_not(world: World) -> None:
    training(world, attempt=2)
    breaks(world, "dynamodb", "TransactWriteItems")
    batch = records(NODE_REPORTS, KINDS.index("progress"), KINDS.index("finished"))
    assert failures(world.call("OnNodeReport", batch)) == [batch["Records"][1]["messageId"]]


def test_a_batch_of_nothing_but_our_own_faults_raises(world: World) -> None:
    training(world, attempt=2)
    breaks(world, "dynamodb", "TransactWriteItems")
    assert fails(world, "OnNodeReport", of_kind("finished"))


def test_slow_steps_are_measured_once_for_the_alarm_of_the_stack(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POWERTOOLS_METRICS_DISABLED", raising=False)
    training(world)
    request = read_acceptance((b.ROOT / "events" / "job-request.json").read_text(), now=world.agenda.now).request
    item = {"pk": f"JOB#{JOB}", "sk": "REQUEST", **request}
    wired_client("dynamodb").put_item(TableName=JOBS, Item=to_item(item))
    for number in range(8):
        world.agenda.now += 300
        steady = Steady(
            steps=60, world_size=2, tokens_per_s=9.0, step_ms=1000.0 if number < 2 else 1300.0, data_wait_ms=1.0
        )
        about = {"job": JOB, "attempt": 1, "instance": INSTANCE, "at": world.agenda.now}
        report = Progress(**about, step=10 * number + 10, loss=2.0, tokens_per_s=9.0, steady=steady)
        event = delivered(NODE_REPORTS, json.dumps(encode_report(report)))
        event["Records"][0]["attributes"]["SenderId"] = f"AROAEXAMPLEEXAMPLE123:{INSTANCE}"
        assert failures(world.call("OnNodeReport", event)) == []
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if '"StepsSlowed"' in line]
    [metric] = told
    assert (metric["StepsSlowed"], metric["_aws"]["CloudWatchMetrics"][0]["Dimensions"]) == ([1.0], [["stack"]])
    assert (job_now().slowdowns, job_now().phase) == (1, "running")
    [baseline] = [item for item in world.items() if item["pk"].startswith("BASELINE#")]
    assert (baseline["sk"].split("#")[:2], baseline["step_ms"]) == (["c7i.large", "2"], 1000)
