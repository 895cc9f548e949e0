"""Keeps ports.Fleets on EC2: CreateFleet of type instant, all nodes or none, in one zone and of one type."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

from holdfast.adapters.aws_errors import NOT_FOUND_INSTANCE, ambiguous, code_of, kind_of
from holdfast.adapters.launch_templates_ec2 import LaunchTemplates
from holdfast.adapters.placement_groups_ec2 import PlacementGroups
from holdfast.application.ports import OwnedGroup, OwnedTemplate
from holdfast.domain.errors import PurchaseRefused, Unavailable
from holdfast.domain.network_cards import Card, MachineType
from holdfast.domain.notices import MAINTENANCE, ScheduledEvent, Trouble
from holdfast.domain.ownership import GONE, Instance
from holdfast.domain.placement import MIXED, ON_DEMAND, SPOT
from holdfast.domain.purchase import (
    Bought,
    Part,
    Place,
    Purchase,
    Refusal,
    Reservation,
    ReservationKind,
    Subnet,
    Template,
)

STACK_TAG, JOB_TAG, FLEET_TAG, IMAGE_TAG = "holdfast:stack", "holdfast:job", "holdfast:fleet", "holdfast:image"
CONSOLE_CHARACTERS = 2_000
MARKETS = {"on-demand": ON_DEMAND}
"""Where EC2's word for a life cycle is not ours; others, those of tomorrow included, are kept as they are."""

RESERVED = {
    ReservationKind.ON_DEMAND: "on-demand-capacity-reservation",
    ReservationKind.INTERRUPTIBLE: "interruptible-capacity-reservation",
}

TROUBLE = (
    {"Name": "event.code", "Values": sorted(MAINTENANCE)},
    {"Name": "instance-status.status", "Values": ["impaired"]},
    {"Name": "system-status.status", "Values": ["impaired"]},
)
OVER = ("[Completed]", "[Canceled]")
"""How the description of a scheduled event begins that is over; EC2 shows it for up to a week."""

NO_ANSWER = (ConnectionError, HTTPClientError)
"""The call may never have arrived, or its answer was lost."""

T = TypeVar("T")


