"""Dedup keys, made of meaning: one reclaim arrives as metadata poll, spot warning and state change, with an id each."""

from __future__ import annotations

import hashlib
from functools import cache, singledispatch

from holdfast.domain.events import (
    AttemptEvent,
    BudgetNearlySpent,
    CancelRequested,
    CapacityLooked,
    CheckpointSaved,
    EarlySaveAdvised,
    Event,
    Failed,
    FleetBought,
    FleetIntended,
    FleetLost,
    GaveUp,
    InterruptionNoticed,
    LimitPassed,
    LimitsExtended,
    MoveDue,
    MovePlanned,
    OrderHeard,
    PauseRequested,
    PlaceWanted,
    PriorityChanged,
    ResumeRequested,
    RetryRequested,
    SaveLost,
    StepsSlowed,
)
from holdfast.domain.notices import REBALANCE_COOL_DOWN_S

KEEP_S = 35 * 86400
"""How long a job's identity outlives its end: request, row, history, nodes, fleets and orders. After that the same
request is a new job."""

KEY_CHARACTERS = 200
"""DynamoDB takes sort keys of 1,024 bytes, and the names of 256 instances are longer."""


def event_name(event: Event) -> str:
    """Return the event's name as it stands in keys and histories: `AttemptStarted` is `attempt_started`."""
    return _snake(type(event).__name__)


@cache
def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def dedup_key(event: Event) -> str:
    """Return the same text for every telling of the same fact about a job."""
    name, detail = event_name(event), _detail(event)
    fact = f"{name}#{event.attempt}" if isinstance(event, AttemptEvent) else name
    key = f"{fact}#{detail}" if detail else fact
    if len(key.encode()) <= KEY_CHARACTERS:
        return key
    return f"{fact}#sha256-{hashlib.sha256(detail.encode()).hexdigest()}"


@singledispatch
def _detail(event: Event) -> str:
    return ""


@_detail.register
def _(event: FleetIntended | FleetBought) -> str:
    return event.fleet


@_detail.register
def _(event: InterruptionNoticed) -> str:
    return event.instance


@_detail.register
def _(event: PlaceWanted) -> str:
    return event.by


@_detail.register
def _(event: OrderHeard) -> str:
    return str(event.generation)


@_detail.register
def _(event: CheckpointSaved) -> str:
    return event.pointer.save + ("#final" if event.final else "")


@_detail.register
def _(event: SaveLost) -> str:
    return event.save


@_detail.register
def _(event: StepsSlowed) -> str:
    return str(event.number)


@_detail.register
def _(event: FleetLost) -> str:
    return ",".join(sorted(event.instances))


@_detail.register
def _(event: Failed) -> str:
    return event.failure


@_detail.register
def _(
    event: CancelRequested | PauseRequested | ResumeRequested | PriorityChanged | LimitsExtended | RetryRequested,
) -> str:
    return event.request


@_detail.register
def _(event: GaveUp) -> str:
    return f"{event.branch}#{event.reason}" if event.branch else event.reason


@_detail.register
def _(event: BudgetNearlySpent) -> str:
    return f"{event.budget_usd:g}"


@_detail.register
def _(event: LimitPassed) -> str:
    # Once passed it stops the attempt, whatever is extended: the closing judges anew.
    return event.failure


# -- Warnings that leave the machines at work --------------------------------------------------------------------------


@_detail.register
def _(event: EarlySaveAdvised) -> str:
    if event.request:
        return event.request
    # Hints repeat for hours under the same words; two that a cool-down parts are never in one of these windows.
    return str(int(event.at // REBALANCE_COOL_DOWN_S))


@_detail.register
def _(event: CapacityLooked) -> str:
    # One look for each early save that was asked for.
    return f"{event.asked_at:.3f}"


@_detail.register
def _(event: MovePlanned) -> str:
    return f"{event.instance}#{round(event.by_at)}"


@_detail.register
def _(event: MoveDue) -> str:
    return str(round(event.by_at))
