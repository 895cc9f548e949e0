"""Launch templates and placement groups: what is made from what, found again, and given back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber

from holdfast.adapters.fleets_ec2 import machine_of
from holdfast.adapters.launch_templates_ec2 import LaunchTemplates
from holdfast.adapters.placement_groups_ec2 import PlacementGroups
from holdfast.domain.network_cards import MachineType
from holdfast.domain.purchase import Reservation, ReservationKind, Template
from tests.builders import ROOT

TYPES = json.loads((ROOT / "tests/domain/data/instance_types.json").read_text())
P5, PLAIN = machine_of(TYPES["p5.48xlarge"]), machine_of(TYPES["c7i.large"])
BASE = Template(id="lt-base", version="3", image="ami-1")
DATA = {
    "ImageId": "resolve:ssm:/an/ami",
    "SecurityGroupIds": ["sg-1"],
    "UserData": "IyEvYmluL2Jhc2g=",
    # A describe answer says `State`; a request must not.
    "MetadataOptions": {"State": "applied", "HttpTokens": "required"},
}
BLOCK = Reservation(
    id="cr-1", kind=ReservationKind.CAPACITY_BLOCK, instance_type="p5.48xlarge", zone="us-east-1a", state="active",
    free=8,
)  # fmt: skip


@pytest.fixture
def client() -> Any:
    return boto3.client("ec2", region_name="us-east-1", aws_access_key_id="t", aws_secret_access_key="t")


@pytest.fixture
def stub(client: Any) -> Iterator[Stubber]:
    with Stubber(client) as stubber:
        yield stubber


def templates(client: Any) -> LaunchTemplates:
    return LaunchTemplates(client, stack="s", base="lt-base")


def described(version: int = 3, **data: Any) -> dict[str, Any]:
    return {"LaunchTemplateVersions": [{"VersionNumber": version, "LaunchTemplateData": {**DATA, **data}}]}


def made(client: Any, stub: Stubber, machine: MachineType, reservation: Reservation | None = None) -> dict[str, Any]:
    """The request by which a template is made."""
    asked: dict[str, Any] = {}
    stub.add_response("describe_launch_template_versions", described())
    stub.add_response("create_launch_template", {"LaunchTemplate": {"LaunchTemplateId": "lt-new"}})
    client.meta.events.register(
        "provide-client-params.ec2.CreateLaunchTemplate", lambda params, **_: asked.update(params)
    )
    assert templates(client).template_for(BASE, machine, reservation) == Template(
        id="lt-new", version="1", image="ami-1"
    )
    return asked


def test_the_base_is_pinned_by_number_and_its_image_resolved_once(client: Any, stub: Stubber) -> None:
    asked = {"LaunchTemplateId": "lt-base", "Versions": ["$Latest"], "ResolveAlias": True}
    stub.add_response("describe_launch_template_versions", described(ImageId="ami-1"), asked)
    assert templates(client).base_template() == BASE


def test_a_type_without_efa_uses_the_base(client: Any, stub: Stubber) -> None:
    assert templates(client).template_for(BASE, PLAIN, None) == BASE


def test_efa_interfaces_carry_the_security_groups_and_no_subnet(client: Any, stub: Stubber) -> None:
    data = made(client, stub, P5)["LaunchTemplateData"]
    assert len(data["NetworkInterfaces"]) == 33
    assert data["NetworkInterfaces"][1] == {
        "NetworkCardIndex": 0, "DeviceIndex": 1, "InterfaceType": "efa-only", "DeleteOnTermination": True,
        "Groups": ["sg-1"],
    }  # fmt: skip
    assert "SecurityGroupIds" not in data
    assert not [one for one in data["NetworkInterfaces"] if "SubnetId" in one or "AssociatePublicIpAddress" in one]


def test_the_rest_is_the_bases_own_with_the_image_pinned(client: Any, stub: Stubber) -> None:
    asked = made(client, stub, P5)
    data = asked["LaunchTemplateData"]
    assert (data["ImageId"], data["UserData"]) == ("ami-1", DATA["UserData"])
    assert data["MetadataOptions"] == {"HttpTokens": "required"}
    assert asked["TagSpecifications"] == [
        {"ResourceType": "launch-template", "Tags": [{"Key": "holdfast:stack", "Value": "s"}]}
    ]


def test_a_capacity_block_is_in_the_template(client: Any, stub: Stubber) -> None:
    data = made(client, stub, PLAIN, BLOCK)["LaunchTemplateData"]
    assert data["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    assert data["CapacityReservationSpecification"] == {"CapacityReservationTarget": {"CapacityReservationId": "cr-1"}}
    assert data["SecurityGroupIds"] == ["sg-1"]


def test_the_same_needs_find_the_same_template_and_another_image_another(client: Any, stub: Stubber) -> None:
    names = set()

    def note(params: dict[str, Any], **_: Any) -> None:
        names.add(params["LaunchTemplateName"])

    client.meta.events.register("provide-client-params.ec2.CreateLaunchTemplate", note)
    for image in ("ami-1", "ami-1", "ami-2"):
        stub.add_response("describe_launch_template_versions", described())
        stub.add_response("create_launch_template", {"LaunchTemplate": {"LaunchTemplateId": "lt-new"}})
        templates(client).template_for(Template(id="lt-base", version="3", image=image), P5, None)
    assert len(names) == 2


def test_a_template_that_exists_is_used(client: Any, stub: Stubber) -> None:
    stub.add_response("describe_launch_template_versions", described())
    stub.add_client_error("create_launch_template", "InvalidLaunchTemplateName.AlreadyExistsException")
    stub.add_response(
        "describe_launch_templates", {"LaunchTemplates": [{"LaunchTemplateId": "lt-old"}]}, {"LaunchTemplateNames": ANY}
    )
    assert templates(client).template_for(BASE, P5, None).id == "lt-old"


def test_the_base_is_never_among_those_to_give_back(client: Any, stub: Stubber) -> None:
    listed = [
        {"LaunchTemplateId": name, "LaunchTemplateName": name, "CreateTime": datetime(2026, 1, 1, tzinfo=UTC)}
        for name in ("lt-base", "lt-1")
    ]
    stub.add_response("describe_launch_templates", {"LaunchTemplates": listed}, {"Filters": ANY})
    assert [one.id for one in templates(client).owned()] == ["lt-1"]
    stub.add_client_error("delete_launch_template", "InvalidLaunchTemplateId.NotFound")
    templates(client).drop("lt-1")


# -- placement groups --------------------------------------------------------------------------------------------------


def test_a_group_is_made_once_a_job_and_zone(client: Any, stub: Stubber) -> None:
    groups = PlacementGroups(client, stack="s")
    tags = [{"Key": "holdfast:stack", "Value": "s"}, {"Key": "holdfast:job", "Value": "j"}]
    asked = {
        "GroupName": "s-j-us-east-1a",
        "Strategy": "cluster",
        "TagSpecifications": [{"ResourceType": "placement-group", "Tags": tags}],
    }
    stub.add_response("create_placement_group", {}, asked)
    stub.add_client_error("create_placement_group", "InvalidPlacementGroup.Duplicate")
    assert [groups.group_for("j", "us-east-1a") for _ in range(2)] == ["s-j-us-east-1a"] * 2


def test_o18_a_group_in_use_is_no_error_and_one_that_is_gone_is_gone(client: Any, stub: Stubber) -> None:
    groups = PlacementGroups(client, stack="s")
    stub.add_client_error("delete_placement_group", "InvalidPlacementGroup.InUse")
    stub.add_response("delete_placement_group", {}, {"GroupName": "g"})
    stub.add_client_error("delete_placement_group", "InvalidPlacementGroup.Unknown")
    assert [groups.drop("g") for _ in range(3)] == [False, True, True]


def test_groups_are_listed_with_their_job_and_without_those_on_their_way_out(client: Any, stub: Stubber) -> None:
    tags = [{"Key": "holdfast:job", "Value": "j"}]
    listed = [
        {"GroupName": "g1", "State": "available", "Tags": tags},
        {"GroupName": "g2", "State": "deleting", "Tags": tags},
    ]
    stub.add_response("describe_placement_groups", {"PlacementGroups": listed}, {"Filters": ANY})
    assert [(one.name, one.job) for one in PlacementGroups(client, stack="s").owned()] == [("g1", "j")]