class Ec2Fleets:
    def __init__(self, client: Any, *, stack: str, launch_template_id: str, subnet_ids: Sequence[str]) -> None:
        self.client, self.stack = client, stack
        self.subnet_ids = tuple(subnet_ids)
        self.launch_templates = LaunchTemplates(client, stack=stack, base=launch_template_id)
        self.placement_groups = PlacementGroups(client, stack=stack)

    # -- before a purchase ---------------------------------------------------------------------------------------------

    def subnets(self) -> list[Subnet]:
        answer = _asked(lambda: self.client.describe_subnets(SubnetIds=list(self.subnet_ids)))
        return [
            Subnet(id=one["SubnetId"], zone=one["AvailabilityZone"], free=one.get("AvailableIpAddressCount"))
            for one in answer["Subnets"]
        ]

    def machine_types(self, names: Iterable[str]) -> dict[str, MachineType]:
        wanted = sorted(set(names))
        # As a filter, not as names: one unknown type would fail the whole call.
        pages = self.client.get_paginator("describe_instance_types").paginate(
            Filters=[{"Name": "instance-type", "Values": wanted}]
        )
        found = _asked(lambda: [one for page in pages for one in page["InstanceTypes"]])
        return {one["InstanceType"]: machine_of(one) for one in found}

    def base_template(self) -> Template:
        return _asked(self.launch_templates.base_template)

    def template_for(self, base: Template, machine: MachineType, reservation: Reservation | None) -> Template:
        return _asked(lambda: self.launch_templates.template_for(base, machine, reservation))

    def group_for(self, job_id: str, zone: str) -> str:
        return _asked(lambda: self.placement_groups.group_for(job_id, zone))

    def reservation(self, reservation: str) -> Reservation:
        answer = _asked(lambda: self.client.describe_capacity_reservations(CapacityReservationIds=[reservation]))
        return _reservation(answer["CapacityReservations"][0])

    # -- purchase ------------------------------------------------------------------------------------------------------

    def buy(self, purchase: Purchase) -> Bought:
        try:
            answer = self.client.create_fleet(**self._request(purchase))
        except ClientError as error:
            if ambiguous(error):
                raise Unavailable(f"EC2 did not say what became of {purchase.fleet}: {code_of(error)}") from error
            return Bought(refusals=(_refusal(code_of(error)),))
        except NO_ANSWER as error:
            raise Unavailable(f"EC2 did not say what became of {purchase.fleet}: {error}") from error
        zones = {place.subnet: place.zone for place in purchase.places}
        return Bought(
            parts=tuple(_part(group, zones) for group in answer.get("Instances", [])),
            refusals=tuple(_refusal_of(error) for error in answer.get("Errors", [])),
        )

    def of_fleet(self, fleet: str) -> list[Instance]:
        return self._listed(FLEET_TAG, fleet)

    def of_job(self, job_id: str) -> list[Instance]:
        return self._listed(JOB_TAG, job_id)

    def of_stack(self) -> list[Instance]:
        return self._describe([{"Name": f"tag:{STACK_TAG}", "Values": [self.stack]}])

    def described(self, instances: Iterable[str]) -> list[Instance]:
        ids = list(instances)
        # As a filter, not as ids: one unknown id would fail the whole call.
        chunks = [ids[start : start + 200] for start in range(0, len(ids), 200)]
        return [found for chunk in chunks for found in self._describe([{"Name": "instance-id", "Values": chunk}])]

    def troubled(self) -> list[Trouble]:
        pages = self.client.get_paginator("describe_instance_status")
        # By filter: EC2 answers with the few in trouble, however many run, and no id that is gone fails the call.
        raws = [raw for one in TROUBLE for page in pages.paginate(Filters=[one]) for raw in page["InstanceStatuses"]]
        return [_trouble(raw) for raw in {raw["InstanceId"]: raw for raw in raws}.values()]

    def terminate(self, instances: Iterable[str]) -> None:
        ids = list(instances)
        if not ids:
            return
        try:
            self.client.terminate_instances(InstanceIds=ids)
        except ClientError as error:
            if code_of(error) not in NOT_FOUND_INSTANCE:
                raise
            # One unknown id keeps all of them alive: tell each alone.
            for instance in ids:
                self._terminate_one(instance)

    def _terminate_one(self, instance: str) -> None:
        try:
            self.client.terminate_instances(InstanceIds=[instance])
        except ClientError as error:
            if code_of(error) not in NOT_FOUND_INSTANCE:
                raise

    def _request(self, purchase: Purchase) -> dict[str, Any]:
        tags = [
            {"Key": STACK_TAG, "Value": self.stack},
            {"Key": JOB_TAG, "Value": purchase.job},
            {"Key": FLEET_TAG, "Value": purchase.fleet},
            # Read by the node's boot script from its metadata; the door let only an image's name through.
            *([{"Key": IMAGE_TAG, "Value": purchase.image}] if purchase.image else []),
        ]
        return {
            **_market(purchase),
            "Type": "instant",
            "ClientToken": hashlib.sha256(f"{self.stack}/{purchase.fleet}".encode()).hexdigest()[:64],
            "LaunchTemplateConfigs": [
                {
                    "LaunchTemplateSpecification": {
                        "LaunchTemplateId": purchase.template.id,
                        "Version": purchase.template.version,
                    },
                    "Overrides": [_override(purchase, place) for place in purchase.places],
                }
            ],
            "TagSpecifications": [
                {"ResourceType": kind, "Tags": tags} for kind in ("fleet", "instance", "volume", "network-interface")
            ],
        }

    # -- looking around ------------------------------------------------------------------------------------------------

    def groups(self) -> list[OwnedGroup]:
        return self.placement_groups.owned()

    def drop_group(self, name: str) -> bool:
        return self.placement_groups.drop(name)

    def templates(self) -> list[OwnedTemplate]:
        return self.launch_templates.owned()

    def drop_template(self, template: str) -> None:
        self.launch_templates.drop(template)

    def console_tail(self, instance: str) -> str:
        try:
            answer = self.client.get_console_output(InstanceId=instance, Latest=True)
        except ClientError as error:
            # A hint for a person: without it the rest of the sentence still stands.
            return f"(no console output: {code_of(error)})"
        return str(answer.get("Output", ""))[-CONSOLE_CHARACTERS:]

    def _listed(self, tag: str, value: str) -> list[Instance]:
        return self._describe(
            [{"Name": f"tag:{tag}", "Values": [value]}, {"Name": f"tag:{STACK_TAG}", "Values": [self.stack]}]
        )

    def _describe(self, filters: list[dict[str, Any]]) -> list[Instance]:
        pages = self.client.get_paginator("describe_instances").paginate(Filters=filters)
        found = [
            _instance(raw) for page in pages for reservation in page["Reservations"] for raw in reservation["Instances"]
        ]
        return sorted(found, key=lambda instance: (instance.state in GONE, instance.id))


