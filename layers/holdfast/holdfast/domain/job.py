"""The job's row: everything that decides what happens next, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.domain.because import Because
from holdfast.domain.ledger import Reserved
from holdfast.domain.phase import ENDED, WAITING, Intent, Phase
from job_contract.checkpoint_layout import SavePointer, parse_save_name
from job_contract.orders import ResumeFrom

PRIORITY_STEP_S = 600
"""One point of priority is worth ten minutes of waiting."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The newest committed save, as the nodes reported it."""

    save: str
    manifest_sha256: str
    at: float
    parent: SavePointer | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        return save_order(self.save)


def save_order(save: str) -> tuple[int, int, int]:
    """Return attempt, number within it, step: grows with each save, a rolled-back step included."""
    name = parse_save_name(save)
    return (name.attempt, name.number, name.step)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Where a fleet was bought, and so where a missing node is looked for first."""

    instance_type: str
    zone: str
    market: str

    def __str__(self) -> str:
        return f"{self.instance_type} in {self.zone} ({self.market})"


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """Where the job would go if its machines were taken, as looked up `at`. Until `until` its own `pool` is asked last.

    Times are seconds since 1970 (UTC).
    """

    at: float
    until: float
    pool: Pool
    words: str


@dataclass(frozen=True, kw_only=True)
class BudgetWarned:
    """It was told that `cost_usd`, most of `budget_usd`, were spent `at` this time."""

    budget_usd: float
    cost_usd: float
    at: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job. Times are seconds since 1970 (UTC). `attempt` is a fence only: it grows by one on every dispatch.

    `nodes` are wanted, `gang` is how many the current attempt has. `held` are survivors of the last attempt, kept until
    `held_until` for the next one. `branch` grows when a job is tried again from an earlier save. `node_usd_h` is the
    price of a node-hour of its last fleet as known at purchase, None = unknown; `counted_usd` is what closed intervals
    have cost, `held_from` when the one of held machines began (see cost.py). `limit` is the class of a limit it passed.
    `leaving` are the only machines that a planned move leaves (none = all), `swaps` counts the moves that left a slow
    or doubtful one.
    """

    id: str
    team: str
    name: str
    priority: int
    submitted_at: float
    spec_id: str
    nodes: int
    market: str
    attempts_limit: int
    run_s: int
    wait_s: int
    min_nodes: int = 1
    budget_usd: float | None = None
    budget_warned: BudgetWarned | None = None
    report_s: float = 300.0
    keep: int = 3
    vcpus_per_node: int = 0
    gpus_per_node: int = 0
    finish_by_at: float | None = None

    phase: Phase = Phase.QUEUED
    phase_at: float
    intent: Intent = Intent.RUN
    stage: str = "waiting for a place"
    reason: str = ""

    version: int = 1
    news: int = 1
    generation: int = 1

    attempt: int = 0
    attempt_open: bool = False
    fleet: str | None = None
    bought_at: float | None = None
    pool: Pool | None = None
    gang: int = 0
    boot_s: float = 0.0
    roster_id: str | None = None
    roster_at: float | None = None
    last_roster_id: str | None = None
    held: tuple[str, ...] = ()
    held_until: float | None = None
    held_from: float | None = None
    resume_from: ResumeFrom | None = None
    doomed: tuple[str, ...] = ()
    deadline_at: float | None = None
    not_before: float = 0.0
    over_quota: bool = False
    reserved: Reserved | None = None
    waiting: Because | None = None

    save_asked_at: float | None = None
    asked_generation: int | None = None
    advised_until_at: float | None = None
    elsewhere: Elsewhere | None = None
    move_by_at: float | None = None
    move_after_save_at: float | None = None
    leaving: tuple[str, ...] = ()
    swaps: int = 0

    step_at_attempt_start: int = 0
    fruitless: int = 0
    fruitless_failure: str = ""

    step: int = 0
    saved: Saved | None = None
    failure: str | None = None
    limit: str | None = None
    charged: dict[str, int] = field(default_factory=dict)
    interruptions: int = 0
    forced_checkpoints: int = 0
    fell_back: int = 0
    lost_saves: int = 0
    slowdowns: int = 0
    node_seconds: float = 0.0
    node_usd_h: float | None = None
    counted_usd: float = 0.0
    unpriced_s: float = 0.0
    lost_steps: int = 0
    trained_s: float = 0.0
    branch: int = 0
    retry_from: SavePointer | None = None
    ended_at: float | None = None

    @property
    def dispatchable(self) -> bool:
        """True when a new attempt may be started, the time apart."""
        return self.phase in WAITING and not self.attempt_open and self.intent is Intent.RUN

    @property
    def durable_step(self) -> int:
        """The step of the newest committed save, 0 when there is none."""
        return parse_save_name(self.saved.save).step if self.saved else 0

    @property
    def over(self) -> bool:
        """True when the job has ended and its last attempt is closed: the result can be told."""
        return self.phase in ENDED and not self.attempt_open

    def trained_for_s(self, now: float) -> float:
        """Seconds that the job has had its ranks, all attempts together."""
        started = self.roster_at if self.attempt_open else None
        return self.trained_s + (now - started if started else 0.0)

    @property
    def yields(self) -> bool:
        """True when the job is to give its place up once its next save is committed."""
        return self.reserved is not None and self.reserved.yields_to is not None

    @property
    def rank(self) -> float:
        """Place in the team's queue, smallest first; static, so waiting alone moves a job forward."""
        return self.submitted_at - PRIORITY_STEP_S * self.priority
