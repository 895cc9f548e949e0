"""What the application needs from the world. One fake and one adapter each keep these promises, by one suite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.domain.baseline import Baseline, BaselineKey
from holdfast.domain.because import Because
from holdfast.domain.catalogue import Offers
from holdfast.domain.events import Event
from holdfast.domain.gate import Quarantined
from holdfast.domain.job import Job
from holdfast.domain.ledger import Ledger, Quota, QuotaChange, Quotas
from holdfast.domain.network_cards import MachineType
from holdfast.domain.notices import Trouble
from holdfast.domain.ownership import FleetIntent, Instance, Node
from holdfast.domain.placement import Cold, Patience, Pool
from holdfast.domain.purchase import Bought, Purchase, Reservation, Subnet, Template
from holdfast.domain.queueing import Waiter
from job_contract.checkpoint_layout import Head, Manifest, SavePointer
from job_contract.orders import Roster, Wait, WaitItem
from job_contract.spec import JobSpec

Clock = Callable[[], float]
"""Seconds since 1970 (UTC)."""

Pause = Callable[[float], None]
"""Returns so many seconds later."""


@dataclass(frozen=True, kw_only=True)
class OwnedGroup:
    """A placement group of the stack, and the job it was made for."""

    name: str
    job: str


@dataclass(frozen=True, kw_only=True)
class OwnedTemplate:
    """A launch template that was made for a type or a reservation."""

    id: str
    name: str
    created_at: float


class JobStore(Protocol):
    def create(self, job: Job, request: Mapping[str, Any], spec: JobSpec) -> bool:
        """Write row, request, spec and first orders in one transaction; False when the job exists.

        False too when another job was accepted under the `identity` of the request, where it has one.
        """

    def request(self, job_id: str) -> Mapping[str, Any] | None:
        """Return {body, body_sha256} of the accepted request, and its `identity` where it came with a dedup_id."""

    def holder(self, identity: str) -> Mapping[str, Any] | None:
        """Return {job, name} of the job that was accepted under this identity, read strongly."""

    def put_template(self, template: Mapping[str, Any]) -> bool:
        """Keep {name, version, body}; False when it was there. Raises Rejected when the version has another body."""

    def template(self, name: str, version: int | None) -> Mapping[str, Any] | None:
        """Return that version, the highest one for None."""

    def put_dataset(self, dataset: Mapping[str, Any]) -> bool:
        """Keep {name, version, uri, digest, ...}; False when it was there. Raises Rejected when it is another one."""

    def dataset(self, name: str, version: int) -> Mapping[str, Any] | None:
        """Return that version."""

    def load(self, job_id: str) -> Job | None:
        """Return the row, read strongly."""

    def history(self, job_id: str) -> list[dict[str, Any]]:
        """Return what happened to the job, oldest first."""

    def load_all(self, job_ids: Iterable[str]) -> list[Job]:
        """Return the rows that exist, read strongly, in any order."""

    def load_for(self, job_id: str, key: str) -> tuple[Job | None, bool]:
        """Return the row and whether the dedup key was seen, read strongly."""

    def save(self, before: Job, after: Job, event: Event, key: str, ledger: Ledger | None = None) -> None:
        """Write dedup key, row, changed orders, and the ledger where the job's place changed, in one transaction.

        `ledger` is what a decision rests on; without it the newest is read and moved. Raises Raced when any of it
        moved meanwhile.
        """

    def explain(self, job: Waiter, because: Because) -> bool:
        """Write why the job waits, and nothing else of the row; False when the row has moved on."""

    def ledger(self) -> Ledger:
        """Return the ledger, read strongly."""

    def put_ledger(self, before: Ledger, after: Ledger) -> None:
        """Replace the ledger. Raises Raced when it moved meanwhile."""

    def quotas(self) -> Quotas:
        """Return all quotas that say something, in one read."""

    def quota(self, kind: str, name: str) -> Quota:
        """Return the quota of a team or a market, read strongly; `kind` is team or market."""

    def put_quota(self, change: QuotaChange) -> bool:
        """Set the quota and write down the change, both or neither; False when this wish was obeyed before.

        Raises Raced when the quota moved meanwhile.
        """

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
        """Write the intent, unless the fleet has a closed one; return the one that stands."""

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

    def line(self, team: str) -> list[Waiter]:
        """Return the best placed dispatchable jobs of the team, one page; an index, so possibly stale."""

    def alive(self) -> list[str]:
        """Return ids of jobs with an open attempt; an index, so possibly stale."""

    def suspected(self, instance: str, now: float) -> float | None:
        """Remember that the instance looks like nobody's; return when an earlier sweep saw the same."""

    def claim(self, name: str, now: float, until_at: float) -> bool:
        """True for the one caller that takes the name until then; False for the others."""

    def expire(self, job_id: str, at: float | None) -> None:
        """All that the job has, its row apart, is forgotten at `at`; never when None."""

    def cold(self, pools: Iterable[Pool]) -> dict[Pool, Cold]:
        """Return what is remembered of these pools, read strongly; thawed ones may be among them."""

    def cool(self, cold: Cold) -> None: ...

    def warm(self, pools: Iterable[Pool]) -> None:
        """Forget what was remembered of pools that gave machines."""

    def patience(self, job_id: str) -> Patience: ...

    def keep_patience(self, job_id: str, patience: Patience, now: float) -> None: ...

    def baseline(self, key: BaselineKey) -> Baseline | None:
        """Return what steps of this kind usually take."""

    def keep_baseline(self, key: BaselineKey, baseline: Baseline) -> None:
        """Steps of this kind usually take that."""

    def baselines(self, model: str, instance_type: str) -> list[Baseline]:
        """Return those of all world sizes that the model was trained at on this type."""

    def quarantine(self, found: Quarantined) -> None: ...

    def quarantined(self, hosts: Iterable[str], now: float) -> dict[str, Quarantined]:
        """Return those hosts that are to be refused, read strongly."""


