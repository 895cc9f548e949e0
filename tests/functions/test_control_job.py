"""SQS control -> the job does what its user wants, or the sender is told why not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from bench.world.wire import wired_client
from bench.world.world import BUCKET, World
from holdfast.domain.ledger import Quota, Quotas
from job_contract.dataset import DatasetIndex, TokenizerFacts
from job_contract.dataset_writer import DatasetWriter
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
    orders_now,
    records,
    table,
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


def test_a_wish_for_a_job_that_may_still_come_is_tried_again_and_then_answered(world: World) -> None:
    assert fails(world, "ControlJob", received(CONTROL, 1))
    assert world.results == []
    assert failures(world.call("ControlJob", received(CONTROL, 3))) == []
    assert [result["code"] for result in world.results] == ["unknown_job"]


def received(event: str, times: int) -> dict[str, Any]:
    """The batch at its so many-th delivery."""
    again = copy.deepcopy(records(event))
    for record in again["Records"]:
        record["attributes"]["ApproximateReceiveCount"] = str(times)
    return again


def test_a_message_of_nonsense_is_answered_and_acknowledged(world: World) -> None:
    assert failures(world.call("ControlJob", delivered(CONTROL, "[]"))) == []
    assert [result["code"] for result in world.results] == ["not_json"]


def test_our_own_fault_goes_back_to_the_queue(world: World) -> None:
    training(world)
    breaks(world, "dynamodb", "TransactWriteItems")
    assert fails(world, "ControlJob", records(CONTROL))


def test_a_quota_is_set_and_cleared_by_message_and_its_change_written_down(world: World) -> None:
    sample = b.sample("control-quota.json")
    assert failures(world.call("ControlJob", delivered(CONTROL, json.dumps(sample)))) == []
    assert table().quotas().team("research") == Quota(gpus=64, weight=2.0, preempt_from=90)
    cleared = {"schema": sample["schema"], "action": "quota", "team": "research", "clear": True, "dedup_id": "c"}
    world.call("ControlJob", delivered(CONTROL, json.dumps(cleared)))
    world.call("ControlJob", delivered(CONTROL, json.dumps(sample)))  # comes again, late
    assert table().quotas() == Quotas()
    assert [(one.by, one.after.gpus) for one in table().quota_changes()] == [("ops", 64), ("", None)]
    assert world.results == []


def test_a_quota_that_is_raised_starts_what_waited_for_it_without_a_tick(world: World) -> None:
    def asked(**wish: Any) -> None:
        body = {"schema": "holdfast.control/1", "action": "quota", "team": "research", **wish}
        world.send("ControlQueue", json.dumps(body))
        world.agenda.run(for_s=10)

    asked(nodes=1)
    world.call("AcceptRequest", records(REQUESTS, 0))
    world.agenda.run(for_s=10)
    waiting = job_now().waiting
    assert waiting is not None
    assert (waiting.code, waiting.unblock) == (
        "over_team_quota",
        "ask for fewer nodes; or a higher quota: holdfast quota set --team research --nodes N",
    )
    asked(nodes=2)
    assert job_now().attempt == 1


def test_a_quota_that_makes_no_sense_is_answered_on_the_result_queue(world: World) -> None:
    wrong = {**b.sample("control-quota.json"), "market": "spot"}
    assert failures(world.call("ControlJob", delivered(CONTROL, json.dumps(wrong)))) == []
    [answer] = world.results
    assert (answer["code"], answer["team"], answer["dedup_id"]) == ("bad_quota", "research", wrong["dedup_id"])
    assert table().quotas() == Quotas()


def test_a_dataset_is_registered_once_and_a_message_that_comes_twice_changes_nothing(
    world: World, tmp_path: Path
) -> None:
    place = f"s3://{BUCKET}/teams/research/datasets/web"
    index = a_dataset(tmp_path / "web")
    wired_client("s3").put_object(
        Bucket=BUCKET, Key="teams/research/datasets/web/index.json", Body=(tmp_path / "web/index.json").read_bytes()
    )
    wish = {"schema": "holdfast.control/1", "action": "register_dataset", "name": "web", "version": 1, "uri": place}
    for _ in range(2):
        assert failures(world.call("ControlJob", delivered(CONTROL, json.dumps(wish)))) == []
    kept = table().dataset("web", 1)
    assert kept is not None
    assert (kept["uri"], kept["digest"], kept["tokens"]) == (place, index.sha256, 7)
    assert world.results == []


def test_a_dataset_that_is_not_there_is_answered_with_the_reason(world: World) -> None:
    place = f"s3://{BUCKET}/teams/research/datasets/none"
    wish = {"schema": "holdfast.control/1", "action": "register_dataset", "name": "web", "version": 1, "uri": place}
    assert failures(world.call("ControlJob", delivered(CONTROL, json.dumps(wish)))) == []
    assert [result["code"] for result in world.results] == ["dataset_not_found"]
    assert table().dataset("web", 1) is None


def a_dataset(folder: Path) -> DatasetIndex:
    facts = TokenizerFacts(kind="bytes")
    with DatasetWriter(folder, vocab=256, tokenizer=facts, source="", licence="", shard_tokens=64) as writer:
        writer.add(b"dataset")
        return writer.close()
