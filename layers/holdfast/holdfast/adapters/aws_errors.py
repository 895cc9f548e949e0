"""AWS's error codes, in one place; callers never compare strings of their own."""

from __future__ import annotations

from botocore.exceptions import ClientError

from holdfast.domain.purchase import RefusalKind

CONDITION_FAILED = frozenset({"ConditionalCheckFailedException"})
CONFLICT = frozenset({"TransactionConflictException", "TransactionInProgressException"})
RACED_REASONS = frozenset(
    {"ConditionalCheckFailed", "TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded"}
)
DEAD_TOKEN = frozenset({"TaskDoesNotExist", "TaskTimedOut", "InvalidToken"})
NOT_FOUND_INSTANCE = frozenset({"InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed"})
PRECONDITION = frozenset({"PreconditionFailed", "412"})
OBJECT_CONFLICT = frozenset({"ConditionalRequestConflict", "409"})
NO_SUCH_KEY = frozenset({"NoSuchKey", "404"})
EXECUTION_EXISTS = frozenset({"ExecutionAlreadyExists"})
NO_EXECUTION = frozenset({"ExecutionDoesNotExist"})

NOT_SUPPORTED_THERE_S = 3600.0
"""A type that a zone does not have comes no sooner than AWS builds it."""

QUOTA_S = 1800.0
"""A quota is raised by a person, or freed by a job that ends."""

CAPACITY_S = 60.0

_COLD = RefusalKind.POOL_COLD
_QUOTA = RefusalKind.QUOTA
_WRONG = RefusalKind.CONFIGURATION
_SOON = RefusalKind.RETRY_SOON
_SLOW = RefusalKind.THROTTLED

PURCHASE_ERRORS: dict[str, tuple[RefusalKind, float]] = {
    "InsufficientInstanceCapacity": (_COLD, CAPACITY_S),
    "InsufficientHostCapacity": (_COLD, CAPACITY_S),
    "InsufficientReservedInstanceCapacity": (_COLD, CAPACITY_S),
    "UnfulfillableCapacity": (_COLD, CAPACITY_S),
    "MaxFleetCountExceeded": (_COLD, 300.0),
    "ReservationCapacityExceeded": (_COLD, 300.0),
    "Unsupported": (_COLD, NOT_SUPPORTED_THERE_S),
    "InsufficientFreeAddressesInSubnet": (RefusalKind.NEXT_SUBNET, 300.0),
    "MaxSpotInstanceCountExceeded": (_QUOTA, QUOTA_S),
    "VcpuLimitExceeded": (_QUOTA, QUOTA_S),
    "InstanceLimitExceeded": (_QUOTA, QUOTA_S),
    "PendingVerification": (_QUOTA, QUOTA_S),
    "PlacementGroupLimitExceeded": (_QUOTA, QUOTA_S),
    "SpotMaxPriceTooLow": (RefusalKind.DROP_MAX_PRICE, 300.0),
    "InvalidLaunchTemplateId.NotFound": (_SOON, 0.0),
    "InvalidLaunchTemplateId.VersionNotFound": (_SOON, 0.0),
    "InvalidLaunchTemplateName.NotFoundException": (_SOON, 0.0),
    "InvalidPlacementGroup.Unknown": (_SOON, 0.0),
    "InvalidParameterValue": (_SOON, 0.0),
    "InvalidFleetConfiguration": (_WRONG, NOT_SUPPORTED_THERE_S),
    "InvalidParameterCombination": (_WRONG, NOT_SUPPORTED_THERE_S),
    "InvalidParameter": (_WRONG, NOT_SUPPORTED_THERE_S),
    "MissingParameter": (_WRONG, NOT_SUPPORTED_THERE_S),
    "UnknownParameter": (_WRONG, NOT_SUPPORTED_THERE_S),
    "ValidationError": (_WRONG, NOT_SUPPORTED_THERE_S),
    "InvalidAMIID.NotFound": (_WRONG, NOT_SUPPORTED_THERE_S),
    "InvalidAMIID.Unavailable": (_WRONG, NOT_SUPPORTED_THERE_S),
    "InvalidAMIID.Malformed": (_WRONG, NOT_SUPPORTED_THERE_S),
    "InvalidInstanceType": (_WRONG, NOT_SUPPORTED_THERE_S),
    "InvalidSubnetID.NotFound": (_WRONG, NOT_SUPPORTED_THERE_S),
    "InvalidSecurityGroupID.NotFound": (_WRONG, NOT_SUPPORTED_THERE_S),
    "InvalidGroup.NotFound": (_WRONG, NOT_SUPPORTED_THERE_S),
    "InvalidCapacityReservationId.NotFound": (_WRONG, NOT_SUPPORTED_THERE_S),
    "InvalidCapacityReservationId.Malformed": (_WRONG, NOT_SUPPORTED_THERE_S),
    "UnauthorizedOperation": (RefusalKind.PERMISSION, NOT_SUPPORTED_THERE_S),
    "AuthFailure": (RefusalKind.PERMISSION, NOT_SUPPORTED_THERE_S),
    "Blocked": (RefusalKind.PERMISSION, NOT_SUPPORTED_THERE_S),
    "OptInRequired": (RefusalKind.PERMISSION, NOT_SUPPORTED_THERE_S),
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": (RefusalKind.SERVICE_LINKED_ROLE, NOT_SUPPORTED_THERE_S),
    "RequestLimitExceeded": (_SLOW, 20.0),
    "RequestThrottled": (_SLOW, 20.0),
    "Throttling": (_SLOW, 20.0),
    "ThrottlingException": (_SLOW, 20.0),
    "EC2ThrottledException": (_SLOW, 20.0),
    "IdempotentParameterMismatch": (RefusalKind.MISMATCH, 0.0),
}
"""What a code says when machines are bought, raised or in `Errors[]`, and how long a pool is left alone for it."""

