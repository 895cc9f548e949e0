"""Dedup keys, made of meaning: one reclaim arrives as metadata poll, spot warning and state change, with an id each."""

from __future__ import annotations

from functools import cache, singledispatch

from holdfast.domain.events import (
    AttemptEvent,
    CancelRequested,
    CheckpointSaved,
    Event,
    Failed,
    FleetBought,
    FleetIntended,
    FleetLost,
    GaveUp,
    InterruptionNoticed,
    LimitPassed,
    LimitsExtended,
    OrderHeard,
    PauseRequested,
    PriorityChanged,
    ResumeRequested,
    RetryRequested,
)


def event_name(event: Event) -> str:
    """Return the event's name as it stands in keys and histories: `AttemptStarted` is `attempt_started`."""
    return _snake(type(event).__name__)


@cache
def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def dedup_key(event: Event) -> str:
    """Return the same text for every telling of the same fact about a job."""
    attempt = f"#{event.attempt}" if isinstance(event, AttemptEvent) else ""
    detail = _detail(event)
    return f"{event_name(event)}{attempt}" + (f"#{detail}" if detail else "")


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
def _(event: OrderHeard) -> str:
    return str(event.generation)


@_detail.register
def _(event: CheckpointSaved) -> str:
    return event.pointer.save + ("#final" if event.final else "")


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
def _(event: GaveUp | LimitPassed) -> str:
    return event.reason
