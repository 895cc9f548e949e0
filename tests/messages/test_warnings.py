"""Rebalance, Health, Capacity Block, reservation and eviction events, in every form that AWS documents."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.domain.errors import Rejected
from holdfast.messages.aws_event import instance_ids
from holdfast.messages.bid_evicted import read_bid_evicted
from holdfast.messages.capacity_block import read_capacity_block_event
from holdfast.messages.health_event import Grade, read_health_event
from holdfast.messages.rebalance_recommendation import read_rebalance_recommendation
from holdfast.messages.reservation_interruption import read_reservation_interruption
from tests.builders import sample

FIRST, SECOND, THIRD = "i-0a1b2c3d4e5f60001", "i-0a1b2c3d4e5f60002", "i-0a1b2c3d4e5f60003"
STARTS_AT = 1797260400.0
HEALTH = {
    "dedicated-host-network-maintenance-scheduled": (Grade.MAINTENANCE, ["i-0a1b2c3d4e5f60004"]),
    "instance-reboot-maintenance-scheduled": (Grade.MAINTENANCE, [FIRST, THIRD]),
    "instance-retirement-scheduled-id-entity": (Grade.MAINTENANCE, [FIRST]),
    "instance-retirement-scheduled-arn-entity": (Grade.MAINTENANCE, [FIRST]),
    "instance-retirement-page-1-of-2": (Grade.MAINTENANCE, [FIRST]),
    "instance-retirement-page-2-of-2": (Grade.MAINTENANCE, [SECOND]),
    "persistent-instance-retirement-scheduled": (Grade.MAINTENANCE, [SECOND]),
    "instance-store-drive-degraded-primary": (Grade.DEGRADED, [FIRST]),
    "instance-store-drive-degraded-backup-copy": (Grade.DEGRADED, [FIRST]),
    "operational-issue-public": (Grade.PUBLIC, []),
    "instance-retirement-closed": (Grade.NONE, []),
    "odcr-underutilization": (Grade.NONE, []),
    "odcr-underutilization-summary": (Grade.NONE, []),
}


def health(**detail: Any) -> dict[str, Any]:
    event = sample("health-ec2-instance-retirement-scheduled-id-entity.json")
    return {**event, "detail": {**event["detail"], **detail}}


@pytest.mark.parametrize("name", HEALTH)
def test_every_form_of_a_health_event_has_its_grade_and_its_machines(name: str) -> None:
    event = read_health_event(sample(f"health-ec2-{name}.json"))
    grade, expected = HEALTH[name]
    assert event.grade is grade
    if grade is not Grade.NONE:
        assert instance_ids(event.entities) == (expected, [])
    if grade is Grade.MAINTENANCE:
        assert event.starts_at == STARTS_AT


@pytest.mark.parametrize("status", ["RESOLVED", "UNIMPAIRED", "resolved"])
def test_a_machine_that_is_resolved_is_left_out_and_the_others_stay(status: str) -> None:
    entities = [{"entityValue": FIRST, "status": status}, {"entityValue": SECOND, "status": "PENDING"}]
    assert read_health_event(health(affectedEntities=entities)).entities == (SECOND,)


def test_a_health_event_of_another_service_calls_for_nothing() -> None:
    assert read_health_event(health(service="RDS")).grade is Grade.NONE


@pytest.mark.parametrize(
    "date", ["Mon, 14 Dec 2026 15:00:00 GMT", "Mon, 14 Dec 2026 16:00:00 +0100", "14 Dec 2026 15:00:00 GMT"]
)
def test_dates_of_health_are_rfc_1123(date: str) -> None:
    assert read_health_event(health(startTime=date)).starts_at == STARTS_AT


@pytest.mark.parametrize("date", ["2026-12-14", "soon", "", 5, {}])
def test_a_date_that_is_none_is_refused_by_the_field(date: Any) -> None:
    with pytest.raises(Rejected, match="startTime"):
        read_health_event(health(startTime=date))


@pytest.mark.parametrize("form", ["capacity-block", "interruptible"])
def test_both_forms_of_a_reservation_interruption_say_who_and_when(form: str) -> None:
    notice = read_reservation_interruption(sample(f"capacity-reservation-instance-interruption-warning-{form}.json"))
    assert (notice.instance_id, notice.deadline_at) == (FIRST, 1796209200.0)


@pytest.mark.parametrize(
    "name", ["delivered", "delivered-older-name", "expiration-warning", "expiration-warning-older-name"]
)
def test_both_spellings_of_a_blocks_events_say_which_block_and_until_when(name: str) -> None:
    event = read_capacity_block_event(sample(f"capacity-block-{name}.json"))
    assert (event.reservation, event.ends_at) == ("cr-0abc1234def567890", 1796211000.0)


@pytest.mark.parametrize("reservation", ["", "cr-", "i-0a1b2c3d4e5f60001", None, ["cr-0abc1234def567890"]])
def test_a_block_without_a_reservation_is_refused(reservation: Any) -> None:
    event = sample("capacity-block-delivered.json")
    event["detail"]["capacity-reservation-id"] = reservation
    with pytest.raises(Rejected):
        read_capacity_block_event(event)


def test_advice_names_its_instance_whatever_its_arn_looks_like() -> None:
    assert read_rebalance_recommendation(sample("ec2-rebalance-recommendation.json")).instance_id == FIRST


def test_an_eviction_may_name_several() -> None:
    assert read_bid_evicted(sample("cloudtrail-bid-evicted-event.json")).entities == (FIRST, SECOND)


@pytest.mark.parametrize("name", ["TerminateInstances", "", None])
def test_another_record_of_the_trail_is_refused(name: str | None) -> None:
    event = sample("cloudtrail-bid-evicted-event.json")
    event["detail"]["eventName"] = name
    with pytest.raises(Rejected, match="eventName"):
        read_bid_evicted(event)


def test_one_bad_id_spoils_no_good_one() -> None:
    found, refused = instance_ids([FIRST, "mine", FIRST.upper(), f"arn:aws:ec2:x:1:instance/{SECOND}", ""])
    assert found == [FIRST, SECOND]
    assert [refusal.code for refusal in refused] == ["bad_instance_id"] * 2
