"""aws.ec2 "EC2 Instance State-change Notification" v0 -> an instance has changed its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from holdfast.messages.aws_event import AwsDetail, AwsEvent, InstanceId, parsed

GOING = frozenset({"shutting-down", "terminated", "stopping", "stopped"})


class StateDetail(AwsDetail):
    instance_id: InstanceId = Field(alias="instance-id")
    state: str = Field(min_length=1)


class InstanceStateChange(AwsEvent):
    """The change; best effort, and not always in order."""

    detail: StateDetail

    @property
    def instance_id(self) -> str:
        return self.detail.instance_id

    @property
    def state(self) -> str:
        return self.detail.state.lower()

    @property
    def is_going(self) -> bool:
        """True when the instance trains no more: it is stopping or shutting down, or has done so."""
        return self.state in GOING


def read_instance_state_change(event: Mapping[str, Any]) -> InstanceStateChange:
    """Return the change in the event. Raises Rejected."""
    return parsed(InstanceStateChange, event)
