"""Fakes of the ports, harsher than AWS: they race, conflict, lag and repeat when told to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.application.ports import Bought
from holdfast.domain.errors import ExecutionOver, Raced
from holdfast.domain.events import Event
from holdfast.domain.job import Job
from holdfast.domain.obligations import orders_for
from holdfast.domain.ownership import FleetIntent, Instance, Node, Ownership
from holdfast.domain.placement import Candidate
from job_contract.checkpoint_layout import Head, SavePointer
from job_contract.orders import Orders, Roster, Wait, WaitItem
from job_contract.spec import JobSpec
from tests.builders import NOW


@dataclass
class FakeClock:
    """Time stands still until it is moved."""

    now: float = NOW

    def __call__(self) -> float:
        return self.now

    def step(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeStore:
    """`races` saves fail with Raced before one goes through; `stale` hides rows from the indexes."""

    races: int = 0
    stale: set[str] = field(default_factory=set)
    rows: dict[str, Job] = field(default_factory=dict)
    requests: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    orders: dict[str, Orders] = field(default_factory=dict)
    events: dict[str, dict[str, Event]] = field(default_factory=dict)
    wait_items: dict[tuple[str, Wait], WaitItem] = field(default_factory=dict)
    rosters: dict[str, Roster] = field(default_factory=dict)
    intents: dict[str, FleetIntent] = field(default_factory=dict)
    owners: dict[str, Node] = field(default_factory=dict)
    suspects: dict[str, float] = field(default_factory=dict)
    notices: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    writes: int = 0

    def create(self, job: Job, request: Mapping[str, Any], spec: JobSpec) -> bool:
        if job.id in self.rows:
            return False
        self.rows[job.id], self.requests[job.id], self.events[job.id] = job, request, {}
        return True

    def request(self, job_id: str) -> Mapping[str, Any] | None:
        return self.requests.get(job_id)

    def load(self, job_id: str) -> Job | None:
        return self.rows.get(job_id)

    def load_for(self, job_id: str, key: str) -> tuple[Job | None, bool]:
        return self.rows.get(job_id), key in self.events.get(job_id, {})

    def save(self, before: Job, after: Job, event: Event, key: str) -> None:
        if self.races:
            self.races -= 1
            raise Raced("injected")
        if self.rows[after.id].version != before.version or key in self.events[after.id]:
            raise Raced("moved")
        self.writes += 1
        self.rows[after.id], self.events[after.id][key] = after, event
        if after.generation != before.generation:
            self.orders[after.id] = orders_for(after, event.at)

    def leave_notice(self, job_id: str, attempt: int, instance: str, deadline_at: float) -> None:
        self.notices.setdefault((job_id, attempt), {})[instance] = deadline_at

    def left_notices(self, job_id: str, attempt: int) -> Mapping[str, float]:
        return dict(self.notices.get((job_id, attempt), {}))

    def put_wait(self, item: WaitItem) -> None:
        self.wait_items[item.job, item.wait] = item

    def waits(self, job_id: str, waits: Iterable[Wait]) -> list[WaitItem]:
        return [self.wait_items[job_id, wait] for wait in waits if (job_id, wait) in self.wait_items]

    def drop_wait(self, item: WaitItem) -> None:
        if self.wait_items.get((item.job, item.wait)) == item:
            del self.wait_items[item.job, item.wait]

    def put_roster(self, roster: Roster) -> None:
        self.rosters[roster.roster_id] = roster

    def open_intent(self, intent: FleetIntent) -> FleetIntent:
        return self.intents.setdefault(intent.fleet, intent)

    def close_intent(self, intent: FleetIntent) -> None:
        self.intents[intent.fleet] = intent

    def intent(self, fleet: str) -> FleetIntent | None:
        return self.intents.get(fleet)

    def own(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self.owners.setdefault(node.instance, node)

    def node(self, instance: str) -> Node | None:
        return self.owners.get(instance)

    def nodes(self, instances: Iterable[str]) -> list[Node]:
        return [self.owners[instance] for instance in instances if instance in self.owners]

    def update_node(self, node: Node) -> None:
        known = self.owners[node.instance]
        self.owners[node.instance] = replace(node, state=known.state, since_at=known.since_at)
        self.writes += 1

    def hold(self, instances: Iterable[str], until: float) -> None:
        for instance in instances:
            if self.owners[instance].state is not Ownership.ENDING:
                self.owners[instance] = replace(self.owners[instance], state=Ownership.HELD, until=until)

    def adopt(self, instance: str, *, fleet: str, attempt: int, now: float) -> bool:
        node = self.owners[instance]
        if node.state is not Ownership.HELD and not (node.state is Ownership.MEMBER and node.attempt == attempt):
            return False
        self.owners[instance] = replace(
            node, state=Ownership.MEMBER, fleet=fleet, attempt=attempt, since_at=now, until=None, ready=None
        )
        return True

    def roster(self, job_id: str, roster_id: str) -> Roster | None:
        return self.rosters.get(roster_id)

    def mark_ending(self, instances: Iterable[str], job_id: str, now: float) -> None:
        for instance in instances:
            known = self.owners.get(instance) or Node(instance=instance, job=job_id, fleet="", attempt=0, since_at=now)
            since = known.since_at if known.state is Ownership.ENDING else now
            self.owners[instance] = replace(known, state=Ownership.ENDING, since_at=since)

    def teams(self) -> list[str]:
        return sorted({job.team for job in self.rows.values()})

    def waiting(self, team: str) -> list[str]:
        waiting = [job for job in self.rows.values() if job.team == team and job.dispatchable]
        return [job.id for job in sorted(waiting, key=lambda job: job.rank) if job.id not in self.stale]

    def alive(self) -> list[str]:
        return [job.id for job in self.rows.values() if job.attempt_open and job.id not in self.stale]

    def suspected(self, instance: str, now: float) -> float | None:
        known = self.suspects.get(instance)
        self.suspects.setdefault(instance, now)
        return known


@dataclass
class FakeWorkflow:
    """Executions by name, and every answer that a token got."""

    executions: dict[str, str] = field(default_factory=dict)
    settled: list[tuple[str, str]] = field(default_factory=list)

    def start(self, job_id: str, attempt: int) -> None:
        if self.executions.setdefault(f"{job_id}-{attempt}", "RUNNING") != "RUNNING":
            raise ExecutionOver(f"{job_id}-{attempt}")

    def status(self, job_id: str, attempt: int) -> str | None:
        return self.executions.get(f"{job_id}-{attempt}")

    def settle(self, token: str, answer: Mapping[str, Any]) -> None:
        self.settled.append((token, answer["outcome"]))


@dataclass
class FakeFleets:
    """`short` caps what a call brings; `hidden` ids are not listed yet; `refuses_to_die` ids stay running."""

    clock: FakeClock
    short: int | None = None
    calls: list[str] = field(default_factory=list)
    instances: dict[str, Instance] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    refuses_to_die: set[str] = field(default_factory=set)
    answers: dict[str, Bought] = field(default_factory=dict)

    def buy(self, fleet: str, job_id: str, candidate: Candidate) -> Bought:
        self.calls.append(fleet)
        if fleet in self.answers:
            return self.answers[fleet]
        given = candidate.nodes if self.short is None else self.short
        ids = tuple(f"i-{len(self.instances) + number:017x}" for number in range(given))
        for instance in ids:
            self.add(instance, job=job_id, fleet=fleet, instance_type=candidate.instance_type)
        errors = () if given == candidate.nodes else ("InsufficientInstanceCapacity",)
        self.answers[fleet] = Bought(ids, candidate.instance_type, "us-east-1a", errors)
        return self.answers[fleet]

    def add(self, instance: str, *, job: str | None, fleet: str | None, instance_type: str = "c7i.large") -> Instance:
        self.instances[instance] = Instance(
            id=instance,
            state="running",
            instance_type=instance_type,
            zone="us-east-1a",
            launched_at=self.clock(),
            job=job,
            fleet=fleet,
        )
        return self.instances[instance]

    def kill(self, instance: str) -> None:
        self.instances[instance] = replace(self.instances[instance], state="terminated")

    def of_fleet(self, fleet: str) -> list[Instance]:
        return [found for found in self._seen() if found.fleet == fleet]

    def of_job(self, job_id: str) -> list[Instance]:
        return [found for found in self._seen() if found.job == job_id]

    def of_stack(self) -> list[Instance]:
        return self._seen()

    def described(self, instances: Iterable[str]) -> list[Instance]:
        return [self.instances[instance] for instance in instances if instance in self.instances]

    def terminate(self, instances: Iterable[str]) -> None:
        for instance in instances:
            if instance not in self.refuses_to_die:
                self.kill(instance)

    @property
    def live(self) -> list[str]:
        return [found.id for found in self.instances.values() if found.live]

    def _seen(self) -> list[Instance]:
        return [found for found in self.instances.values() if found.id not in self.hidden]


@dataclass
class FakeCheckpoints:
    heads: dict[str, Head] = field(default_factory=dict)
    saves: dict[str, SavePointer] = field(default_factory=dict)

    def pointer(self, prefix: str, job: Job, save: str) -> SavePointer | None:
        return self.saves.get(save)

    def take_over(self, prefix: str, job: Job, attempt: int) -> Head:
        self.heads[prefix] = replace(self.heads.get(prefix, Head(job=job.id, attempt=attempt)), attempt=attempt)
        return self.heads[prefix]


@dataclass
class FakeOutbox:
    published: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    results: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def publish(self, news_id: str, detail_type: str, detail: Mapping[str, Any]) -> None:
        self.published.append((news_id, detail))

    def result(self, dedup_id: str, group: str, message: Mapping[str, Any]) -> None:
        self.results[dedup_id] = message


class FakePorts:
    """The whole world, in memory."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store, self.workflow = FakeStore(), FakeWorkflow()
        self.fleets, self.checkpoints, self.outbox = FakeFleets(self.clock), FakeCheckpoints(), FakeOutbox()

    def holding(self, job: Job) -> Job:
        """The store holds the job as it is."""
        self.store.rows[job.id] = job
        self.store.events.setdefault(job.id, {})
        return job

    def owning(self, job: Job, *instances: str) -> None:
        """The job's fleet is these machines, running, owned and bought."""
        fleet = job.fleet or f"{job.id}-{job.attempt}-0"
        for instance in instances:
            self.fleets.add(instance, job=job.id, fleet=fleet)
        self.store.own(
            [
                Node(instance=instance, job=job.id, fleet=fleet, attempt=job.attempt, since_at=self.clock())
                for instance in instances
            ]
        )
        self.store.close_intent(
            FleetIntent(
                fleet=fleet,
                job=job.id,
                attempt=job.attempt,
                candidate=0,
                nodes=len(instances),
                opened_at=self.clock(),
                instances=instances,
                closed_at=self.clock(),
                outcome="bought",
            )
        )
