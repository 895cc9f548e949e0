"""Why a job waits: a code for programs, a sentence for people, and what would unblock it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Code(StrEnum):
    """Every reason for which a job is not being started."""

    IN_LINE = "in_line"
    ATTEMPT_OPEN = "attempt_open"
    HELD = "held_by_operator"
    CAPACITY_COLD = "capacity_cold"
    ACCOUNT_QUOTA = "account_quota"
    NOT_BEFORE = "not_before"
    OVER_TEAM_QUOTA = "over_team_quota"
    OVER_MARKET_QUOTA = "over_market_quota"
    TEAM_QUOTA = "team_quota"
    MARKET_QUOTA = "market_quota"
    HEAD_RESERVE = "head_reserve"
    FAIR_SHARE = "fair_share"
    MAKING_ROOM = "making_room"
    NEXT_PASS = "next_pass"
    STACK_FULL = "stack_full"


@dataclass(frozen=True, kw_only=True)
class Because:
    """`until`: seconds since 1970 (UTC) at which it ends by itself at the latest, None when nobody can say.

    `head_since`: when the job became the head of a market's line; it stays that until it starts.
    """

    code: Code
    sentence: str
    unblock: str
    until: float | None = None
    head_since: float | None = None


IN_LINE = Because(
    code=Code.IN_LINE,
    sentence="it waits for its turn behind better placed jobs of its team",
    unblock="nothing is needed: waiting moves it forward; a higher priority moves it at once",
)
"""What is true of a waiting job that no dispatch has looked at yet, so it is stored for none."""
