"""Every error code of a purchase has a class, raised or in `Errors[]`."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from holdfast.adapters.aws_errors import PURCHASE_ERRORS, ambiguous, kind_of
from holdfast.domain.purchase import ADVICE, FATAL, RefusalKind

TABLE = [
    ("InsufficientInstanceCapacity", "pool_cold"),
    ("UnfulfillableCapacity", "pool_cold"),
    ("Unsupported", "pool_cold"),
    ("MaxFleetCountExceeded", "pool_cold"),
    ("ReservationCapacityExceeded", "pool_cold"),
    ("MaxSpotInstanceCountExceeded", "quota"),
    ("VcpuLimitExceeded", "quota"),
    ("InstanceLimitExceeded", "quota"),
    ("InsufficientFreeAddressesInSubnet", "next_subnet"),
    ("SpotMaxPriceTooLow", "drop_max_price"),
    ("InvalidLaunchTemplateId.NotFound", "retry_soon"),
    ("InvalidLaunchTemplateName.NotFoundException", "retry_soon"),
    ("InvalidLaunchTemplateId.VersionNotFound", "retry_soon"),
    ("InvalidParameterValue", "retry_soon"),
    ("UnauthorizedOperation", "permission"),
    ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", "service_linked_role"),
    ("RequestLimitExceeded", "throttled"),
    ("IdempotentParameterMismatch", "mismatch"),
    ("InvalidFleetConfiguration", "config_error"),
    ("InvalidParameterCombination", "config_error"),
]


@pytest.mark.parametrize(("code", "kind"), TABLE)
def test_each_code_has_its_class(code: str, kind: str) -> None:
    assert kind_of(code)[0] == kind


def test_every_class_has_a_code_but_the_unknown() -> None:
    assert {kind for kind, _ in PURCHASE_ERRORS.values()} == set(RefusalKind) - {RefusalKind.UNKNOWN}


def test_every_class_that_ends_a_job_says_the_way_out() -> None:
    assert FATAL | {RefusalKind.RETRY_SOON, RefusalKind.UNKNOWN} <= set(ADVICE)


def test_a_code_of_tomorrow_is_unknown_and_its_pool_is_left_alone_meanwhile() -> None:
    kind, cool_s = kind_of("QuantumFluctuation")
    assert (kind, cool_s > 0) == (RefusalKind.UNKNOWN, True)


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("InternalError", 500, True),
        ("Unavailable", 503, True),
        ("SomethingNew", 502, True),
        ("RequestLimitExceeded", 503, False),
        ("InsufficientInstanceCapacity", 500, False),
        ("InvalidParameterValue", 400, False),
    ],
)
def test_only_an_answer_that_leaves_it_open_is_ambiguous(code: str, status: int, expected: bool) -> None:
    response: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    assert ambiguous(ClientError(response, "CreateFleet")) is expected
