"""What is asked of EC2, checked against its own model; whole gangs are bought in tests/local."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber

from holdfast.adapters.fleets_ec2 import Ec2Fleets
from holdfast.domain.errors import CapacityUnavailable
from holdfast.domain.placement import Candidate

SPOT = Candidate(instance_type="c7i.large", market="spot", nodes=2)


@pytest.fixture
def stub() -> Iterator[tuple[Ec2Fleets, Stubber]]:
    client = boto3.client("ec2", region_name="us-east-1", aws_access_key_id="t", aws_secret_access_key="t")
    with Stubber(client) as stubber:
        yield Ec2Fleets(client, stack="s", launch_template_id="lt-1", subnet_ids=["subnet-a", "subnet-b"]), stubber


def answer(*ids: str, errors: tuple[str, ...] = ()) -> dict[str, Any]:
    group = {
        "InstanceIds": list(ids),
        "InstanceType": "c7i.large",
        "LaunchTemplateAndOverrides": {"Overrides": {"AvailabilityZone": "us-east-1a"}},
    }
    return {"Instances": [group] if ids else [], "Errors": [{"ErrorCode": code} for code in errors]}


def expected(market: str) -> dict[str, Any]:
    spot = market == "spot"
    return {
        "Type": "instant",
        "ClientToken": ANY,
        "LaunchTemplateConfigs": ANY,
        "TagSpecifications": ANY,
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": 2,
            "DefaultTargetCapacityType": "spot" if spot else "on-demand",
        },
        "SpotOptions" if spot else "OnDemandOptions": ANY,
    }


@pytest.mark.parametrize("market", ["spot", "on_demand"])
def test_a_gang_is_one_call(stub: tuple[Ec2Fleets, Stubber], market: str) -> None:
    fleets, stubber = stub
    stubber.add_response("create_fleet", answer("i-1", "i-2"), expected(market))
    bought = fleets.buy("j-1-0", "j", Candidate(instance_type="c7i.large", market=market, nodes=2))
    assert (bought.instances, bought.zone, bought.errors) == (("i-1", "i-2"), "us-east-1a", ())


def test_all_or_nothing_is_asked_for_under_one_token(stub: tuple[Ec2Fleets, Stubber]) -> None:
    fleets, _ = stub
    request = fleets._request("j-1-0", "j", SPOT, ["subnet-a"])
    assert request["SpotOptions"]["MinTargetCapacity"] == 2
    assert request["SpotOptions"]["SingleAvailabilityZone"]
    assert request["SpotOptions"]["SingleInstanceType"]
    assert request["SpotOptions"]["AllocationStrategy"] == "capacity-optimized"
    assert request["ClientToken"] == fleets._request("j-1-0", "j", SPOT, ["subnet-a"])["ClientToken"]
    assert request["ClientToken"] != fleets._request("j-2-0", "j", SPOT, ["subnet-a"])["ClientToken"]
    assert {spec["ResourceType"] for spec in request["TagSpecifications"]} == {
        "fleet", "instance", "volume", "network-interface",
    }  # fmt: skip


def test_a_shortfall_says_what_ec2_said(stub: tuple[Ec2Fleets, Stubber]) -> None:
    fleets, stubber = stub
    stubber.add_response("create_fleet", answer(errors=("InsufficientInstanceCapacity",)), expected("spot"))
    bought = fleets.buy("j-1-0", "j", SPOT)
    assert (bought.instances, bought.errors) == ((), ("InsufficientInstanceCapacity",))


def test_a_zone_without_a_subnet_is_named(stub: tuple[Ec2Fleets, Stubber]) -> None:
    fleets, stubber = stub
    subnets = [{"SubnetId": "subnet-a", "AvailabilityZone": "us-east-1a"}]
    stubber.add_response("describe_subnets", {"Subnets": subnets}, {"SubnetIds": ["subnet-a", "subnet-b"]})
    with pytest.raises(CapacityUnavailable, match="us-east-1f"):
        fleets.buy("j-1-0", "j", Candidate(instance_type="c7i.large", market="spot", nodes=2, zones=("us-east-1f",)))


def test_one_unknown_id_does_not_keep_the_others_alive(stub: tuple[Ec2Fleets, Stubber]) -> None:
    fleets, stubber = stub
    stubber.add_client_error("terminate_instances", "InvalidInstanceID.NotFound")
    stubber.add_client_error(
        "terminate_instances", "InvalidInstanceID.NotFound", expected_params={"InstanceIds": ["i-1"]}
    )
    stubber.add_response("terminate_instances", {}, {"InstanceIds": ["i-2"]})
    fleets.terminate(["i-1", "i-2"])
    stubber.assert_no_pending_responses()


def test_an_instance_is_read_with_its_owner_tags(stub: tuple[Ec2Fleets, Stubber]) -> None:
    fleets, stubber = stub
    raw = {
        "InstanceId": "i-1",
        "State": {"Code": 16, "Name": "running"},
        "InstanceType": "c7i.large",
        "Placement": {"AvailabilityZone": "us-east-1a"},
        "LaunchTime": datetime(2026, 1, 1, tzinfo=UTC),
        "Tags": [{"Key": "holdfast:job", "Value": "j"}, {"Key": "holdfast:fleet", "Value": "j-1-0"}],
    }
    stubber.add_response("describe_instances", {"Reservations": [{"Instances": [raw]}]}, {"Filters": ANY})
    found = fleets.described(["i-1"])[0]
    assert (found.job, found.fleet, found.live, found.launched_at) == ("j", "j-1-0", True, 1767225600.0)
    assert fleets.described([]) == []
