"""EC2 in virtual time: the capacity model of the embedded cloud behind the calls that the doors make."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from bench.world.agenda import Agenda
from bench.world.wire import ApiError
from local.engine.capacity import (
    SPOT_TERMINATION,
    STATE_CODES,
    USER_SHUTDOWN,
    Candidate,
    Capacity,
    FleetAnswer,
    FleetRequest,
    IdempotentParameterMismatch,
    Instance,
)

SUBNETS = {"subnet-a": "us-east-1a", "subnet-b": "us-east-1b"}
BOOT_S = 20.0
DYING_S = 30.0
SEEN_AFTER_S = 5.0
"""DescribeInstances lags behind CreateFleet: longer than the first retry of a failed step."""

NOTICE_S = 120.0
INJECTED = "InternalError"


class Ec2:
    """`changed(instance, state)` is told of each change of state.

    So many calls of CreateFleet as `unanswered` says do their work, and the caller never hears of it.
    """

    unanswered = 0

    def __init__(self, agenda: Agenda, changed: Callable[[Instance, str], None]) -> None:
        self.agenda, self.changed = agenda, changed
        numbers = itertools.count(1)
        self.capacity = Capacity(new_instance_id=lambda: f"i-0{next(numbers):016x}", visible_delay_s=SEEN_AFTER_S)

    @property
    def live(self) -> list[Instance]:
        return [one for one in self.capacity.instances.values() if one.state in ("pending", "running")]

    def answer(self, operation: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
        match operation:
            case "CreateFleet":
                return self._create_fleet(params)
            case "DescribeInstances":
                found = [one for one in self.capacity.describe(now=self.agenda.now) if _matches(one, params["Filters"])]
                return {"Reservations": [{"Instances": [_shown(one) for one in found]}]}
            case "DescribeInstanceStatus":
                return {"InstanceStatuses": []}
            case "TerminateInstances":
                return self._terminate(params["InstanceIds"])
            case "DescribeSubnets":
                return {
                    "Subnets": [
                        {"SubnetId": subnet, "AvailabilityZone": SUBNETS[subnet]} for subnet in params["SubnetIds"]
                    ]
                }
            case "DescribeInstanceTypes" | "DescribeInstanceTypeOfferings" | "DescribeSpotPriceHistory":
                return None  # moto knows them
            case "DescribePlacementGroups":
                return {"PlacementGroups": []}
            case "DescribeLaunchTemplates":
                return {"LaunchTemplates": []}
            case "GetConsoleOutput":
                return {}
            case "DescribeLaunchTemplateVersions":
                return {"LaunchTemplateVersions": [{"VersionNumber": 1, "LaunchTemplateData": {"ImageId": "ami-1"}}]}
        raise ValueError(f"EC2 does not answer {operation} here")

    def take_back(self, instance: str) -> None:
        """AWS ends a spot instance."""
        self._shut_down(instance, SPOT_TERMINATION)

    def _create_fleet(self, params: Mapping[str, Any]) -> dict[str, Any]:
        before = set(self.capacity.instances)
        try:
            answer = self.capacity.create_fleet(_request(params), now=self.agenda.now)
        except IdempotentParameterMismatch as error:
            raise ApiError("IdempotentParameterMismatch") from error
        for instance in answer.instance_ids:
            if instance not in before:
                self.agenda.after(BOOT_S, lambda one=instance: self._boot(one))
        if self.unanswered:
            self.unanswered -= 1
            raise ApiError(INJECTED)
        return _fleet_shown(answer)

    def _boot(self, instance: str) -> None:
        if self.capacity.boot(instance):
            self.changed(self.capacity.instances[instance], "running")

    def _terminate(self, instances: list[str]) -> dict[str, Any]:
        if unknown := [instance for instance in instances if instance not in self.capacity.instances]:
            raise ApiError("InvalidInstanceID.NotFound", ", ".join(unknown))
        for instance in instances:
            self._shut_down(instance, USER_SHUTDOWN)
        return {"TerminatingInstances": [{"InstanceId": instance} for instance in instances]}

    def _shut_down(self, instance: str, reason: str) -> None:
        if not self.capacity.shut_down(instance, reason, now=self.agenda.now):
            return
        self.changed(self.capacity.instances[instance], "shutting-down")
        self.agenda.after(DYING_S, lambda: self._bury(instance))

    def _bury(self, instance: str) -> None:
        if self.capacity.terminate(instance):
            self.changed(self.capacity.instances[instance], "terminated")


def _request(params: Mapping[str, Any]) -> FleetRequest:
    spot = params["TargetCapacitySpecification"]["DefaultTargetCapacityType"] == "spot"
    options = params["SpotOptions" if spot else "OnDemandOptions"]
    tags = {spec["ResourceType"]: spec["Tags"] for spec in params["TagSpecifications"]}
    return FleetRequest(
        candidates=tuple(
            Candidate(
                instance_type=override["InstanceType"],
                zone=SUBNETS[override["SubnetId"]],
                subnet_id=override["SubnetId"],
            )
            for config in params["LaunchTemplateConfigs"]
            for override in config["Overrides"]
        ),
        market="spot" if spot else "on-demand",
        target=params["TargetCapacitySpecification"]["TotalTargetCapacity"],
        minimum=options.get("MinTargetCapacity", 0),
        single_type=options.get("SingleInstanceType", False),
        single_zone=options.get("SingleAvailabilityZone", False),
        client_token=params["ClientToken"],
        instance_tags=tuple((tag["Key"], tag["Value"]) for tag in tags["instance"]),
    )


def _fleet_shown(answer: FleetAnswer) -> dict[str, Any]:
    return {
        "FleetId": answer.fleet_id,
        "Instances": [
            {
                "InstanceIds": list(part.instance_ids),
                "InstanceType": part.candidate.instance_type,
                "LaunchTemplateAndOverrides": {"Overrides": {"SubnetId": part.candidate.subnet_id}},
            }
            for part in answer.filled
        ],
        "Errors": [{"ErrorCode": refusal.code, "ErrorMessage": refusal.message} for refusal in answer.refused],
    }


def _matches(instance: Instance, filters: list[Mapping[str, Any]]) -> bool:
    facts = {"instance-id": instance.instance_id} | {f"tag:{key}": value for key, value in instance.tags.items()}
    return all(facts.get(rule["Name"]) in rule["Values"] for rule in filters)


def _shown(instance: Instance) -> dict[str, Any]:
    return {
        "InstanceId": instance.instance_id,
        "InstanceType": instance.candidate.instance_type,
        "State": {"Name": instance.state, "Code": STATE_CODES[instance.state]},
        "Placement": {"AvailabilityZone": instance.candidate.zone},
        "LaunchTime": datetime.fromtimestamp(instance.launched_at, UTC),
        "Tags": [{"Key": key, "Value": value} for key, value in instance.tags.items()],
        **({"StateReason": {"Code": instance.reason}} if instance.reason else {}),
    }
