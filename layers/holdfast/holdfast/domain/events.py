"""What can happen to a job, in the past tense. `at` is seconds since 1970 (UTC), `attempt` where it happened."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.domain.ledger import Reserved
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
    """The job was chosen; an execution of the run machine is owed. `reserved`: its place in the ledger."""

    reserved: Reserved | None = None


@dataclass(frozen=True, kw_only=True)
class FleetIntended(AttemptEvent):
    """A fleet is about to be bought; the head was taken over, so no older attempt can commit any more."""

    fleet: str
    resume_from: ResumeFrom | None = None


@dataclass(frozen=True, kw_only=True)
class FleetBought(AttemptEvent):
    """The gang is whole: `nodes` machines, survivors of the last attempt counted in. `zone` empty = not known.

    `node_usd_h`: US dollars that a node costs an hour, on average over the gang, as known now; None = not known.
    """

    fleet: str
    instance_type: str
    zone: str
    market: str
    nodes: int
    node_usd_h: float | None = None


@dataclass(frozen=True, kw_only=True)
class CapacityRefused(AttemptEvent):
    """No candidate could be bought whole; `not_before` is when the first cold pool may be asked again.

    `over_quota`: nothing but vCPU quotas of the account stood in the way.
    """

    reason: str
    not_before: float
    over_quota: bool = False


@dataclass(frozen=True, kw_only=True)
class GateRefused(AttemptEvent):
    """The fleet that checked in is not the one that was asked for; the attempt is charged to the class `failure`."""

    reason: str
    not_before: float
    failure: str = "capacity"


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
class PlaceWanted(AttemptEvent):
    """An urgent job may have this one's place, once this one has committed a save."""

    by: str


@dataclass(frozen=True, kw_only=True)
class OrderHeard(AttemptEvent):
    generation: int


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(AttemptEvent):
    """A fact about storage: true whatever the attempt. `final`: the ranks have stopped after it.

    `answered_after_s` is for the history: how long the order that it answers took.
    """

    pointer: SavePointer
    parent: SavePointer | None = None
    final: bool = False
    answered_after_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class SaveLost(AttemptEvent):
    """A save that was begun is not committed, and the training goes on; `reason` has the node and the error code."""

    save: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepsSlowed(AttemptEvent):
    """Steps take longer than their baseline, as the cause says; nothing is done about it. `number` within the attempt.

    `instance` is the machine that explains it, empty where none does.
    """

    number: int
    instance: str = ""


@dataclass(frozen=True, kw_only=True)
class FleetLost(AttemptEvent):
    """These members of the gang are gone or going. `failure`: the class, where more is known than that."""

    instances: tuple[str, ...]
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingFinished(AttemptEvent):
    step: int


@dataclass(frozen=True, kw_only=True)
class Failed(AttemptEvent):
    """The ranks ended on their own; `failure` is a class of failure.py. `log_tail` is for the history only."""

    failure: str
    reason: str
    log_tail: str = ""


@dataclass(frozen=True, kw_only=True)
class AttemptClosed(AttemptEvent):
    """The machines of the attempt are ended; nothing of it can act any more. `step` is the newest that a node told."""

    step: int = 0


@dataclass(frozen=True, kw_only=True)
class SurvivorsHeld(AttemptEvent):
    """These members outlive their attempt until `until`; `why` is the arithmetic of the choice."""

    instances: tuple[str, ...]
    until: float
    why: str


@dataclass(frozen=True, kw_only=True)
class LimitPassed(AttemptEvent):
    """A limit of the job was passed while it had machines: checkpoint, stop, and fail with this reason.

    `failure` is the limit's class in failure.py.
    """

    reason: str
    failure: str = "limit"


@dataclass(frozen=True, kw_only=True)
class BudgetNearlySpent(AttemptEvent):
    """The job has cost `cost_usd`, most of its `budget_usd`; nothing is stopped."""

    budget_usd: float
    cost_usd: float


@dataclass(frozen=True, kw_only=True)
class GaveUp(Event):
    """A limit was passed before the job had machines, or nothing can be bought for it. Of an older `branch`: too late.

    `failure` is a class of failure.py, None = the one of the attempt before.
    """

    reason: str
    failure: str | None = None
    branch: int = 0


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


# -- Warnings that leave the machines at work --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EarlySaveAdvised(AttemptEvent):
    """AWS hints at trouble for the machines, or a user asks (`request`): one save now, then training goes on.

    `until_at` is how long the hint holds; until then saves are asked for more often.
    """

    until_at: float | None = None
    request: str = ""


@dataclass(frozen=True, kw_only=True)
class CapacityLooked(AttemptEvent):
    """After the early save of `asked_at` it was looked where the gang would go; `outcome` says it in words."""

    asked_at: float
    outcome: str


@dataclass(frozen=True, kw_only=True)
class MovePlanned(AttemptEvent):
    """The machines must be left by `by_at`; `after_save`: as soon as one more save is committed.

    `alone`: only this machine is to be left, the others are kept for the next attempt.
    """

    instance: str
    by_at: float
    after_save: bool = False
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class MoveDue(AttemptEvent):
    """The time to leave the machines has come: save, stop, and go on elsewhere, all by `by_at`.

    With `instance` that machine alone is left.
    """

    by_at: float
    instance: str = ""
