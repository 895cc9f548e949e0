"""Keeps ports.Fleets on EC2: CreateFleet of type instant, all nodes or none, in one zone and of one type."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from holdfast.adapters.aws_errors import NOT_FOUND_INSTANCE, code_of
from holdfast.application.ports import Bought
from holdfast.domain.errors import CapacityUnavailable
from holdfast.domain.ownership import GONE, Instance
from holdfast.domain.placement import Candidate

STACK_TAG, JOB_TAG, FLEET_TAG = "holdfast:stack", "holdfast:job", "holdfast:fleet"


class Ec2Fleets:
    def __init__(self, client: Any, *, stack: str, launch_template_id: str, subnet_ids: Sequence[str]) -> None:
        self.client, self.stack = client, stack
        self.launch_template_id, self.subnet_ids = launch_template_id, tuple(subnet_ids)

    def buy(self, fleet: str, job_id: str, candidate: Candidate) -> Bought:
        subnets = self._subnets(candidate.zones)
        if not subnets:
            raise CapacityUnavailable(
                f"no subnet of the stack lies in {', '.join(candidate.zones)}; add one or allow any"
            )
        answer = self.client.create_fleet(**self._request(fleet, job_id, candidate, subnets))
        instances = tuple(
            instance for group in answer.get("Instances", []) for instance in group.get("InstanceIds", [])
        )
        where = (answer.get("Instances") or [{}])[0]
        override = where.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
        return Bought(
            instances=instances,
            instance_type=where.get("InstanceType", candidate.instance_type),
            zone=override.get("AvailabilityZone") or self._zone_of(override.get("SubnetId")),
            errors=tuple(error.get("ErrorCode", "unknown") for error in answer.get("Errors", [])),
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

    def _request(self, fleet: str, job_id: str, candidate: Candidate, subnets: Sequence[str]) -> dict[str, Any]:
        whole = {
            "SingleInstanceType": True,
            "SingleAvailabilityZone": True,
            "MinTargetCapacity": candidate.nodes,
        }
        spot = candidate.market == "spot"
        market: dict[str, Any] = (
            {
                "SpotOptions": {
                    **whole,
                    "AllocationStrategy": "capacity-optimized",
                    "InstanceInterruptionBehavior": "terminate",
                }
            }
            if spot
            else {"OnDemandOptions": {**whole, "AllocationStrategy": "lowest-price"}}
        )
        tags = [
            {"Key": STACK_TAG, "Value": self.stack},
            {"Key": JOB_TAG, "Value": job_id},
            {"Key": FLEET_TAG, "Value": fleet},
        ]
        return {
            **market,
            "Type": "instant",
            "ClientToken": hashlib.sha256(f"{self.stack}/{fleet}".encode()).hexdigest()[:64],
            "TargetCapacitySpecification": {
                "TotalTargetCapacity": candidate.nodes,
                "DefaultTargetCapacityType": "spot" if spot else "on-demand",
            },
            "LaunchTemplateConfigs": [
                {
                    "LaunchTemplateSpecification": {"LaunchTemplateId": self.launch_template_id, "Version": "$Latest"},
                    "Overrides": [{"InstanceType": candidate.instance_type, "SubnetId": subnet} for subnet in subnets],
                }
            ],
            "TagSpecifications": [
                {"ResourceType": kind, "Tags": tags} for kind in ("fleet", "instance", "volume", "network-interface")
            ],
        }

    def _subnets(self, zones: Sequence[str]) -> list[str]:
        if not zones:
            return list(self.subnet_ids)
        return [subnet for subnet, zone in self._zones().items() if zone in zones]

    def _zone_of(self, subnet: str | None) -> str:
        return self._zones().get(subnet, "") if subnet else ""

    def _zones(self) -> Mapping[str, str]:
        answer = self.client.describe_subnets(SubnetIds=list(self.subnet_ids))
        return {subnet["SubnetId"]: subnet["AvailabilityZone"] for subnet in answer["Subnets"]}

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
    )
