"""AWS's error codes, in one place; callers never compare strings of their own."""

from __future__ import annotations

from botocore.exceptions import ClientError

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
MISMATCH = frozenset({"IdempotentParameterMismatch"})


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


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
