"""SQS control -> the job does what its user wants, or the sender is told why not."""

from __future__ import annotations

from bench.world.world import World
from tests import builders as b
from tests.functions.scenes import (
    JOB,
    breaks,
    delivered,
    fails,
    failures,
    holding,
    job_now,
    orders_now,
    records,
    training,
)

CONTROL = "sqs-control-requests.json"


def test_a_waiting_job_is_cancelled_at_once(world: World) -> None:
    holding(world, b.a_job(id=JOB))
    assert failures(world.call("ControlJob", records(CONTROL))) == []
    assert job_now().phase == "cancelled"


def test_a_training_job_is_ordered_to_save_and_stop(world: World) -> None:
    training(world)
    world.call("ControlJob", records(CONTROL))
    assert (job_now().intent, orders_now(world).action) == ("cancel", "checkpoint_stop")


def test_a_cancel_that_comes_twice_is_one(world: World) -> None:
    training(world)
    world.call("ControlJob", records(CONTROL))
    version = job_now().version
    world.call("ControlJob", records(CONTROL))
    assert job_now().version == version


def test_an_unknown_job_and_a_message_of_nonsense_are_answered_and_acknowledged(world: World) -> None:
    assert failures(world.call("ControlJob", records(CONTROL))) == []
    assert failures(world.call("ControlJob", delivered(CONTROL, "[]"))) == []
    assert [result["code"] for result in world.results] == ["unknown_job", "not_json"]


def test_our_own_fault_goes_back_to_the_queue(world: World) -> None:
    training(world)
    breaks(world, "dynamodb", "TransactWriteItems")
    assert fails(world, "ControlJob", records(CONTROL))
