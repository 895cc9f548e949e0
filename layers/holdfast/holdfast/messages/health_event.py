"""aws.health "AWS Health Event" v0 -> trouble or maintenance of machines, and when.

Outside facts that shape this reader:
- an entity is a bare instance id or an ARN, and for other codes anything at all (a reservation, a piped sentence);
- dates are RFC 1123 ("Mon, 14 Dec 2026 15:00:00 GMT"), unlike in any other event of AWS;
- `page`, `totalPages` and `backupEvent` are text; only entities are split over pages, so each page is acted on alone;
- a backup copy in another region carries the same `eventArn` and entities, so that the facts it tells are told twice;
- notices of account and reservation use lack `statusCode`, `eventScopeCode` and more.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from holdfast.messages.aws_event import AwsDetail, AwsEvent, parsed


def _rfc_1123(value: Any) -> datetime:
    if not isinstance(value, str):
        raise ValueError(f"must be a date like 'Mon, 14 Dec 2026 15:00:00 GMT', not {value!r}")  # noqa: TRY004
    date = parsedate_to_datetime(value)
    return date if date.tzinfo else date.replace(tzinfo=UTC)


HealthDate = Annotated[datetime, BeforeValidator(_rfc_1123)]


class Grade(StrEnum):
    """What a Health event calls for."""

    MAINTENANCE = "maintenance"
    DEGRADED = "degraded"
    PUBLIC = "public"
    NONE = "none"


class Entity(AwsDetail):
    value: str = Field(alias="entityValue")
    status: str = ""


class HealthDetail(AwsDetail):
    arn: str = Field(alias="eventArn")
    service: str
    code: str = Field(alias="eventTypeCode")
    category: str = Field(alias="eventTypeCategory")
    scope: str = Field("ACCOUNT_SPECIFIC", alias="eventScopeCode")
    status: str = Field("open", alias="statusCode")
    starts: HealthDate | None = Field(None, alias="startTime")
    affected: tuple[Entity, ...] = Field((), alias="affectedEntities")
    page: str = "1"
    pages: str = Field("1", alias="totalPages")
    backup: str = Field("false", alias="backupEvent")


class HealthEvent(AwsEvent):
    """One page of one event."""

    detail: HealthDetail

    @property
    def code(self) -> str:
        return self.detail.code

    @property
    def starts_at(self) -> float:
        """When it begins or began, in seconds since 1970; the time of the event where it does not say."""
        return self.at if self.detail.starts is None else self.detail.starts.timestamp()

    @property
    def entities(self) -> tuple[str, ...]:
        """What is affected, as it is written, without what is resolved already; each is judged alone."""
        return tuple(one.value for one in self.detail.affected if one.status.upper() not in ("RESOLVED", "UNIMPAIRED"))

    @property
    def grade(self) -> Grade:
        """What the event calls for; nothing when it is over, of another service, or a mere account notification."""
        if self.detail.status.lower() == "closed" or self.detail.service.upper() != "EC2":
            return Grade.NONE
        if not self.entities:
            return Grade.PUBLIC if self.detail.category == "issue" else Grade.NONE
        return {"scheduledChange": Grade.MAINTENANCE, "issue": Grade.DEGRADED}.get(self.detail.category, Grade.NONE)


def read_health_event(event: Mapping[str, Any]) -> HealthEvent:
    """Return the event. Raises Rejected."""
    return parsed(HealthEvent, event)