def _instance(raw: Mapping[str, Any]) -> Instance:
    tags = {tag["Key"]: tag["Value"] for tag in raw.get("Tags", [])}
    return Instance(
        id=raw["InstanceId"],
        state=raw["State"]["Name"],
        instance_type=raw.get("InstanceType", ""),
        zone=raw.get("Placement", {}).get("AvailabilityZone", ""),
        launched_at=raw["LaunchTime"].timestamp(),
        job=tags.get(JOB_TAG),
        fleet=tags.get(FLEET_TAG),
        state_reason=raw.get("StateReason", {}).get("Code", ""),
        reservation=raw.get("CapacityReservationId", ""),
        market=raw.get("InstanceLifecycle", ON_DEMAND),
    )


def _trouble(raw: Mapping[str, Any]) -> Trouble:
    events = [
        ScheduledEvent(code=one["Code"], starts_at=one["NotBefore"].timestamp())
        for one in raw.get("Events", [])
        if one["Code"] in MAINTENANCE and "NotBefore" in one and not one.get("Description", "").startswith(OVER)
    ]
    checks = [detail for kind in ("InstanceStatus", "SystemStatus") for detail in raw.get(kind, {}).get("Details", [])]
    since = [check["ImpairedSince"].timestamp() for check in checks if "ImpairedSince" in check]
    return Trouble(instance=raw["InstanceId"], events=tuple(events), impaired_since=min(since, default=None))


def _asked(call: Callable[[], T]) -> T:
    """Return the answer of a call that only prepares a purchase. Raises PurchaseRefused or Unavailable."""
    try:
        return call()
    except ClientError as error:
        if ambiguous(error):
            raise Unavailable(f"EC2 did not answer: {code_of(error)}") from error
        raise PurchaseRefused(_refusal(code_of(error))) from error
    except NO_ANSWER as error:
        raise Unavailable(f"EC2 did not answer: {error}") from error


def _market(purchase: Purchase) -> dict[str, Any]:
    """All or nothing holds for each market alone, and not at all for reservations: there a part is given back."""
    target: dict[str, Any] = {"TotalTargetCapacity": purchase.nodes}
    if purchase.reservation_kind == ReservationKind.CAPACITY_BLOCK:
        return {"TargetCapacitySpecification": {**target, "DefaultTargetCapacityType": "capacity-block"}}
    if purchase.reservation:
        return {
            "TargetCapacitySpecification": {**target, "DefaultTargetCapacityType": "reserved-capacity"},
            "ReservedCapacityOptions": {
                "AllocationStrategy": "prioritized",
                "ReservationTypes": [RESERVED[ReservationKind(purchase.reservation_kind)]],
                "CapacityReservationTarget": {"CapacityReservationIds": [purchase.reservation]},
            },
        }
    on_demand = purchase.on_demand_nodes if purchase.market == MIXED else purchase.nodes
    spot = purchase.nodes - purchase.on_demand_nodes
    if purchase.market == MIXED:
        target |= {"OnDemandTargetCapacity": on_demand, "SpotTargetCapacity": spot}
    first = ON_DEMAND if purchase.market == ON_DEMAND else SPOT
    asked: dict[str, Any] = {
        "TargetCapacitySpecification": {**target, "DefaultTargetCapacityType": first.replace("_", "-")}
    }
    if purchase.market in (SPOT, MIXED):
        asked["SpotOptions"] = {
            **_whole(purchase.minimum if purchase.market == SPOT else spot),
            # The default is lowest-price, the pool that is taken back first.
            "AllocationStrategy": "capacity-optimized",
            "InstanceInterruptionBehavior": "terminate",
        }
    if purchase.market in (ON_DEMAND, MIXED):
        asked["OnDemandOptions"] = {
            **_whole(purchase.minimum if purchase.market == ON_DEMAND else on_demand),
            "AllocationStrategy": "lowest-price",
            # Open reservations are paid for already.
            "CapacityReservationOptions": {"UsageStrategy": "use-capacity-reservations-first"},
        }
    return asked


