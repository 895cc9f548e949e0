"""The five ways in which work can fail to be done; AWS codes become one of them in `adapters/aws_errors.py` only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.domain.purchase import Refusal

REASON_CHARACTERS = 1_000


class Rejected(Exception):
    """What was sent to us can never be used: the sender gets `code` and `reason`, and nothing is tried again.

    Reasons quote what was sent, so they are cut at REASON_CHARACTERS.
    """

    def __init__(self, code: str, reason: str) -> None:
        reason = reason if len(reason) <= REASON_CHARACTERS else f"{reason[:REASON_CHARACTERS]}..."
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.code}: {self.reason}"


class IllegalTransition(Exception):
    """An event met a phase that the table of transitions does not pair with it; the fault is ours."""


class Raced(Exception):
    """Another writer was first; load again and retry now."""


class PurchaseRefused(Exception):
    """EC2 refused a call that prepares a purchase; `refusal` (domain/purchase.py) says what that asks of us."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.code)
        self.refusal = refusal


class Unavailable(Exception):
    """AWS did not do what was asked, through no fault in the request; the same call may work later."""


class UnknownJob(Rejected):
    """The message names a job that was never accepted here."""

    def __init__(self, job_id: str) -> None:
        super().__init__("unknown_job", f"there is no job {job_id!r}; `holdfast list` shows those there are")


class IdentityReused(Rejected):
    """Checkpoints of an ended job of the same identity are where a new one would write."""

    def __init__(self, job_id: str) -> None:
        super().__init__(
            "identity_reused",
            f"checkpoints of an older job {job_id} are still in the bucket; submit under another dedup_id, "
            "or remove them first",
        )


class ExecutionOver(Exception):
    """The execution of this attempt has ended already; a name is never used again."""