class Workflow(Protocol):
    def start(self, job_id: str, attempt: int) -> None:
        """An execution of this attempt runs. Raises ExecutionOver when one has ended already."""

    def status(self, job_id: str, attempt: int) -> str | None:
        """Return RUNNING, SUCCEEDED, FAILED, TIMED_OUT or ABORTED, None when there is none."""

    def settle(self, token: str, answer: Mapping[str, Any]) -> None:
        """The waiting state got the answer; a dead token is no error."""


class Fleets(Protocol):
    def subnets(self) -> list[Subnet]:
        """Return the subnets of the stack. This and the four below raise PurchaseRefused or Unavailable."""

    def machine_types(self, names: Iterable[str]) -> Mapping[str, MachineType]:
        """Return what EC2 says of the types; those it does not know are left out."""

    def base_template(self) -> Template:
        """Return the stack's launch template, version and image pinned."""

    def template_for(self, base: Template, machine: MachineType, reservation: Reservation | None) -> Template:
        """Return a template with every EFA of the type, in the reservation where one is given; it exists."""

    def group_for(self, job_id: str, zone: str) -> str:
        """Return the name of the job's cluster placement group in the zone; it exists."""

    def reservation(self, reservation: str) -> Reservation: ...

    def buy(self, purchase: Purchase) -> Bought:
        """One CreateFleet under the fleet's own client token; the same call again buys nothing more.

        Raises Unavailable when EC2 did not say what became of it.
        """

    def of_fleet(self, fleet: str) -> list[Instance]: ...

    def of_job(self, job_id: str) -> list[Instance]: ...

    def of_stack(self) -> list[Instance]: ...

    def described(self, instances: Iterable[str]) -> list[Instance]:
        """Return what EC2 knows of these ids; ids that it does not know (any more, or yet) are left out."""

    def troubled(self) -> list[Trouble]:
        """Return all running machines of the account that EC2 reports trouble of, complete or not at all."""

    def terminate(self, instances: Iterable[str]) -> None: ...

    def console_tail(self, instance: str) -> str:
        """Return the end of what the machine wrote to its console; why not, when EC2 gives none."""

    def groups(self) -> list[OwnedGroup]: ...

    def drop_group(self, name: str) -> bool:
        """The placement group is gone; False while instances still hold it."""

    def templates(self) -> list[OwnedTemplate]:
        """Return the launch templates that were made for types and reservations."""

    def drop_template(self, template: str) -> None: ...


class Checkpoints(Protocol):
    def pointer(self, prefix: str, job: Job, save: str) -> SavePointer | None:
        """Return the committed save of this name, None when there is none that can be trusted."""

    def take_over(self, prefix: str, job: Job, attempt: int) -> Head:
        """The head names this attempt as its only writer; returns it. A damaged head is rewritten from the row.

        Raises IdentityReused when the head is of an ended job that had the same identity.
        """

    def saves(self, prefix: str) -> list[str]:
        """Return the names of all saves in the bucket, committed or not."""

    def lineage(self, prefix: str, job: Job, most: int) -> list[Manifest]:
        """Return the head's save and its ancestors, newest first, up to `most` finite ones or one that cannot be
        trusted.
        """

    def forget(self, prefix: str, save: str) -> None:
        """Nothing of the save is left. At no moment is there a manifest without the data that it names, nor can a node
        commit the save again.
        """


class Outbox(Protocol):
    def publish(self, news_id: str, detail_type: str, detail: Mapping[str, Any]) -> None: ...

    def result(self, dedup_id: str, group: str, message: Mapping[str, Any]) -> None: ...


class Catalogue(Protocol):
    def offers(self, instance_types: Sequence[str], market: str) -> Offers:
        """Return what AWS says of these types; what may not be read is named in it. Raises Unavailable to try later."""


class RequestFiles(Protocol):
    def read(self, bucket: str, key: str, *, limit_bytes: int) -> bytes:
        """Return an object of a bucket that requests may lie in. Raises Rejected, for one that is too large also."""


class Reports(Protocol):
    def metrics(self, prefix: str) -> Iterable[Mapping[str, Any]]:
        """Return the lines that the job's nodes brought out: step, attempt, loss, tokens, seconds, at."""

    def put(self, key: str, kind: str, body: bytes) -> None:
        """The object is in the job's bucket, with this content type."""


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
    def catalogue(self) -> Catalogue: ...
    @property
    def request_files(self) -> RequestFiles: ...
    @property
    def reports(self) -> Reports: ...
    @property
    def outbox(self) -> Outbox: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def pause(self) -> Pause: ...
