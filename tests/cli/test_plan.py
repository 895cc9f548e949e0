"""`holdfast plan`, `holdfast template put`, and the warnings of `holdfast submit`, against moto's AWS."""

from __future__ import annotations

import json
from typing import Any

import boto3
import pytest

from holdfast_cli.stack import outputs
from tests.cli.cloud import JOB, SAMPLE, Cloud, holdfast

REQUEST = json.loads(SAMPLE.read_text())
WHOLE = {key: REQUEST[key] for key in ("training", "fleet", "checkpoint", "limits", "report_s")}


@pytest.fixture
def networked(cloud: Cloud) -> Cloud:
    """The stack's subnets are two of moto's."""
    found = boto3.client("ec2").describe_subnets()["Subnets"][:2]
    cloud.outputs["SubnetIds"] = ",".join(subnet["SubnetId"] for subnet in found)
    cloud.outputs_file.write_text(json.dumps(cloud.outputs))
    outputs.cache_clear()
    return cloud


def with_fleet(**changes: Any) -> str:
    return json.dumps({**REQUEST, "fleet": {**REQUEST["fleet"], **changes}})


def test_a_plan_shows_price_memory_save_and_warnings_and_sends_nothing(networked: Cloud) -> None:
    ran = holdfast("plan", str(SAMPLE))
    assert ran.exit_code == 0
    for words in (
        JOB,
        "854,144 parameters",
        "c7i.large",
        "of 3.0 GiB",
        "us-east-1a, us-east-1b",
        "small_model_many_nodes",
    ):
        assert words in ran.stdout
    assert networked.sent("RequestQueueUrl") == []


def test_a_plan_in_json_has_every_number(networked: Cloud) -> None:
    data = json.loads(holdfast("plan", str(SAMPLE), "--json").stdout)
    [option] = data["options"]
    assert (data["job"], data["parallel"], option["vcpus"], option["addresses"]) == (JOB, "fsdp", 4, 2)
    assert option["usd_per_h"] > 0
    assert data["parameters"] == 854_144


def test_a_plan_that_would_be_refused_says_so_and_exits_2(networked: Cloud) -> None:
    ran = holdfast("plan", "-", stdin=with_fleet(instance_types=["c7i.largest"]))
    assert ran.exit_code == 2
    assert "c7i.largest" in ran.stdout
    assert "unknown_instance_type" in ran.stdout


def test_without_the_stacks_subnets_their_addresses_are_not_checked(cloud: Cloud) -> None:
    assert json.loads(holdfast("plan", str(SAMPLE), "--json").stdout).get("refusal") is None


def test_submit_refuses_before_it_sends_and_names_the_code(networked: Cloud) -> None:
    ran = holdfast("submit", "-", stdin=with_fleet(instance_types=["g5.xlarge"]))
    assert ran.exit_code == 2
    assert "no_efa" in ran.stderr
    assert networked.sent("RequestQueueUrl") == []


def test_submit_prints_its_warnings_beside_the_id(networked: Cloud) -> None:
    ran = holdfast("submit", str(SAMPLE))
    assert (ran.exit_code, ran.stdout.strip()) == (0, JOB)
    assert "warning: the model has 1 million parameters" in ran.stderr


def test_a_template_is_put_once_and_requests_are_made_from_it(networked: Cloud) -> None:
    document = {"schema": "holdfast.job-template/1", "name": "tiny", "version": 1, "request": WHOLE}
    assert "is there" in holdfast("template", "put", "-", stdin=json.dumps(document)).stdout
    assert "was there already" in holdfast("template", "put", "-", stdin=json.dumps(document)).stdout
    changed = {**document, "request": {**WHOLE, "report_s": 9}}
    refused = holdfast("template", "put", "-", stdin=json.dumps(changed))
    assert refused.exit_code == 2
    assert "next one" in refused.stderr

    asking = {"schema": REQUEST["schema"], "name": "mine", "team": "research", "template": {"name": "tiny"}}
    ran = holdfast("submit", "-", stdin=json.dumps(asking))
    assert ran.exit_code == 0
    # The door expands it: what is sent is what was written.
    assert networked.sent("RequestQueueUrl") == [asking]
    unknown = holdfast("submit", "-", stdin=json.dumps({**asking, "template": {"name": "none"}}))
    assert unknown.exit_code == 2
    assert "'none'" in unknown.stderr


def test_submit_follows_a_reference_to_see_what_it_sends(networked: Cloud) -> None:
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="data")
    s3.put_object(Bucket="data", Key="r.json", Body=SAMPLE.read_bytes())
    reference = {"schema": "holdfast.job-request-ref/1", "uri": "s3://data/r.json"}
    ran = holdfast("submit", "-", stdin=json.dumps(reference))
    assert ran.stdout.strip() == JOB
    assert networked.sent("RequestQueueUrl") == [reference]
