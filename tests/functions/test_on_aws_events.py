"""Events of EC2 and Step Functions -> what they mean for the job, and nothing for anybody else's."""

from __future__ import annotations

import pytest

from bench.world.world import World
from job_contract.orders import Wait, WaitItem
from tests import builders as b
from tests.functions.scenes import (
    INSTANCE,
    JOB,
    breaks,
    fails,
    holding,
    job_now,
    orders_now,
    table,
    training,
    wait_now,
    written,
)

WARNING = "ec2-spot-interruption-warning.json"
GOING = "ec2-instance-state-change-shutting-down.json"


@pytest.mark.parametrize("name", [WARNING, "ec2-spot-interruption-warning-zone-arn.json"])
def test_the_order_is_out_after_a_spot_warning(world: World, name: str) -> None:
    training(world)
    world.call("OnSpotInterruption", b.sample(name))
    orders = orders_now(world)
    assert (orders.action, orders.doomed) == ("checkpoint_stop", (INSTANCE,))
    assert orders.deadline_at == job_now().deadline_at


def test_a_warning_that_comes_twice_is_one_interruption(world: World) -> None:
    training(world)
    for _ in range(2):
        world.call("OnSpotInterruption", b.sample(WARNING))
    assert (job_now().phase, job_now().interruptions) == ("interrupted", 1)


def test_a_warning_tells_the_state_that_watches(world: World) -> None:
    job = training(world)
    world.machine.answer("StartExecution", {"name": f"{JOB}-1", "input": "{}"})
    table().put_wait(WaitItem(job=JOB, attempt=job.attempt, wait=Wait.TRAINING, token=f"{JOB}-1/1"))
    world.call("OnSpotInterruption", b.sample(WARNING))
    assert world.wire.calls["on_spot_interruption", "SendTaskSuccess"] == 1
    assert wait_now(Wait.TRAINING) is None


@pytest.mark.parametrize(("door", "name"), [("OnSpotInterruption", WARNING), ("OnInstanceStateChange", GOING)])
def test_news_of_a_foreign_instance_touches_nothing(world: World, door: str, name: str) -> None:
    before = written(world)
    world.call(door, b.sample(name))
    assert written(world) == before
    assert not world.wire.points


@pytest.mark.parametrize("door", ["OnSpotInterruption", "OnInstanceStateChange"])
@pytest.mark.parametrize("instance", ["", "i-1", "i-0A1B2C3D4E5F6000G", "arn:aws:ec2:::instance/", "../JOB#x", None])
def test_a_malformed_instance_id_is_set_aside(world: World, door: str, instance: str | None) -> None:
    training(world)
    event = b.sample(WARNING)
    event["detail"] |= {"instance-id": instance, "state": "terminated"}
    world.call(door, event)
    assert job_now().phase == "running"


def test_a_member_that_goes_is_lost_to_its_job(world: World) -> None:
    training(world)
    world.call("OnInstanceStateChange", b.sample("ec2-instance-state-change-running.json"))
    assert job_now().phase == "running"
    world.call("OnInstanceStateChange", b.sample(GOING))
    world.call("OnInstanceStateChange", b.sample("ec2-instance-state-change-terminated.json"))
    assert (job_now().phase, orders_now(world).action) == ("resuming", "wait")


def test_a_member_under_notice_that_goes_leaves_the_save_to_the_others(world: World) -> None:
    training(world)
    world.call("OnSpotInterruption", b.sample(WARNING))
    world.call("OnInstanceStateChange", b.sample(GOING))
    assert (job_now().phase, orders_now(world).action) == ("interrupted", "checkpoint_stop")


@pytest.mark.parametrize("status", ["failed", "timed-out", "aborted"])
def test_an_attempt_whose_execution_died_is_closed(world: World, status: str) -> None:
    training(world)
    world.call("OnAttemptEnded", b.sample(f"sfn-execution-{status}.json"))
    job = job_now()
    assert (job.phase, job.attempt_open, job.failure) == ("resuming", False, "lost")


def test_an_end_of_an_older_attempt_closes_nothing(world: World) -> None:
    training(world, attempt=2)
    before = written(world)
    world.call("OnAttemptEnded", b.sample("sfn-execution-failed.json"))
    assert written(world) == before


def test_an_execution_that_is_none_of_ours_is_set_aside(world: World) -> None:
    event = b.sample("sfn-execution-failed.json")
    event["detail"] |= {"name": "nightly", "input": None}
    world.call("OnAttemptEnded", event)
    assert not world.wire.points


@pytest.mark.parametrize(
    ("door", "name"),
    [
        ("OnSpotInterruption", WARNING),
        ("OnInstanceStateChange", GOING),
        ("OnAttemptEnded", "sfn-execution-failed.json"),
    ],
)
def test_our_own_fault_raises_so_that_lambda_calls_again(world: World, door: str, name: str) -> None:
    training(world)
    breaks(world, "dynamodb", "TransactWriteItems")
    assert fails(world, door, b.sample(name))


@pytest.mark.parametrize("completed", [False, True], ids=["while the next attempt trains", "when it has completed"])
def test_o13_the_late_failure_of_a_first_execution_overwrites_nothing(world: World, completed: bool) -> None:
    job = training(world, attempt=2)
    if completed:
        holding(world, b.after(job, b.finished(2), b.closed(2)))
    before = written(world)
    world.call("OnAttemptEnded", b.sample("sfn-execution-failed.json"))
    world.call("CloseAttempt", {"job": JOB, "attempt": 1})
    world.call("ReleaseFleet", {"job": JOB, "attempt": 1})
    assert written(world) == before
    assert job_now().phase == ("completed" if completed else "running")
