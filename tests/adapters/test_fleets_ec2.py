"""What is asked of EC2, checked against its own model; whole gangs are bought in tests/local."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError, ReadTimeoutError
from botocore.stub import ANY, Stubber
from botocore.validate import ParamValidator

from holdfast.adapters.fleets_ec2 import TROUBLE, Ec2Fleets
from holdfast.domain.errors import PurchaseRefused, Unavailable
from holdfast.domain.notices import MAINTENANCE, ScheduledEvent, Trouble
from holdfast.domain.purchase import Place, Purchase, RefusalKind, Template

PLACES = (Place(subnet="subnet-a", zone="us-east-1a"), Place(subnet="subnet-b", zone="us-east-1b"))
SPOT = Purchase(
    fleet="j-1-0", job="j", instance_type="c7i.large", market="spot", nodes=2, minimum=2, places=PLACES,
    template=Template(id="lt-1", version="7", image="ami-1"),
)  # fmt: skip
ON_DEMAND = replace(SPOT, market="on_demand")
MIXED = replace(SPOT, market="mixed", on_demand_nodes=1, places=PLACES[:1])
BLOCK = replace(ON_DEMAND, reservation="cr-1", reservation_kind="capacity_block", places=PLACES[:1])
BOOKED = replace(BLOCK, reservation_kind="on_demand_reservation")
LENT = replace(BLOCK, reservation_kind="interruptible_reservation")


@pytest.fixture
def stub() -> Iterator[tuple[Ec2Fleets, Stubber]]:
    client = boto3.client("ec2", region_name="us-east-1", aws_access_key_id="t", aws_secret_access_key="t")
    with Stubber(client) as stubber:
        yield Ec2Fleets(client, stack="s", launch_template_id="lt-1", subnet_ids=["subnet-a", "subnet-b"]), stubber


def group(*ids: str, subnet: str = "subnet-a", kind: str = "c7i.large", lifecycle: str = "spot") -> dict[str, Any]:
    return {
        "InstanceIds": list(ids),
        "InstanceType": kind,
        "Lifecycle": lifecycle,
        "LaunchTemplateAndOverrides": {"Overrides": {"SubnetId": subnet}},
    }


@pytest.mark.parametrize("purchase", [SPOT, ON_DEMAND, MIXED, BLOCK, BOOKED, LENT], ids=lambda one: one.what)
def test_every_purchase_is_a_request_that_ec2_understands(stub: tuple[Ec2Fleets, Stubber], purchase: Purchase) -> None:
    fleets, _ = stub
    shape = fleets.client.meta.service_model.operation_model("CreateFleet").input_shape
    assert not ParamValidator().validate(fleets._request(purchase), shape).has_errors()


@pytest.mark.parametrize(("purchase", "options"), [(SPOT, "SpotOptions"), (ON_DEMAND, "OnDemandOptions")])
def test_all_or_nothing_in_one_zone_and_of_one_type(
    stub: tuple[Ec2Fleets, Stubber], purchase: Purchase, options: str
) -> None:
    asked = stub[0]._request(purchase)[options]
    assert (asked["MinTargetCapacity"], asked["SingleAvailabilityZone"], asked["SingleInstanceType"]) == (2, True, True)


def test_spot_is_bought_where_it_is_taken_back_last(stub: tuple[Ec2Fleets, Stubber]) -> None:
    options = stub[0]._request(SPOT)["SpotOptions"]
    assert (options["AllocationStrategy"], options["InstanceInterruptionBehavior"]) == (
        "capacity-optimized", "terminate",
    )  # fmt: skip
    assert "MaxTotalPrice" not in options


def test_on_demand_uses_open_reservations_first(stub: tuple[Ec2Fleets, Stubber]) -> None:
    options = stub[0]._request(ON_DEMAND)["OnDemandOptions"]
    assert options["CapacityReservationOptions"] == {"UsageStrategy": "use-capacity-reservations-first"}


def test_a_mixed_gang_is_one_call_with_one_subnet_one_type_and_both_minima(stub: tuple[Ec2Fleets, Stubber]) -> None:
    request = stub[0]._request(MIXED)
    target = request["TargetCapacitySpecification"]
    assert (target["TotalTargetCapacity"], target["OnDemandTargetCapacity"], target["SpotTargetCapacity"]) == (2, 1, 1)
    assert (request["OnDemandOptions"]["MinTargetCapacity"], request["SpotOptions"]["MinTargetCapacity"]) == (1, 1)
    assert len(request["LaunchTemplateConfigs"][0]["Overrides"]) == 1


def test_a_capacity_block_is_asked_for_without_market_options(stub: tuple[Ec2Fleets, Stubber]) -> None:
    request = stub[0]._request(BLOCK)
    assert request["TargetCapacitySpecification"] == {
        "TotalTargetCapacity": 2, "DefaultTargetCapacityType": "capacity-block",
    }  # fmt: skip
    assert not request.keys() & {"SpotOptions", "OnDemandOptions", "ReservedCapacityOptions"}


@pytest.mark.parametrize(
    ("purchase", "kind"),
    [(BOOKED, "on-demand-capacity-reservation"), (LENT, "interruptible-capacity-reservation")],
)
def test_a_named_reservation_is_the_only_capacity_that_is_asked_for(
    stub: tuple[Ec2Fleets, Stubber], purchase: Purchase, kind: str
) -> None:
    options = stub[0]._request(purchase)["ReservedCapacityOptions"]
    assert options["ReservationTypes"] == [kind]
    assert options["CapacityReservationTarget"] == {"CapacityReservationIds": ["cr-1"]}
    assert "ReservedCapacityFallbackOptions" not in options


def test_o12_the_same_purchase_has_the_same_token_and_another_fleet_another(stub: tuple[Ec2Fleets, Stubber]) -> None:
    fleets, _ = stub
    assert fleets._request(SPOT) == fleets._request(SPOT)
    other = fleets._request(replace(SPOT, fleet="j-2-0"))
    assert other["ClientToken"] != fleets._request(SPOT)["ClientToken"]
    assert len(other["ClientToken"]) <= 64


def test_template_version_and_image_are_pinned_and_the_group_is_each_zones_own(stub: tuple[Ec2Fleets, Stubber]) -> None:
    grouped = replace(SPOT, places=tuple(replace(place, group=f"g-{place.zone}") for place in PLACES))
    [config] = stub[0]._request(grouped)["LaunchTemplateConfigs"]
    assert config["LaunchTemplateSpecification"] == {"LaunchTemplateId": "lt-1", "Version": "7"}
    assert {override["ImageId"] for override in config["Overrides"]} == {"ami-1"}
    assert [override["Placement"] for override in config["Overrides"]] == [
        {"GroupName": "g-us-east-1a"}, {"GroupName": "g-us-east-1b"},
    ]  # fmt: skip


def test_everything_that_is_bought_carries_its_owner(stub: tuple[Ec2Fleets, Stubber]) -> None:
    specifications = stub[0]._request(SPOT)["TagSpecifications"]
    assert {one["ResourceType"] for one in specifications} == {"fleet", "instance", "volume", "network-interface"}
    for one in specifications:
        assert {tag["Key"]: tag["Value"] for tag in one["Tags"]} == {
            "holdfast:stack": "s", "holdfast:job": "j", "holdfast:fleet": "j-1-0",
        }  # fmt: skip


def test_o16_every_id_of_every_element_is_in_the_answer(stub: tuple[Ec2Fleets, Stubber]) -> None:
    fleets, stubber = stub
    answer = {
        "FleetId": "fleet-1",
        "Instances": [
            group("i-01", "i-02", "i-03"),
            group("i-04", "i-05", "i-06", kind="c6i.large", subnet="subnet-b"),
        ],
        "Errors": [{"ErrorCode": "InsufficientInstanceCapacity", "Lifecycle": "spot"}],
    }
    stubber.add_response("create_fleet", answer)
    bought = fleets.buy(SPOT)
    assert bought.instances == ("i-01", "i-02", "i-03", "i-04", "i-05", "i-06")
    assert [(part.instance_type, part.zone, part.market) for part in bought.parts] == [
        ("c7i.large", "us-east-1a", "spot"), ("c6i.large", "us-east-1b", "spot"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "market"),
    [("on-demand", "on_demand"), ("spot", "spot"), ("capacity-block", "capacity-block"), ("tomorrow", "tomorrow")],
)
def test_a_life_cycle_that_we_do_not_know_is_kept(stub: tuple[Ec2Fleets, Stubber], word: str, market: str) -> None:
    fleets, stubber = stub
    stubber.add_response("create_fleet", {"Instances": [group("i-1", lifecycle=word)]})
    assert fleets.buy(SPOT).parts[0].market == market


def test_an_error_in_the_answer_names_its_pool_and_never_its_message(stub: tuple[Ec2Fleets, Stubber]) -> None:
    fleets, stubber = stub
    error = {
        "ErrorCode": "UnauthorizedOperation",
        "ErrorMessage": "Encoded authorization failure message: SECRET",
        "Lifecycle": "spot",
        "LaunchTemplateAndOverrides": {"Overrides": {"SubnetId": "subnet-b", "AvailabilityZone": "us-east-1b"}},
    }
    stubber.add_response("create_fleet", {"Errors": [error]})
    [refusal] = fleets.buy(SPOT).refusals
    assert (refusal.kind, refusal.subnet, refusal.zone) == (RefusalKind.PERMISSION, "subnet-b", "us-east-1b")
    assert "SECRET" not in repr(refusal)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("RequestLimitExceeded", RefusalKind.THROTTLED),
        ("InvalidFleetConfiguration", RefusalKind.CONFIGURATION),
        ("IdempotentParameterMismatch", RefusalKind.MISMATCH),
        ("SomethingNew", RefusalKind.UNKNOWN),
    ],
)
def test_a_raised_error_is_an_answer_too(stub: tuple[Ec2Fleets, Stubber], code: str, kind: RefusalKind) -> None:
    fleets, stubber = stub
    stubber.add_client_error("create_fleet", code, http_status_code=400)
    bought = fleets.buy(SPOT)
    assert (bought.instances, [refusal.kind for refusal in bought.refusals]) == ((), [kind])


def test_an_answer_that_leaves_it_open_is_raised(
    stub: tuple[Ec2Fleets, Stubber], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets, stubber = stub
    stubber.add_client_error("create_fleet", "InternalError", http_status_code=500)
    with pytest.raises(Unavailable, match="j-1-0"):
        fleets.buy(SPOT)

    def silent(**_: Any) -> None:
        raise ReadTimeoutError(endpoint_url="https://ec2")

    monkeypatch.setattr(fleets.client, "create_fleet", silent)
    with pytest.raises(Unavailable, match="j-1-0"):
        fleets.buy(SPOT)


def test_subnets_come_with_their_zone_and_free_addresses(stub: tuple[Ec2Fleets, Stubber]) -> None:
    fleets, stubber = stub
    subnets = [{"SubnetId": "subnet-a", "AvailabilityZone": "us-east-1a", "AvailableIpAddressCount": 11}]
    stubber.add_response("describe_subnets", {"Subnets": subnets}, {"SubnetIds": ["subnet-a", "subnet-b"]})
    [subnet] = fleets.subnets()
    assert (subnet.id, subnet.zone, subnet.free) == ("subnet-a", "us-east-1a", 11)


def test_a_refusal_before_the_purchase_says_what_it_asks_of_us(stub: tuple[Ec2Fleets, Stubber]) -> None:
    fleets, stubber = stub
    stubber.add_client_error("describe_subnets", "RequestLimitExceeded", http_status_code=503)
    with pytest.raises(PurchaseRefused) as refused:
        fleets.subnets()
    assert refused.value.refusal.kind is RefusalKind.THROTTLED
    stubber.add_client_error("describe_subnets", "InternalError", http_status_code=500)
    with pytest.raises(Unavailable):
        fleets.subnets()


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ({"ReservationType": "capacity-block"}, "capacity_block"),
        ({"ReservationType": "default"}, "on_demand_reservation"),
        ({"ReservationType": "default", "Interruptible": True}, "interruptible_reservation"),
    ],
)
def test_a_reservation_is_of_the_kind_that_ec2_says(
    stub: tuple[Ec2Fleets, Stubber], told: dict[str, Any], kind: str
) -> None:
    fleets, stubber = stub
    raw = {
        "CapacityReservationId": "cr-1", "InstanceType": "p5.48xlarge", "AvailabilityZone": "us-east-1a",
        "State": "active", "AvailableInstanceCount": 3, "StartDate": datetime(2026, 1, 1, tzinfo=UTC),
        "PlacementGroupArn": "arn:aws:ec2:us-east-1:111122223333:placement-group/theirs", **told,
    }  # fmt: skip
    stubber.add_response("describe_capacity_reservations", {"CapacityReservations": [raw]})
    found = fleets.reservation("cr-1")
    assert (found.kind, found.free, found.group, found.starts_at) == (kind, 3, "theirs", 1767225600.0)


def test_a_console_that_ec2_does_not_give_is_said_and_nothing_more(stub: tuple[Ec2Fleets, Stubber]) -> None:
    fleets, stubber = stub
    stubber.add_response("get_console_output", {"Output": "x" * 9000 + "end"}, {"InstanceId": "i-1", "Latest": True})
    tail = fleets.console_tail("i-1")
    assert (tail[-3:], len(tail)) == ("end", 2000)
    stubber.add_client_error("get_console_output", "UnsupportedOperation")
    assert "UnsupportedOperation" in fleets.console_tail("i-1")


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
        "InstanceLifecycle": "spot",
        "Placement": {"AvailabilityZone": "us-east-1a"},
        "LaunchTime": datetime(2026, 1, 1, tzinfo=UTC),
        "Tags": [{"Key": "holdfast:job", "Value": "j"}, {"Key": "holdfast:fleet", "Value": "j-1-0"}],
    }
    stubber.add_response("describe_instances", {"Reservations": [{"Instances": [raw]}]}, {"Filters": ANY})
    found = fleets.described(["i-1"])[0]
    assert (found.job, found.fleet, found.live, found.launched_at) == ("j", "j-1-0", True, 1767225600.0)
    assert found.market == "spot"
    assert fleets.described([]) == []


def test_a_jobs_own_image_travels_as_a_tag_and_as_nothing_else(stub: tuple[Ec2Fleets, Stubber]) -> None:
    def tags(purchase: Purchase) -> dict[str, str]:
        request = stub[0]._request(purchase)
        return {tag["Key"]: tag["Value"] for tag in request["TagSpecifications"][0]["Tags"]}

    assert "holdfast:image" not in tags(SPOT)
    assert tags(replace(SPOT, image="registry.example/me:1"))["holdfast:image"] == "registry.example/me:1"


# -- statuses ----------------------------------------------------------------------------------------------------------

AT = datetime(2026, 12, 14, 15, 0, tzinfo=UTC)
SINCE = datetime(2026, 12, 1, 9, 0, tzinfo=UTC)
IMPAIRED = {"Status": "impaired", "Details": [{"Name": "reachability", "Status": "failed", "ImpairedSince": SINCE}]}


def event(code: str, description: str = "The instance is scheduled for retirement") -> dict[str, Any]:
    return {"Code": code, "NotBefore": AT, "Description": description, "InstanceEventId": "instance-event-1"}


def answer_statuses(stubber: Stubber, *pages: list[dict[str, Any]]) -> None:
    """The pages of each of the three looks in turn."""
    looks = [
        [{"Name": "event.code", "Values": ANY}],
        [{"Name": "instance-status.status", "Values": ["impaired"]}],
        [{"Name": "system-status.status", "Values": ["impaired"]}],
    ]
    for number, look in enumerate(looks):
        asked: dict[str, Any] = {"Filters": look}
        shown = pages if number == 0 else [[]]
        for page, statuses in enumerate(shown, 1):
            more = {"NextToken": f"page-{page + 1}"} if page < len(shown) else {}
            stubber.add_response("describe_instance_status", {"InstanceStatuses": statuses, **more}, dict(asked))
            asked["NextToken"] = f"page-{page + 1}"


def test_all_pages_of_statuses_are_read_and_events_that_are_over_are_none(stub: tuple[Ec2Fleets, Stubber]) -> None:
    fleets, stubber = stub
    over = [event("system-reboot", "[Completed] reboot"), event("instance-stop", "[Canceled] stop")]
    first = {"InstanceId": "i-1", "Events": [event("instance-retirement"), *over, event("of-tomorrow")]}
    second = {"InstanceId": "i-2", "InstanceStatus": IMPAIRED, "SystemStatus": {"Status": "ok", "Details": []}}
    answer_statuses(stubber, [first], [second])
    assert fleets.troubled() == [
        Trouble(instance="i-1", events=(ScheduledEvent(code="instance-retirement", starts_at=AT.timestamp()),)),
        Trouble(instance="i-2", impaired_since=SINCE.timestamp()),
    ]
    stubber.assert_no_pending_responses()


def test_statuses_of_which_a_page_fails_are_no_statuses(stub: tuple[Ec2Fleets, Stubber]) -> None:
    fleets, stubber = stub
    first = {"InstanceStatuses": [{"InstanceId": "i-1", "Events": [event("instance-stop")]}], "NextToken": "page-2"}
    stubber.add_response("describe_instance_status", first)
    stubber.add_client_error("describe_instance_status", "RequestLimitExceeded")
    with pytest.raises(ClientError):
        fleets.troubled()


def test_statuses_are_filtered_by_names_that_ec2_documents() -> None:
    documented = (
        boto3.client("ec2", region_name="us-east-1")
        .meta.service_model.operation_model("DescribeInstanceStatus")
        .input_shape.members["Filters"]
        .documentation
    )
    assert [one["Name"] for one in TROUBLE if f"<code>{one['Name']}</code>" not in documented] == []
    assert [code for code in MAINTENANCE if code not in documented] == []
