"""aws.ec2 "EC2 Capacity Reservation Instance Interruption Warning" v0 -> an instance will be taken, and when.

Two forms: of a Capacity Block (`availability-zone-id`, `instance-lifecycle`) and of an interruptible reservation
(`azId`, and `resources` is one text instead of a list). Only what both have is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import AwareDatetime, Field

from holdfast.messages.aws_event import AwsDetail, AwsEvent, InstanceId, parsed


class ReservationDetail(AwsDetail):
    instance_id: InstanceId = Field(alias="instance-id")
    terminated: AwareDatetime = Field(alias="instance-termination-time")


class ReservationInterruption(AwsEvent):
    """The warning for one instance of a reservation that is taken back."""

    detail: ReservationDetail

    @property
    def instance_id(self) -> str:
        return self.detail.instance_id

    @property
    def deadline_at(self) -> float:
        """When the instance will be gone, in seconds since 1970."""
        return self.detail.terminated.timestamp()


def read_reservation_interruption(event: Mapping[str, Any]) -> ReservationInterruption:
    """Return the warning in the event. Raises Rejected."""
    return parsed(ReservationInterruption, event)
