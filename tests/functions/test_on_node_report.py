"""SQS node reports -> what a member node told of itself is recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.world.world import World
from tests import builders as b
from tests.functions.scenes import (
    INSTANCE,
    NODE_REPORTS,
    PEER,
    breaks,
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