def _whole(minimum: int) -> dict[str, Any]:
    return {"SingleInstanceType": True, "SingleAvailabilityZone": True, "MinTargetCapacity": minimum}


def _override(purchase: Purchase, place: Place) -> dict[str, Any]:
    override: dict[str, Any] = {"InstanceType": purchase.instance_type, "SubnetId": place.subnet}
    if purchase.template.image:
        override["ImageId"] = purchase.template.image
    if place.group:
        override["Placement"] = {"GroupName": place.group}
    return override


def _part(group: Mapping[str, Any], zones: Mapping[str, str]) -> Part:
    override = group.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
    subnet = group.get("SubnetId") or override.get("SubnetId", "")
    market = str(group.get("Lifecycle", ""))
    return Part(
        instances=tuple(group.get("InstanceIds", [])),
        instance_type=group.get("InstanceType") or override.get("InstanceType", ""),
        zone=group.get("AvailabilityZone") or override.get("AvailabilityZone") or zones.get(subnet, ""),
        market=MARKETS.get(market, market),
    )


def _refusal_of(error: Mapping[str, Any]) -> Refusal:
    override = error.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
    return _refusal(
        str(error.get("ErrorCode", "no code")),
        subnet=override.get("SubnetId", ""),
        zone=override.get("AvailabilityZone", ""),
        market=str(error.get("Lifecycle", "")),
    )


def _refusal(code: str, *, subnet: str = "", zone: str = "", market: str = "") -> Refusal:
    """The message is left out: it may hold an encoded authorization message, and its wording is no interface."""
    kind, cool_s = kind_of(code)
    return Refusal(code=code, kind=kind, cool_s=cool_s, subnet=subnet, zone=zone, market=market)


def machine_of(raw: Mapping[str, Any]) -> MachineType:
    network = raw.get("NetworkInfo", {})
    return MachineType(
        name=raw["InstanceType"],
        vcpus=raw.get("VCpuInfo", {}).get("DefaultVCpus", 0),
        gpus=sum(gpu.get("Count", 0) for gpu in raw.get("GpuInfo", {}).get("Gpus", [])),
        efas=network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0) if network.get("EfaSupported") else 0,
        cards=tuple(
            Card(
                index=card["NetworkCardIndex"],
                takes=tuple(card.get("InterfaceTypes", [])),
                slots=card.get("MaximumNetworkInterfaces", 1),
                gbps=float(card.get("BaselineBandwidthInGbps", 0.0)),
            )
            for card in sorted(network.get("NetworkCards", []), key=lambda card: card["NetworkCardIndex"])
        ),
    )


def _reservation(raw: Mapping[str, Any]) -> Reservation:
    kind = ReservationKind.ON_DEMAND
    if raw.get("ReservationType") == "capacity-block":
        kind = ReservationKind.CAPACITY_BLOCK
    elif raw.get("Interruptible"):
        kind = ReservationKind.INTERRUPTIBLE
    starts, ends = raw.get("StartDate"), raw.get("EndDate")
    return Reservation(
        id=raw["CapacityReservationId"],
        kind=kind,
        instance_type=raw["InstanceType"],
        zone=raw["AvailabilityZone"],
        state=raw["State"],
        free=raw.get("AvailableInstanceCount", 0),
        starts_at=starts.timestamp() if starts else None,
        ends_at=ends.timestamp() if ends else None,
        group=str(raw.get("PlacementGroupArn", "")).rpartition("/")[2],
    )
