"""What can happen to a job, in the past tense. `at` is seconds since 1970 (UTC), `attempt` where it happened."""

from __future__ import annotations

from dataclasses import dataclass

from job_contract.checkpoint_layout import SavePointer
from job_contract.orders import ResumeFrom


@dataclass(frozen=True, kw_only=True)
class Event:
    at: float
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class AttemptEvent(Event):
    attempt: int


@dataclass(frozen=True, kw_only=True)
class AttemptStarted(AttemptEvent):
    """The job was chosen; an execution of the run machine is owed."""


@dataclass(frozen=True, kw_only=True)
class FleetIntended(AttemptEvent):
    """A fleet is about to be bought; the head was taken over, so no older attempt can commit any more."""

    fleet: str
    resume_from: ResumeFrom | None = None


@dataclass(frozen=True, kw_only=True)
class FleetBought(AttemptEvent):
    """The gang is whole: `nodes` machines, survivors of the last attempt counted in."""

    fleet: str
    instance_type: str
    zone: str
    market: str
    nodes: int


@dataclass(frozen=True, kw_only=True)
class CapacityRefused(AttemptEvent):
    """No candidate could be bought whole; `not_before` is when the first cold pool may be asked again."""

    reason: str
    not_before: float


@dataclass(frozen=True, kw_only=True)
class GateRefused(AttemptEvent):
    """The fleet that checked in is not the one that was asked for."""

    reason: str
    not_before: float


@dataclass(frozen=True, kw_only=True)
class AllReady(AttemptEvent):
    """Every node has checked in and passed the gate; the roster is written."""

    roster_id: str


@dataclass(frozen=True, kw_only=True)
class TrainingStarted(AttemptEvent):
    """The first new optimizer step is done."""

    step: int
    restored: str | None = None
    fell_back: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InterruptionNoticed(AttemptEvent):
    """AWS will take the instance away at `deadline_at`, and `others` of the fleet, told at the same time, with it."""

    instance: str
    deadline_at: float
    others: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OrderHeard(AttemptEvent):
    generation: int


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(AttemptEvent):
    """A fact about storage: true whatever the attempt. `final`: the ranks have stopped after it."""

    pointer: SavePointer
    parent: SavePointer | None = None
    final: bool = False


@dataclass(frozen=True, kw_only=True)
class FleetLost(AttemptEvent):
    """These members of the gang are gone or going."""

    instances: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TrainingFinished(AttemptEvent):
    step: int


@dataclass(frozen=True, kw_only=True)
class Failed(AttemptEvent):
    """The ranks ended on their own; `failure` is a class of failure.py."""

    failure: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class AttemptClosed(AttemptEvent):
    """The machines of the attempt are ended; nothing of it can act any more."""


@dataclass(frozen=True, kw_only=True)
class SurvivorsHeld(AttemptEvent):
    """These members outlive their attempt until `until`; `why` is the arithmetic of the choice."""

    instances: tuple[str, ...]
    until: float
    why: str


@dataclass(frozen=True, kw_only=True)
class LimitPassed(Event):
    """A limit of the job was passed while it had machines: checkpoint, stop, and fail with this reason."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class GaveUp(Event):
    """A limit was passed before the job had machines."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class CancelRequested(Event):
    request: str


@dataclass(frozen=True, kw_only=True)
class PauseRequested(Event):
    request: str


@dataclass(frozen=True, kw_only=True)
class ResumeRequested(Event):
    """`nodes` None = as many as before."""

    request: str
    nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class PriorityChanged(Event):
    request: str
    priority: int


@dataclass(frozen=True, kw_only=True)
class LimitsExtended(Event):
    """Each limit that is not None takes the place of the job's."""

    request: str
    run_s: int | None = None
    wait_s: int | None = None
    attempts: int | None = None
    budget_usd: float | None = None


@dataclass(frozen=True, kw_only=True)
class RetryRequested(Event):
    """An ended job is to go on from `pointer`, or from its newest save; what came after it is a branch left behind."""

    request: str
    pointer: SavePointer | None = None
