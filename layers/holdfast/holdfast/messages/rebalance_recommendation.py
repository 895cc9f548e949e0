"""aws.ec2 "EC2 Instance Rebalance Recommendation" v0 -> an instance is likelier than others to be taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from holdfast.messages.aws_event import AwsDetail, AwsEvent, InstanceId, parsed


class RebalanceDetail(AwsDetail):
    instance_id: InstanceId = Field(alias="instance-id")


class RebalanceRecommendation(AwsEvent):
    """The advice; best effort, repeated at will, mostly followed by nothing."""

    detail: RebalanceDetail

    @property
    def instance_id(self) -> str:
        return self.detail.instance_id


def read_rebalance_recommendation(event: Mapping[str, Any]) -> RebalanceRecommendation:
    """Return the advice in the event. Raises Rejected."""
    return parsed(RebalanceRecommendation, event)