UNKNOWN_S = CAPACITY_S

AMBIGUOUS = frozenset(
    {"InternalError", "InternalFailure", "InternalServerError", "Unavailable", "ServiceUnavailable", "RequestExpired"}
)
"""The call may have been carried out: the tag says, not a new token."""

EXISTS_ALREADY = frozenset({"InvalidLaunchTemplateName.AlreadyExistsException", "InvalidPlacementGroup.Duplicate"})
GROUP_IN_USE = frozenset({"InvalidPlacementGroup.InUse"})
GONE_ALREADY = frozenset(
    {
        "InvalidPlacementGroup.Unknown",
        "InvalidLaunchTemplateId.NotFound",
        "InvalidLaunchTemplateName.NotFoundException",
    }
)


THROTTLED = frozenset(
    {
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
        "RequestThrottledException",
        "RequestLimitExceeded",
        "TooManyRequestsException",
        "SlowDown",
        "RequestTimeout",
    }
)
ACCESS_DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403"})


def transient(error: ClientError) -> bool:
    """True when the same call may work in a moment: throttled, or a fault on AWS's side."""
    return status_of(error) >= 500 or code_of(error) in THROTTLED


def status_of(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def kind_of(code: str) -> tuple[RefusalKind, float]:
    """Return what the code asks of us and how long a pool is left alone; a code of tomorrow is UNKNOWN."""
    return PURCHASE_ERRORS.get(code, (RefusalKind.UNKNOWN, UNKNOWN_S))


def ambiguous(error: ClientError) -> bool:
    """True when the call may have been carried out all the same."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return code_of(error) in AMBIGUOUS or (status >= 500 and kind_of(code_of(error))[0] is RefusalKind.UNKNOWN)


def raced(error: ClientError) -> bool:
    """True when the same write may succeed in a moment: another writer was first, or the partition is busy.

    The SDK retries a throttled call, but not a transaction that was cancelled because of one; Lambda would only after
    a minute, which is half a notice.
    """
    code = code_of(error)
    if code in CONDITION_FAILED | CONFLICT:
        return True
    if code != "TransactionCanceledException":
        return False
    codes = {reason.get("Code") for reason in error.response.get("CancellationReasons", [])}
    return bool(codes & RACED_REASONS)
