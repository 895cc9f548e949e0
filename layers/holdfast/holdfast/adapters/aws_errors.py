"""AWS's error codes, in one place; callers never compare strings of their own."""

from __future__ import annotations

from botocore.exceptions import ClientError

CONDITION_FAILED = frozenset({"ConditionalCheckFailedException"})
CONFLICT = frozenset({"TransactionConflictException", "TransactionInProgressException"})
DEAD_TOKEN = frozenset({"TaskDoesNotExist", "TaskTimedOut", "InvalidToken"})
NOT_FOUND_INSTANCE = frozenset({"InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed"})
PRECONDITION = frozenset({"PreconditionFailed", "412"})
OBJECT_CONFLICT = frozenset({"ConditionalRequestConflict", "409"})
NO_SUCH_KEY = frozenset({"NoSuchKey", "404"})
EXECUTION_EXISTS = frozenset({"ExecutionAlreadyExists"})
NO_EXECUTION = frozenset({"ExecutionDoesNotExist"})
MISMATCH = frozenset({"IdempotentParameterMismatch"})


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


def raced(error: ClientError) -> bool:
    """True when another writer was first: a failed condition or a conflict anywhere in a transaction."""
    code = code_of(error)
    if code in CONDITION_FAILED | CONFLICT:
        return True
    if code != "TransactionCanceledException":
        return False
    codes = {reason.get("Code") for reason in error.response.get("CancellationReasons", [])}
    return bool(codes & {"ConditionalCheckFailed", "TransactionConflict"})
