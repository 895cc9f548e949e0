"""What the application needs from the world. One fake and one adapter each keep these promises, by one suite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.domain.events import Event
from holdfast.domain.job import Job
from holdfast.domain.ownership import FleetIntent, Instance, Node
from holdfast.domain.placement import Candidate
from job_contract.checkpoint_layout import Head, SavePointer
from job_contract.orders import Roster, Wait, WaitItem
from job_contract.spec import JobSpec

Clock = Callable[[], float]
"""Seconds since 1970 (UTC)."""


@dataclass(frozen=True)
class Bought:
    """EC2's answer to one call: the instances it gave, and what it said of those it did not."""

    instances: tuple[str, ...]
    instance_type: str = ""
    zone: str = ""
    errors: tuple[str, ...] = ()


class JobStore(Protocol):
    def create(self, job: Job, request: Mapping[str, Any], spec: JobSpec) -> bool:
        """Write row, request, spec and first orders in one transaction; False when the job exists."""

    def request(self, job_id: str) -> Mapping[str, Any] | None:
        """Return {body, body_sha256} of the accepted request."""

    def load(self, job_id: str) -> Job | None:
        """Return the row, read strongly."""

    def load_for(self, job_id: str, key: str) -> tuple[Job | None, bool]:
        """Return the row and whether the dedup key was seen, read strongly."""

    def save(self, before: Job, after: Job, event: Event, key: str) -> None:
        """Write dedup key, row and changed orders in one transaction. Raises Raced when any of it moved meanwhile."""

    def leave_notice(self, job_id: str, attempt: int, instance: str, deadline_at: float) -> None:
        """The notice lies where whoever writes the row next finds it."""

    def left_notices(self, job_id: str, attempt: int) -> Mapping[str, float]:
        """Return the deadlines of the notices left for this attempt, by instance, read strongly."""

    def put_wait(self, item: WaitItem) -> None: ...

    def waits(self, job_id: str, waits: Iterable[Wait]) -> list[WaitItem]:
        """Return those wait items that exist, read strongly."""

    def drop_wait(self, item: WaitItem) -> None:
        """Remove the item if it still holds this token."""

    def put_roster(self, roster: Roster) -> None: ...

    def open_intent(self, intent: FleetIntent) -> FleetIntent:
        """Write the intent unless the fleet has one; return the one that stands."""

    def close_intent(self, intent: FleetIntent) -> None: ...

    def intent(self, fleet: str) -> FleetIntent | None: ...

    def own(self, nodes: Sequence[Node]) -> None:
        """Write owner items that do not exist yet."""

    def node(self, instance: str) -> Node | None:
        """Return the owner item, read strongly."""

    def nodes(self, instances: Iterable[str]) -> list[Node]:
        """Return the owner items that exist, read strongly."""

    def update_node(self, node: Node) -> None:
        """Replace what the node reported of itself; never its owner."""

    def hold(self, instances: Iterable[str], until: float) -> None:
        """Members become held; others are left as they are."""

    def adopt(self, instance: str, *, fleet: str, attempt: int, now: float) -> bool:
        """A held node is a member of this fleet, its check-in forgotten; False when it is held no more."""

    def roster(self, job_id: str, roster_id: str) -> Roster | None: ...

    def mark_ending(self, instances: Iterable[str], job_id: str, now: float) -> None: ...

    def teams(self) -> list[str]: ...

    def waiting(self, team: str) -> list[str]:
        """Return ids of dispatchable jobs, best rank first; an index, so possibly stale."""

    def alive(self) -> list[str]:
        """Return ids of jobs with an open attempt; an index, so possibly stale."""

    def suspected(self, instance: str, now: float) -> float | None:
        """Remember that the instance looks like nobody's; return when an earlier sweep saw the same."""


class Workflow(Protocol):
    def start(self, job_id: str, attempt: int) -> None:
        """An execution of this attempt runs. Raises ExecutionOver when one has ended already."""

    def status(self, job_id: str, attempt: int) -> str | None:
        """Return RUNNING, SUCCEEDED, FAILED, TIMED_OUT or ABORTED, None when there is none."""

    def settle(self, token: str, answer: Mapping[str, Any]) -> None:
        """The waiting state got the answer; a dead token is no error."""


class Fleets(Protocol):
    def buy(self, fleet: str, job_id: str, candidate: Candidate) -> Bought:
        """One CreateFleet under the fleet's own client token; the same call again buys nothing more."""

    def of_fleet(self, fleet: str) -> list[Instance]: ...

    def of_job(self, job_id: str) -> list[Instance]: ...

    def of_stack(self) -> list[Instance]: ...

    def described(self, instances: Iterable[str]) -> list[Instance]:
        """Return what EC2 knows of these ids; ids that it does not know (any more, or yet) are left out."""

    def terminate(self, instances: Iterable[str]) -> None: ...


class Checkpoints(Protocol):
    def pointer(self, prefix: str, job: Job, save: str) -> SavePointer | None:
        """Return the committed save of this name, None when there is none that can be trusted."""

    def take_over(self, prefix: str, job: Job, attempt: int) -> Head:
        """The head names this attempt as its only writer; returns it. A damaged head is rewritten from the row."""


class Outbox(Protocol):
    def publish(self, news_id: str, detail_type: str, detail: Mapping[str, Any]) -> None: ...

    def result(self, dedup_id: str, group: str, message: Mapping[str, Any]) -> None: ...


class Ports(Protocol):
    """The whole world of the application; each port is made when first asked for."""

    @property
    def store(self) -> JobStore: ...
    @property
    def workflow(self) -> Workflow: ...
    @property
    def fleets(self) -> Fleets: ...
    @property
    def checkpoints(self) -> Checkpoints: ...
    @property
    def outbox(self) -> Outbox: ...
    @property
    def clock(self) -> Clock: ...
