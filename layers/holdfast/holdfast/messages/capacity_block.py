"""aws.ec2 "Capacity Block Delivered" and "Capacity Block Expiration Warning" v0 -> a block, and when it ends.

AWS's pages of different dates name them "Capacity Block Reservation Delivered" and "... Expiration Warning" too; both
spellings are understood. The expiration warning comes 40 minutes before the end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, Field

from holdfast.domain.errors import Rejected
from holdfast.messages.aws_event import AwsDetail, AwsEvent, parsed

RESERVATION_ID = re.compile(r"cr-[0-9a-f]{8,17}")


def reservation_id(text: str) -> str:
    """Return the bare reservation id in lower case, of an id or an ARN. Raises Rejected."""
    tail = text.strip().rsplit("/", 1)[-1].lower()
    if not RESERVATION_ID.fullmatch(tail):
        raise Rejected("bad_reservation_id", f"{text!r} is no capacity reservation id (cr- and hex digits)")
    return tail


class BlockDetail(AwsDetail):
    reservation: Annotated[str, AfterValidator(reservation_id)] = Field(alias="capacity-reservation-id")
    ends: AwareDatetime = Field(alias="end-date")


class CapacityBlockEvent(AwsEvent):
    """A block was delivered, or will soon expire; either says when it ends."""

    detail: BlockDetail

    @property
    def reservation(self) -> str:
        return self.detail.reservation

    @property
    def ends_at(self) -> float:
        """When the block ends, in seconds since 1970."""
        return self.detail.ends.timestamp()


def read_capacity_block_event(event: Mapping[str, Any]) -> CapacityBlockEvent:
    """Return the event. Raises Rejected."""
    return parsed(CapacityBlockEvent, event)
