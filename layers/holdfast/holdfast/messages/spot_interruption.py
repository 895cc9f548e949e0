"""aws.ec2 "EC2 Spot Instance Interruption Warning" v0 -> an instance will be taken, and when."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from holdfast.messages.aws_event import AwsDetail, AwsEvent, InstanceId, parsed

NOTICE_S = 120.0
# EC2 begins to hibernate at once: such a warning comes without the two minutes.
HIBERNATE = "hibernate"


class SpotDetail(AwsDetail):
    instance_id: InstanceId = Field(alias="instance-id")
    action: str = Field("terminate", alias="instance-action")


class SpotInterruption(AwsEvent):
    """The warning; best effort, often doubled, sometimes absent."""

    detail: SpotDetail

    @property
    def instance_id(self) -> str:
        return self.detail.instance_id

    @property
    def deadline_at(self) -> float:
        """When the instance will be gone, in seconds since 1970."""
        return self.at if self.detail.action == HIBERNATE else self.at + NOTICE_S


def read_spot_interruption(event: Mapping[str, Any]) -> SpotInterruption:
    """Return the warning in the event. Raises Rejected."""
    return parsed(SpotInterruption, event)
