"""The door with AWS behind it: plans, templates, references, and an AWS that is busy or says no."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.world.wire import ApiError, wired_client
from bench.world.world import BUCKET, World
from holdfast.messages.job_template import read_template, template_data
from tests import builders as b
from tests.functions.scenes import JOB, REQUESTS, delivered, fails, failures, job_now, table, text

SAMPLE = b.sample("job-request.json")
LOOKS = ("DescribeInstanceTypes", "DescribeInstanceTypeOfferings", "DescribeSpotPriceHistory", "DescribeSubnets")
WHOLE = {key: SAMPLE[key] for key in ("training", "fleet", "checkpoint", "limits", "report_s")}


def send(world: World, message: Any) -> None:
    body = message if isinstance(message, str) else text(message)
    assert failures(world.call("AcceptRequest", delivered(REQUESTS, body))) == []


def codes(world: World) -> list[str]:
    return [result["code"] for result in world.results]


def with_fleet(**changes: Any) -> dict[str, Any]:
    return {**SAMPLE, "fleet": {**SAMPLE["fleet"], **changes}}


def denies(world: World, operation: str) -> None:
    usual = world.wire.answers["ec2"]

    def answer(name: str, params: Any) -> Any:
        if name == operation:
            raise ApiError("UnauthorizedOperation", "no")
        return usual(name, params)

    world.wire.answers["ec2"] = answer


def test_an_accepted_request_has_its_plan_beside_it(world: World) -> None:
    send(world, SAMPLE)
    stored = table().request(JOB)
    assert stored is not None
    assert stored["plan"]["options"][0]["instance_type"] == "c7i.large"
    assert "small_model_many_nodes" in [note["code"] for note in stored["plan"]["warnings"]]
    assert (job_now().min_nodes, job_now().budget_usd) == (1, 5.0)


@pytest.mark.parametrize(
    ("fleet", "code"),
    [
        ({"instance_types": ["c7i.largest"]}, "unknown_instance_type"),
        ({"instance_types": ["p5.48xlarge"]}, "batch_too_small"),
        ({"instance_types": ["g5.xlarge"]}, "no_efa"),
        ({"instance_types": ["trn1.32xlarge"]}, "accelerator_not_supported"),
        ({"instance_types": ["m7g.large"]}, "arm_without_image"),
        ({"instance_types": ["c7i.large", "g5.48xlarge"]}, "mixed_accelerators"),
    ],
)
def test_a_refused_plan_goes_to_the_result_queue_with_its_code(world: World, fleet: dict[str, Any], code: str) -> None:
    send(world, {**with_fleet(**fleet), "training": {**SAMPLE["training"], "global_batch": 15}})
    assert codes(world) == [code]
    assert world.rows() == []


@pytest.mark.parametrize("operation", LOOKS)
def test_a_busy_aws_brings_the_message_back_and_loses_nothing(world: World, operation: str) -> None:
    usual = world.wire.answers["ec2"]

    def throttled(name: str, params: Any) -> Any:
        if name == operation:
            raise ApiError("RequestLimitExceeded", "busy")
        return usual(name, params)

    world.wire.answers["ec2"] = throttled
    assert fails(world, "AcceptRequest", delivered(REQUESTS, text(SAMPLE)))
    assert (world.rows(), world.results) == ([], [])


@pytest.mark.parametrize("operation", LOOKS)
def test_a_missing_permission_is_a_warning(world: World, operation: str) -> None:
    denies(world, operation)
    send(world, SAMPLE)
    stored = table().request(JOB)
    assert stored is not None
    unknown = [note["text"] for note in stored["plan"]["warnings"] if note["code"] == "fact_unknown"]
    assert any(operation in note for note in unknown)
    assert world.results == []


def test_a_request_that_names_a_template_alone_becomes_a_job_of_that_version(world: World) -> None:
    document = {"schema": "holdfast.job-template/1", "name": "tiny", "version": 3, "request": WHOLE}
    table().put_template(template_data(read_template(text(document))))
    asking = {"schema": SAMPLE["schema"], "name": "mine", "team": "research", "template": {"name": "tiny"}}
    for _ in range(2):
        send(world, asking)
    [row] = world.rows()
    stored = table().request(row["pk"].removeprefix("JOB#"))
    assert stored is not None
    body = json.loads(stored["body"])
    assert (body["template"], body["training"]) == ({"name": "tiny", "version": 3}, SAMPLE["training"])
    assert world.results == []


def test_a_template_that_is_not_there_is_refused_by_name(world: World) -> None:
    send(world, {"schema": SAMPLE["schema"], "name": "x", "team": "research", "template": {"name": "none"}})
    assert codes(world) == ["unknown_template"]


def test_a_request_by_reference_is_read_from_the_bucket(world: World) -> None:
    wired_client("s3").put_object(Bucket=BUCKET, Key="requests/r.json", Body=text(SAMPLE).encode())
    send(world, {"schema": "holdfast.job-request-ref/1", "uri": f"s3://{BUCKET}/requests/r.json"})
    assert job_now().name == SAMPLE["name"]


@pytest.mark.parametrize(
    ("uri", "code"),
    [
        (f"s3://{BUCKET}/requests/none.json", "reference_not_found"),
        ("s3://somebody-elses/r.json", "bucket_not_ours"),
        (f"s3://{BUCKET}/requests/../teams/x", "path_outside_team"),
    ],
)
def test_a_reference_that_may_not_be_followed_is_refused(world: World, uri: str, code: str) -> None:
    send(world, {"schema": "holdfast.job-request-ref/1", "uri": uri})
    assert codes(world) == [code]


def test_o26_a_save_of_another_bucket_is_refused_at_the_door(world: World) -> None:
    checkpoint = {**SAMPLE["checkpoint"], "resume_from": "s3://other-bucket/teams/research/jobs/x/saves/y"}
    send(world, {**SAMPLE, "checkpoint": checkpoint})
    assert codes(world) == ["bucket_not_ours"]


def test_o08_bodies_that_are_no_object_are_all_acknowledged_and_answered(world: World) -> None:
    bodies = ["hello", "", "null", '"a string"', "42", "[]", '{"job_name":"a"', "[" * 200_000]
    for body in bodies:
        send(world, body)
    assert codes(world) == ["not_json"] * len(bodies)
    send(world, "\ufeff" + text(SAMPLE))
    assert job_now().phase == "queued"


def test_o11_the_row_holds_a_budget_of_30_40(world: World) -> None:
    send(world, {**SAMPLE, "limits": {**SAMPLE["limits"], "budget_usd": 30.40}})
    assert job_now().budget_usd == 30.40


def test_o19_two_names_that_clean_to_one_are_two_jobs(world: World) -> None:
    for name in ("tiny llama", "tiny! llama", "团队/实验:1", "train 🚀 v2"):
        send(world, {key: value for key, value in {**SAMPLE, "name": name}.items() if key != "dedup_id"})
    assert len(world.rows()) == 4


def test_a_mixed_gang_is_taken_in(world: World) -> None:
    send(world, {**SAMPLE, "fleet": {**SAMPLE["fleet"], "market": "mixed"}})
    assert job_now().market == "mixed"
