"""Cluster placement groups: one a job and zone, made when first needed, kept while the job lives."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import ClientError

from holdfast.adapters.aws_errors import EXISTS_ALREADY, GONE_ALREADY, GROUP_IN_USE, code_of
from holdfast.application.ports import OwnedGroup

STACK_TAG, JOB_TAG = "holdfast:stack", "holdfast:job"


class PlacementGroups:
    def __init__(self, client: Any, *, stack: str) -> None:
        self.client, self.stack = client, stack

    def group_for(self, job_id: str, zone: str) -> str:
        """Return the job's group for the zone; it exists. A cluster group cannot span zones."""
        name = f"{self.stack}-{job_id}-{zone}"
        try:
            self.client.create_placement_group(
                GroupName=name,
                Strategy="cluster",
                TagSpecifications=[
                    {
                        "ResourceType": "placement-group",
                        "Tags": [{"Key": STACK_TAG, "Value": self.stack}, {"Key": JOB_TAG, "Value": job_id}],
                    }
                ],
            )
        except ClientError as error:
            if code_of(error) not in EXISTS_ALREADY:
                raise
        return name

    def owned(self) -> list[OwnedGroup]:
        """Return the groups of the stack, each with the job it was made for."""
        answer = self.client.describe_placement_groups(Filters=[{"Name": f"tag:{STACK_TAG}", "Values": [self.stack]}])
        return [
            OwnedGroup(name=one["GroupName"], job=_tag(one, JOB_TAG))
            for one in answer.get("PlacementGroups", [])
            if one.get("State") not in ("deleting", "deleted")
        ]

    def drop(self, name: str) -> bool:
        """The group is deleted, or was before; False while instances that are shutting down still hold it."""
        try:
            self.client.delete_placement_group(GroupName=name)
        except ClientError as error:
            if code_of(error) in GROUP_IN_USE:
                return False
            if code_of(error) not in GONE_ALREADY:
                raise
        return True


def _tag(one: dict[str, Any], key: str) -> str:
    return next((str(tag["Value"]) for tag in one.get("Tags", []) if tag["Key"] == key), "")
