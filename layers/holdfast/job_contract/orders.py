"""What the supervisor tells the nodes: one polled item a job (under 1 KB), and immutable items it points to.

Keys of the orders table (one string key, `key`):

    <job>/orders             Orders, level-triggered; generation only grows
    <job>/spec/<spec_id>     JobSpec, immutable
    <job>/roster/<roster_id> Roster, immutable
    <job>/wait/<wait>        WaitItem, the task token that the agents' heartbeats keep alive
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from job_contract.checkpoint_layout import SavePointer


class Action(StrEnum):
    """What the nodes of the job are to do now."""

    WAIT = "wait"
    RUN = "run"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_STOP = "checkpoint_stop"
    STOP = "stop"
    RELEASE = "release"


class Wait(StrEnum):
    """The waiting states of the run machine."""

    READY = "ready"
    TRAINING = "training"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class ResumeFrom:
    """The save to restore, and the one before it in case this one's manifest is damaged."""

    save: str
    manifest_sha256: str
    parent: SavePointer | None = None

    @property
    def pointer(self) -> SavePointer:
        return SavePointer(save=self.save, manifest_sha256=self.manifest_sha256)


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The polled item; times are seconds since 1970 (UTC), `doomed` are instance ids under notice."""

    job: str
    attempt: int
    generation: int
    action: Action
    spec_id: str
    issued_at: float
    deadline_at: float | None = None
    doomed: tuple[str, ...] = ()
    reason: str = ""
    roster_id: str | None = None
    resume_from: ResumeFrom | None = None


@dataclass(frozen=True, kw_only=True)
class RosterNode:
    node_rank: int
    instance: str
    ip: str


@dataclass(frozen=True, kw_only=True)
class Leader:
    """Where rank 0 listens: the address of node rank 0, and a port that its agent holds until the rank takes it."""

    ip: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Roster:
    """Who takes part in an attempt. Ranks are sticky: a survivor keeps its own, a replacement takes the vacant one."""

    job: str
    attempt: int
    roster_id: str
    nodes: tuple[RosterNode, ...]
    leader: Leader

    def rank_of(self, instance: str) -> int | None:
        """Return the node rank of the instance, None when it has no part in this attempt."""
        return next((node.node_rank for node in self.nodes if node.instance == instance), None)


@dataclass(frozen=True, kw_only=True)
class WaitItem:
    """The token of the state that waits. Agents only beat with it; settling it is the supervisor's."""

    job: str
    attempt: int
    wait: Wait
    token: str


def orders_key(job: str) -> str:
    return f"{job}/orders"


def spec_key(job: str, spec_id: str) -> str:
    return f"{job}/spec/{spec_id}"


def roster_key(job: str, roster_id: str) -> str:
    return f"{job}/roster/{roster_id}"


def wait_key(job: str, wait: Wait) -> str:
    return f"{job}/wait/{wait.value}"
