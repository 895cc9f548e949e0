"""The steps of the run machine, the dispatcher, the sweep and the news."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from bench.world.ec2 import SEEN_AFTER_S, SUBNETS
from bench.world.world import World
from job_contract.orders import Wait
from tests import builders as b
from tests.functions.scenes import (
    JOB,
    REQUESTS,
    breaks,
    fails,
    holding,
    job_now,
    records,
    stream,
    table,
    training,
    wait_now,
)

STEP = "step-launch-fleet.json"


def launching(world: World) -> None:
    """The recorded request was taken in and dispatched."""
    world.call("AcceptRequest", records(REQUESTS, 0))
    world.call("DispatchQueue", {})


# -- dispatch ----------------------------------------------------------------------------------------------------------


def test_a_job_that_waits_is_started_once_however_often_the_stream_and_the_tick_say_so(world: World) -> None:
    world.call("AcceptRequest", records(REQUESTS, 0))
    waiting = stream(world, job_now())
    assert world.call("DispatchQueue", waiting) == {"started": [JOB]}
    assert world.call("DispatchQueue", waiting) == {"started": []}
    assert world.call("DispatchQueue", {"detail-type": "Scheduled Event"}) == {"started": []}
    assert list(world.machine.executions) == [f"{JOB}-1"]


def test_a_start_that_fails_raises_so_that_the_stream_brings_it_again(world: World) -> None:
    world.call("AcceptRequest", records(REQUESTS, 0))
    breaks(world, "stepfunctions", "StartExecution")
    assert fails(world, "DispatchQueue", stream(world, job_now()))


# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_fleet_is_launched_once_and_every_machine_is_owned(world: World) -> None:
    launching(world)
    for _ in range(3):
        assert world.call("LaunchFleet", b.sample(STEP))["outcome"] == "launched"
    owners = {item["instance"] for item in world.items() if item["sk"] == "NODE"}
    assert owners == {instance.instance_id for instance in world.ec2.live}
    assert len(owners) == 2


def test_a_launch_keeps_the_spot_price_that_stood_when_it_bought(world: World) -> None:
    usual = world.wire.answers["ec2"]
    price = {"InstanceType": "c7i.large", "ProductDescription": "Linux/UNIX", "SpotPrice": "0.0412"}
    prices = [
        {**price, "AvailabilityZone": zone, "Timestamp": datetime.fromtimestamp(b.NOW - 60, UTC)}
        for zone in SUBNETS.values()
    ]

    def answer(name: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
        return {"SpotPriceHistory": prices} if name == "DescribeSpotPriceHistory" else usual(name, params)

    world.wire.answers["ec2"] = answer
    launching(world)
    world.call("LaunchFleet", b.sample(STEP))
    assert job_now().node_usd_h == 0.0412


def test_a_launch_without_capacity_is_refused_and_owns_nothing(world: World) -> None:
    launching(world)
    world.ec2.capacity.set_pool(slots=1)
    assert world.call("LaunchFleet", b.sample(STEP))["outcome"] == "refused"
    assert (job_now().phase, world.ec2.live) == ("resuming", [])
    assert "InsufficientInstanceCapacity" in job_now().reason


def test_a_launch_that_ec2_does_not_answer_raises_and_leaves_an_open_intent(world: World) -> None:
    launching(world)
    breaks(world, "ec2", "CreateFleet")
    assert fails(world, "LaunchFleet", b.sample(STEP))
    (intent,) = [item for item in world.items() if item["sk"] == "INTENT"]
    assert "closed_at" not in intent


def test_a_token_lies_where_news_will_find_it(world: World) -> None:
    training(world)
    world.call("LeaveToken", b.sample("step-leave-token.json"))
    item = wait_now(Wait.TRAINING)
    assert item is not None
    assert item.token == b.sample("step-leave-token.json")["token"]


def test_a_token_left_after_the_news_is_answered_at_once(world: World) -> None:
    training(world)
    world.call("OnSpotInterruption", b.sample("ec2-spot-interruption-warning.json"))
    world.machine.answer("StartExecution", {"name": f"{JOB}-1", "input": "{}"})
    world.call("LeaveToken", {**b.sample("step-leave-token.json"), "token": f"{JOB}-1/1"})
    assert world.wire.calls["leave_token", "SendTaskSuccess"] == 1
    assert wait_now(Wait.TRAINING) is None


def test_release_and_close_leave_no_machine_and_a_job_that_can_be_dispatched(world: World) -> None:
    launching(world)
    world.call("LaunchFleet", b.sample(STEP))
    world.agenda.now += SEEN_AFTER_S
    assert world.call("ReleaseFleet", b.sample(STEP)) == {"ended": 2}
    assert world.call("CloseAttempt", b.sample(STEP)) == {"phase": "resuming"}
    assert world.ec2.live == []
    assert job_now().dispatchable
    assert world.call("ReleaseFleet", b.sample(STEP)) == {"ended": 0}


def test_a_release_right_after_the_launch_is_tried_again_until_ec2_shows_the_machines_ending(world: World) -> None:
    launching(world)
    world.call("LaunchFleet", b.sample(STEP))
    assert fails(world, "ReleaseFleet", b.sample(STEP))
    assert world.ec2.live == []
    world.agenda.now += SEEN_AFTER_S
    assert world.call("ReleaseFleet", b.sample(STEP)) == {"ended": 0}


def test_a_release_that_ec2_does_not_answer_raises(world: World) -> None:
    launching(world)
    world.call("LaunchFleet", b.sample(STEP))
    breaks(world, "ec2", "TerminateInstances")
    assert fails(world, "ReleaseFleet", b.sample(STEP))
    assert job_now().attempt_open


def test_a_payload_of_another_release_of_the_machine_raises(world: World) -> None:
    for door in ("LaunchFleet", "LeaveToken", "ReleaseFleet", "CloseAttempt"):
        assert fails(world, door, {"job": JOB})


# -- sweep -------------------------------------------------------------------------------------------------------------


def test_a_sweep_over_a_calm_world_writes_nothing(world: World) -> None:
    launching(world)
    points = len(world.wire.points)
    assert world.call("Sweep", {}) == {"findings": 0}
    assert len(world.wire.points) == points


def test_the_sweep_alone_finds_members_that_are_gone(world: World) -> None:
    training(world)
    world.machine.answer("StartExecution", {"name": f"{JOB}-1", "input": "{}"})
    world.agenda.now += 60
    assert world.call("Sweep", {}) == {"findings": 1}
    assert job_now().phase == "resuming"


@pytest.mark.parametrize("operation", ["DescribeInstances", "DescribeInstanceStatus"])
def test_a_sweep_that_sees_half_a_picture_raises(world: World, operation: str) -> None:
    training(world)
    breaks(world, "ec2", operation)
    world.machine.answer("StartExecution", {"name": f"{JOB}-1", "input": "{}"})
    assert fails(world, "Sweep", {})


def test_a_sweep_that_cannot_release_one_job_sees_to_the_others_and_then_fails(world: World) -> None:
    training(world)
    world.machine.answer("StartExecution", {"name": f"{JOB}-1", "input": "{}"})
    world.machine.abort(f"{JOB}-1")
    other = holding(world, replace(b.after(b.a_job(id="job-1"), b.started()), phase_at=world.agenda.now - 60))
    assert table().alive() == [JOB, other.id]
    breaks(world, "ec2", "DescribeInstances")
    assert fails(world, "Sweep", {})
    assert f"{other.id}-1" in world.machine.executions


# -- news --------------------------------------------------------------------------------------------------------------


def test_news_is_told_once_per_phase_and_the_result_only_at_the_end(world: World) -> None:
    queued = b.a_job(id=JOB)
    life = [queued, b.after(queued, b.started())]
    for event in (b.intended(), b.training(), b.saved(), b.saved(50, number=2), b.finished(), b.closed()):
        life.append(b.after(life[-1], event))
    assert world.call("PublishChanges", stream(world, *life))["batchItemFailures"] == []
    assert [news["phase"] for news in world.told] == ["queued", "launching", "running", "completed", "completed"]
    assert [news["id"] for news in world.told] == [f"{JOB}#{number}" for number in range(1, 6)]
    assert [(result["id"], result["phase"]) for result in world.results] == [(f"{JOB}#result", "completed")]


def test_a_result_that_is_told_again_has_the_same_id(world: World) -> None:
    ended = b.after(b.a_job(id=JOB), b.cancelled())
    for _ in range(2):
        world.call("PublishChanges", stream(world, ended))
    assert {result["id"] for result in world.results} == {f"{JOB}#result"}


def test_news_that_the_bus_does_not_take_is_brought_again_from_there_on(world: World) -> None:
    queued = b.a_job(id=JOB)
    launched = b.after(queued, b.started())
    breaks(world, "events", "PutEvents", lambda params: '"phase": "launching"' in params["Entries"][0]["Detail"])
    answer = world.call("PublishChanges", stream(world, queued, launched))
    assert [failure["itemIdentifier"] for failure in answer["batchItemFailures"]] == ["1"]


def test_rows_of_other_kinds_are_no_news(world: World) -> None:
    holding(world, replace(b.a_job(id=JOB), news=3))
    record = stream(world, b.a_job(id=JOB))
    record["Records"][0]["dynamodb"]["NewImage"]["sk"] = {"S": "REQUEST"}
    world.call("PublishChanges", record)
    assert world.told == []
