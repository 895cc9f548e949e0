"""SQS requests -> the job is queued once, or its sender is told why not."""

from __future__ import annotations

from typing import Any

import pytest

from bench.world.world import BUCKET, World
from holdfast.application.intake import take_in
from holdfast.application.record import record
from holdfast.runtime.wiring import supervisor
from tests import builders as b
from tests.functions.scenes import (
    JOB,
    REQUESTS,
    breaks,
    delivered,
    fails,
    failures,
    holding,
    job_now,
    records,
    stream,
    text,
)

GOOD, BAD = 0, 1


def test_a_bad_request_is_answered_and_acknowledged(world: World) -> None:
    answer = world.call("AcceptRequest", records(REQUESTS, BAD))
    assert failures(answer) == []
    assert [(result["refused"], result["code"]) for result in world.results] == [(True, "missing_field")]
    assert world.results[0]["name"] == "no training"


@pytest.mark.parametrize("order", [(GOOD, BAD), (BAD, GOOD)])
def test_one_bad_record_does_not_hold_back_its_batch(world: World, order: tuple[int, int]) -> None:
    assert failures(world.call("AcceptRequest", records(REQUESTS, *order))) == []
    assert job_now().phase == "queued"


def test_five_deliveries_are_one_job(world: World) -> None:
    for _ in range(4):
        world.call("AcceptRequest", records(REQUESTS, GOOD))
    world.call("AcceptRequest", records(REQUESTS, GOOD, GOOD))
    assert [row["pk"] for row in world.rows()] == [f"JOB#{JOB}"]
    assert (job_now().version, world.results) == (1, [])


def test_plain_and_wrapped_deliveries_are_one_job(world: World) -> None:
    for name in ("job-request.json", "job-request-sns.json", "job-request-eventbridge.json"):
        world.call("AcceptRequest", delivered(REQUESTS, text(b.sample(name))))
    assert [row["pk"] for row in world.rows()] == [f"JOB#{JOB}"]


def test_an_identity_used_by_another_body_is_refused(world: World) -> None:
    world.call("AcceptRequest", records(REQUESTS, GOOD))
    changed = {**b.sample("job-request.json"), "priority": 51}
    assert failures(world.call("AcceptRequest", delivered(REQUESTS, text(changed)))) == []
    assert [result["code"] for result in world.results] == ["identity_conflict"]
    assert job_now().priority == 50


def test_a_body_that_is_not_json_is_answered(world: World) -> None:
    world.call("AcceptRequest", delivered(REQUESTS, "{"))
    assert world.results[0]["code"] == "not_json"


def test_our_own_fault_goes_back_to_the_queue_and_the_rest_of_the_batch_does_not(world: World) -> None:
    breaks(world, "dynamodb", "TransactWriteItems")
    batch = records(REQUESTS, GOOD, BAD)
    assert failures(world.call("AcceptRequest", batch)) == [batch["Records"][0]["messageId"]]
    assert len(world.results) == 1


def test_a_batch_of_nothing_but_our_own_faults_raises(world: World) -> None:
    breaks(world, "dynamodb", "TransactWriteItems")
    assert fails(world, "AcceptRequest", records(REQUESTS, GOOD))


def test_a_refusal_that_cannot_be_told_goes_back_to_the_queue(world: World) -> None:
    breaks(world, "sqs", "SendMessage")
    batch = records(REQUESTS, GOOD, BAD)
    assert failures(world.call("AcceptRequest", batch)) == [batch["Records"][1]["messageId"]]


# -- O-13 --------------------------------------------------------------------------------------------------------------


def test_o13_a_request_delivered_again_and_again_is_one_job_and_one_execution(world: World) -> None:
    """Twice at once, again while the execution runs, and again when the job has long been completed."""
    world.call("AcceptRequest", records(REQUESTS, GOOD, GOOD))
    waiting = stream(world, job_now())
    for _ in range(2):
        world.call("DispatchQueue", waiting)
        assert failures(world.call("AcceptRequest", records(REQUESTS, GOOD))) == []
    assert list(world.machine.executions) == [f"{JOB}-1"]
    completed = holding(world, b.after(job_now(), b.training(), b.finished(), b.closed()))
    assert failures(world.call("AcceptRequest", records(REQUESTS, GOOD, GOOD))) == []
    world.call("DispatchQueue", waiting)
    assert (job_now(), completed.phase, completed.over) == (completed, "completed", True)
    assert (list(world.machine.executions), world.results) == ([f"{JOB}-1"], [])


def test_o13_two_first_deliveries_at_once_have_one_winner(world: World) -> None:
    """The other found nothing either when it looked; its transaction is refused, and the row stays."""
    batch = records(REQUESTS, GOOD)
    body, rest = batch["Records"][0]["body"], [True]

    def overtaken(name: str, params: Any) -> None:
        if name == "TransactWriteItems" and rest and rest.pop():
            assert take_in(body, supervisor(), bucket=BUCKET).plan is not None
            record(b.cancelled(), JOB, supervisor())

    world.wire.answers["dynamodb"] = overtaken
    assert failures(world.call("AcceptRequest", batch)) == []
    assert (rest, [row["pk"] for row in world.rows()]) == ([], [f"JOB#{JOB}"])
    assert (job_now().phase, job_now().version) == ("cancelled", 2)


def test_o13_a_changed_body_under_a_used_dedup_id_is_refused_by_its_name(world: World) -> None:
    world.call("AcceptRequest", records(REQUESTS, GOOD))
    changed = {**b.sample("job-request.json"), "priority": 51}
    world.call("AcceptRequest", delivered(REQUESTS, text(changed)))
    [result] = world.results
    assert result["code"] == "identity_conflict"
    assert repr(changed["dedup_id"]) in result["reason"]
    assert job_now().priority == 50
