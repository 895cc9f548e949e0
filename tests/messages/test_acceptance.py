"""A request as the supervisor takes it in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.domain.errors import Rejected
from holdfast.domain.phase import Phase
from holdfast.messages.acceptance import candidates_of, prefix_of, read_acceptance
from holdfast.messages.job_request import read_request

SAMPLE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "events/job-request.json").read_text())
JOB = "tiny-llama-on-the-standard-li-fcea9e2ede"


def test_the_first_row_carries_what_the_supervisor_decides_by() -> None:
    order = read_acceptance(json.dumps(SAMPLE), now=5.0)
    job = order.job
    assert (job.id, job.phase, job.submitted_at, job.nodes, job.market) == (JOB, Phase.QUEUED, 5.0, 2, "spot")
    assert (job.attempts_limit, job.run_s, job.wait_s) == (5, 86400, 90000)
    assert (order.spec.job, order.spec.spec_id) == (JOB, job.spec_id)


def test_the_stored_body_is_read_back_to_the_same_order() -> None:
    order = read_acceptance(json.dumps(SAMPLE), now=5.0)
    assert read_acceptance(order.request["body"], now=5.0) == order


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("checkpoint", "resume_from", "s3://checkpoints/teams/research/x"),
    ],
)
def test_what_is_not_built_yet_is_refused_by_its_field(part: str, field: str, value: Any) -> None:
    request = {**SAMPLE, part: {**SAMPLE[part], field: value}}
    with pytest.raises(Rejected) as caught:
        read_acceptance(json.dumps(request), now=5.0)
    assert caught.value.code == "not_in_this_release"
    assert f"{part}.{field}" in caught.value.reason


@pytest.mark.parametrize("uri", ["file:///mnt/llama-7b", "s3://checkpoints/teams/research/weights/llama-7b"])
def test_weights_on_a_mount_of_the_nodes_or_of_the_team_are_passed_on(uri: str) -> None:
    request = {**SAMPLE, "training": {**SAMPLE["training"], "init_from": uri}}
    accepted = read_acceptance(json.dumps(request), now=5.0, bucket="checkpoints")
    assert accepted.asked.training.init_from == accepted.spec.training.init_from == uri


def test_machines_are_asked_for_by_type_in_the_order_of_the_request() -> None:
    fleet = {**SAMPLE["fleet"], "instance_types": ["p5.48xlarge", "p4d.24xlarge"]}
    asked = candidates_of(read_request(json.dumps({**SAMPLE, "fleet": fleet})))
    assert list(dict.fromkeys(candidate.instance_type for candidate in asked)) == ["p5.48xlarge", "p4d.24xlarge"]


def test_checkpoints_of_a_job_lie_under_its_team() -> None:
    assert prefix_of(read_request(json.dumps(SAMPLE))) == f"teams/research/jobs/{JOB}"
