"""aws.ec2 "AWS Service Event via CloudTrail", eventName BidEvictedEvent -> spot instances that have been taken.

Needs a trail, and comes minutes late: it tells the sweep's news earlier and the cause for certain, never a warning. The
ids are in `serviceEventDetails.instanceIdSet`, several at a time; `resources` is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from holdfast.messages.aws_event import AwsDetail, AwsEvent, parsed


class EvictionDetails(AwsDetail):
    ids: tuple[str, ...] = Field(alias="instanceIdSet")


class BidEvictedDetail(AwsDetail):
    event_name: Literal["BidEvictedEvent"] = Field(alias="eventName")
    service: EvictionDetails = Field(alias="serviceEventDetails")


class BidEvicted(AwsEvent):
    """The record of one eviction."""

    detail: BidEvictedDetail

    @property
    def entities(self) -> tuple[str, ...]:
        """The ids as they are written; each is judged alone."""
        return self.detail.service.ids


def read_bid_evicted(event: Mapping[str, Any]) -> BidEvicted:
    """Return the record in the event. Raises Rejected."""
    return parsed(BidEvicted, event)
