"""Launch templates: the stack's own, and those made from it for types with EFA and for reservations.

A derived template is named by a digest of all that it says, so the same needs find the same template again, and a
template never changes once it is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from holdfast.adapters.aws_errors import EXISTS_ALREADY, GONE_ALREADY, code_of
from holdfast.application.ports import OwnedTemplate
from holdfast.domain.network_cards import MachineType, layout
from holdfast.domain.purchase import Reservation, ReservationKind, Template
from job_contract.version import canonical_json

STACK_TAG = "holdfast:stack"
DIGEST_CHARACTERS = 12


class LaunchTemplates:
    def __init__(self, client: Any, *, stack: str, base: str) -> None:
        self.client, self.stack, self.base = client, stack, base
        self._data: dict[tuple[str, str], Mapping[str, Any]] = {}

    def base_template(self) -> Template:
        """Return the stack's own template: its newest version by number, and the image that its parameter names now."""
        found = self._version("$Latest", resolve=True)
        # What is resolved at launch may differ from node to node; the number and the image are pinned here instead.
        return Template(
            id=self.base, version=str(found["VersionNumber"]), image=found["LaunchTemplateData"].get("ImageId", "")
        )

    def template_for(self, base: Template, machine: MachineType, reservation: Reservation | None) -> Template:
        """Return a template with every EFA of the type, in the reservation; the base itself where that is enough."""
        wishes = _wishes(machine, reservation)
        if not wishes:
            return base
        data = self._derived(self._base_data(base), wishes, base.image)
        digest = hashlib.sha256(canonical_json({"data": data, "base": base.id})).hexdigest()[:DIGEST_CHARACTERS]
        name = f"{self.stack}-{machine.name.replace('.', '-')}-{digest}"
        return Template(id=self._made(name, data), version="1", image=base.image)

    def owned(self) -> list[OwnedTemplate]:
        """Return the derived templates of the stack."""
        pages = self.client.get_paginator("describe_launch_templates").paginate(
            Filters=[{"Name": f"tag:{STACK_TAG}", "Values": [self.stack]}]
        )
        return [
            OwnedTemplate(
                id=one["LaunchTemplateId"], name=one["LaunchTemplateName"], created_at=one["CreateTime"].timestamp()
            )
            for page in pages
            for one in page["LaunchTemplates"]
            if one["LaunchTemplateId"] != self.base
        ]

    def drop(self, template: str) -> None:
        try:
            self.client.delete_launch_template(LaunchTemplateId=template)
        except ClientError as error:
            if code_of(error) not in GONE_ALREADY:
                raise

    def _made(self, name: str, data: Mapping[str, Any]) -> str:
        try:
            answer = self.client.create_launch_template(
                LaunchTemplateName=name,
                LaunchTemplateData=data,
                ClientToken=hashlib.sha256(name.encode()).hexdigest()[:64],
                TagSpecifications=[
                    {"ResourceType": "launch-template", "Tags": [{"Key": STACK_TAG, "Value": self.stack}]}
                ],
            )
            return str(answer["LaunchTemplate"]["LaunchTemplateId"])
        except ClientError as error:
            if code_of(error) not in EXISTS_ALREADY:
                raise
        found = self.client.describe_launch_templates(LaunchTemplateNames=[name])["LaunchTemplates"]
        return str(found[0]["LaunchTemplateId"])

    def _base_data(self, base: Template) -> Mapping[str, Any]:
        key = (base.id, base.version)
        if key not in self._data:
            # A version never changes.
            self._data[key] = self._version(base.version, resolve=False)["LaunchTemplateData"]
        return self._data[key]

    def _version(self, version: str, *, resolve: bool) -> Mapping[str, Any]:
        answer = self.client.describe_launch_template_versions(
            LaunchTemplateId=self.base, Versions=[version], ResolveAlias=resolve
        )
        found: Mapping[str, Any] = answer["LaunchTemplateVersions"][0]
        return found

    def _derived(self, told: Mapping[str, Any], wishes: Mapping[str, Any], image: str) -> dict[str, Any]:
        # The answer of a describe call has members that a request does not take.
        shape = self.client.meta.service_model.operation_model("CreateLaunchTemplate").input_shape
        data = _pruned(told, shape.members["LaunchTemplateData"])
        groups = data.get("SecurityGroupIds", [])
        if "NetworkInterfaces" in wishes:
            # With interfaces of its own, a template names its security groups on them and nowhere else.
            data.pop("SecurityGroupIds", None)
            wishes = {**wishes, "NetworkInterfaces": [{**one, "Groups": groups} for one in wishes["NetworkInterfaces"]]}
        return {**data, **wishes, **({"ImageId": image} if image else {})}


def _wishes(machine: MachineType, reservation: Reservation | None) -> dict[str, Any]:
    wishes: dict[str, Any] = {}
    interfaces = layout(machine)
    if any(one.is_efa for one in interfaces):
        # No public address and no subnet: EC2 gives a node with several interfaces no public address, and the subnet
        # comes with each purchase.
        wishes["NetworkInterfaces"] = [
            {
                "NetworkCardIndex": one.card,
                "DeviceIndex": one.device,
                "InterfaceType": one.kind,
                "DeleteOnTermination": True,
            }
            for one in interfaces
        ]
    if reservation is not None and reservation.kind is ReservationKind.CAPACITY_BLOCK:
        wishes["InstanceMarketOptions"] = {"MarketType": "capacity-block"}
        wishes["CapacityReservationSpecification"] = {
            "CapacityReservationTarget": {"CapacityReservationId": reservation.id}
        }
    return wishes


def _pruned(value: Any, shape: Any) -> Any:
    if shape.type_name == "structure" and isinstance(value, Mapping):
        return {name: _pruned(item, shape.members[name]) for name, item in value.items() if name in shape.members}
    if shape.type_name == "list" and isinstance(value, Sequence):
        return [_pruned(item, shape.member) for item in value]
    return value
