"""Fakes of the ports, harsher than AWS: they race, conflict, lag and repeat when told to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.application.ports import OwnedGroup, OwnedTemplate
from holdfast.domain.baseline import Baseline, BaselineKey
from holdfast.domain.because import Because
from holdfast.domain.catalogue import Offers
from holdfast.domain.checkpoints import of_an_older_life
from holdfast.domain.errors import ExecutionOver, IdentityReused, PurchaseRefused, Raced, Rejected, Unavailable
from holdfast.domain.events import Event
from holdfast.domain.gate import Quarantined
from holdfast.domain.job import Job
from holdfast.domain.ledger import NO_QUOTA, Ledger, Quota, QuotaChange, Quotas
from holdfast.domain.network_cards import Card, MachineType
from holdfast.domain.notices import Trouble
from holdfast.domain.obligations import orders_for
from holdfast.domain.ownership import FleetIntent, Instance, Node, Ownership
from holdfast.domain.placement import Cold, Patience, Pool
from holdfast.domain.purchase import (
    Bought,
    Part,
    Purchase,
    Refusal,
    RefusalKind,
    Reservation,
    Subnet,
    Template,
)
from holdfast.domain.queueing import Waiter
from holdfast.domain.records import replace
from job_contract.checkpoint_layout import Head, Manifest, SavePointer
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
    """`races` saves fail with Raced before one goes through, those of `deaf` rows always; `stale` hides rows from the
    indexes.

    `conflicts` writes of the ledger or a quota fail likewise; `lag` keeps what the index `waiting` showed of a job.
    """

    races: int = 0
    conflicts: int = 0
    lag: dict[str, Waiter] = field(default_factory=dict)
    ledger_row: Ledger = field(default_factory=Ledger)
    quota_items: dict[tuple[str, str], Quota] = field(default_factory=dict)
    quota_told: list[QuotaChange] = field(default_factory=list)
    stale: set[str] = field(default_factory=set)
    deaf: set[str] = field(default_factory=set)
    rows: dict[str, Job] = field(default_factory=dict)
    requests: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    identities: dict[Any, Mapping[str, Any]] = field(default_factory=dict)
    orders: dict[str, Orders] = field(default_factory=dict)
    events: dict[str, dict[str, Event]] = field(default_factory=dict)
    wait_items: dict[tuple[str, Wait], WaitItem] = field(default_factory=dict)
    rosters: dict[str, Roster] = field(default_factory=dict)
    intents: dict[str, FleetIntent] = field(default_factory=dict)
    owners: dict[str, Node] = field(default_factory=dict)
    suspects: dict[str, float] = field(default_factory=dict)
    claims: dict[str, float] = field(default_factory=dict)
    expiries: dict[str, float | None] = field(default_factory=dict)
    colds: dict[Pool, Cold] = field(default_factory=dict)
    patiences: dict[str, Patience] = field(default_factory=dict)
    bad_hosts: dict[str, Quarantined] = field(default_factory=dict)
    usual: dict[BaselineKey, Baseline] = field(default_factory=dict)
    notices: dict[tuple[str, int], dict[str, float]] = field(default_factory=dict)
    writes: int = 0
    templates: dict[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)
    known_datasets: dict[tuple[str, int], Mapping[str, Any]] = field(default_factory=dict)

    def create(self, job: Job, request: Mapping[str, Any], spec: JobSpec) -> bool:
        identity = request.get("identity")
        holder = self.identities.get(identity, {"job": job.id})
        if job.id in self.rows or holder["job"] != job.id:
            return False
        if identity:
            self.identities[identity] = {"job": job.id, "name": job.name}
        self.rows[job.id], self.requests[job.id], self.events[job.id] = job, request, {}
        return True

    def request(self, job_id: str) -> Mapping[str, Any] | None:
        return self.requests.get(job_id)

    def holder(self, identity: str) -> Mapping[str, Any] | None:
        return self.identities.get(identity)

    def put_template(self, template: Mapping[str, Any]) -> bool:
        key = template["name"], template["version"]
        new = key not in self.templates
        if self.templates.setdefault(key, template)["body"] != template["body"]:
            raise Rejected("template_version_taken", f"{key}")
        return new

    def template(self, name: str, version: int | None) -> Mapping[str, Any] | None:
        known = [number for known, number in self.templates if known == name]
        return self.templates.get((name, version if version is not None else max(known, default=0)))

    def put_dataset(self, dataset: Mapping[str, Any]) -> bool:
        key = dataset["name"], dataset["version"]
        new = key not in self.known_datasets
        known = self.known_datasets.setdefault(key, dataset)
        if any(known[part] != dataset[part] for part in ("uri", "digest")):
            raise Rejected("dataset_version_taken", f"{key}")
        return new

    def dataset(self, name: str, version: int) -> Mapping[str, Any] | None:
        return self.known_datasets.get((name, version))

    def load(self, job_id: str) -> Job | None:
        return self.rows.get(job_id)

    def load_all(self, job_ids: Iterable[str]) -> list[Job]:
        return [self.rows[one] for one in job_ids if one in self.rows]

    def load_for(self, job_id: str, key: str) -> tuple[Job | None, bool]:
        return self.rows.get(job_id), key in self.events.get(job_id, {})

    def save(self, before: Job, after: Job, event: Event, key: str, ledger: Ledger | None = None) -> None:
        if after.id in self.deaf:
            raise Raced("always")
        if self.races:
            self.races -= 1
            raise Raced("injected")
        if self.rows[after.id].version != before.version or key in self.events[after.id]:
            raise Raced("moved")
        if after.reserved != before.reserved:
            base = self.ledger_row if ledger is None else ledger
            self.put_ledger(base, base.moved(before, after, event.at))
        self.writes += 1
        self.rows[after.id], self.events[after.id][key] = after, event
        if after.generation != before.generation:
            self.orders[after.id] = orders_for(after, event.at)

    def explain(self, job: Waiter, because: Because) -> bool:
        row = self.rows[job.id]
        if row.version != job.version or not row.dispatchable:
            return False
        self.rows[job.id] = replace(row, waiting=because)
        self.writes += 1
        return True

    def ledger(self) -> Ledger:
        return self.ledger_row

    def put_ledger(self, before: Ledger, after: Ledger) -> None:
        if self.conflicts:
            self.conflicts -= 1
            raise Raced("injected")
        if before.version != self.ledger_row.version:
            raise Raced("the ledger moved")
        self.ledger_row = after
        self.writes += 1

    def quotas(self) -> Quotas:
        said = {scope: quota for scope, quota in self.quota_items.items() if quota != NO_QUOTA}
        teams, markets = ({name: said[of, name] for of, name in said if of == kind} for kind in ("team", "market"))
        return Quotas(teams=teams, markets=markets)

    def quota(self, kind: str, name: str) -> Quota:
        return self.quota_items.get((kind, name), NO_QUOTA)

    def put_quota(self, change: QuotaChange) -> bool:
        scope = change.kind, change.name
        if any((told.kind, told.name, told.key) == (*scope, change.key) for told in self.quota_told):
            return False
        if self.conflicts:
            self.conflicts -= 1
            raise Raced("injected")
        if self.quota(*scope).version != change.before.version:
            raise Raced("the quota moved")
        self.quota_items[scope] = change.after
        self.quota_told.append(change)
        return True

    def quota_changes(self) -> list[QuotaChange]:
        return self.quota_told

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
        known = self.intents.get(intent.fleet)
        if known is None or known.closed_at is None:
            self.intents[intent.fleet] = intent
        return self.intents[intent.fleet]

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

    def line(self, team: str) -> list[Waiter]:
        return [self.lag.get(job_id) or Waiter.of(self.rows[job_id]) for job_id in self.waiting(team)]

    def alive(self) -> list[str]:
        return [job.id for job in self.rows.values() if job.attempt_open and job.id not in self.stale]

    def suspected(self, instance: str, now: float) -> float | None:
        known = self.suspects.get(instance)
        self.suspects.setdefault(instance, now)
        return known

    def claim(self, name: str, now: float, until_at: float) -> bool:
        if self.claims.get(name, now) > now:
            return False
        self.claims[name] = until_at
        return True

    def expire(self, job_id: str, at: float | None) -> None:
        self.expiries[job_id] = at

    def cold(self, pools: Iterable[Pool]) -> dict[Pool, Cold]:
        return {pool: self.colds[pool] for pool in pools if pool in self.colds}

    def cool(self, cold: Cold) -> None:
        self.colds[cold.pool] = cold

    def warm(self, pools: Iterable[Pool]) -> None:
        for pool in pools:
            self.cool(Cold(pool=pool, until=0.0, misses=0, code=""))

    def patience(self, job_id: str) -> Patience:
        return self.patiences.get(job_id, Patience())

    def keep_patience(self, job_id: str, patience: Patience, now: float) -> None:
        self.patiences[job_id] = patience

    def baseline(self, key: BaselineKey) -> Baseline | None:
        return self.usual.get(key)

    def keep_baseline(self, key: BaselineKey, baseline: Baseline) -> None:
        self.usual[key] = baseline
        self.writes += 1

    def baselines(self, model: str, instance_type: str) -> list[Baseline]:
        return [one for key, one in self.usual.items() if (key.model, key.instance_type) == (model, instance_type)]

    def quarantine(self, found: Quarantined) -> None:
        self.bad_hosts[found.host] = found

    def quarantined(self, hosts: Iterable[str], now: float) -> dict[str, Quarantined]:
        known = [self.bad_hosts[host] for host in hosts if host in self.bad_hosts]
        return {one.host: one for one in known if one.until > now}


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
    """`short` caps what a call brings and `code` says why; `hidden` ids are not listed yet, `unseen` ids not even
    described; `refuses_to_die` ids stay running. `scripted` answers of the next calls come first."""

    clock: FakeClock
    short: int | None = None
    code: str = "InsufficientInstanceCapacity"
    kinds: dict[str, RefusalKind] = field(default_factory=dict)
    scripted: list[Bought] = field(default_factory=list)
    zones: tuple[str, ...] = ("us-east-1a",)
    free: dict[str, int] = field(default_factory=dict)
    efas: dict[str, int] = field(default_factory=dict)
    gpus: dict[str, int] = field(default_factory=dict)
    unknown_types: set[str] = field(default_factory=set)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    refused_first: Refusal | None = None
    calls: list[str] = field(default_factory=list)
    purchases: list[Purchase] = field(default_factory=list)
    instances: dict[str, Instance] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    unseen: set[str] = field(default_factory=set)
    refuses_to_die: set[str] = field(default_factory=set)
    answers: dict[str, Bought] = field(default_factory=dict)
    consoles: dict[str, str] = field(default_factory=dict)
    made_groups: dict[str, str] = field(default_factory=dict)
    groups_in_use: set[str] = field(default_factory=set)
    troubles: list[Trouble] = field(default_factory=list)
    made_templates: dict[str, float] = field(default_factory=dict)

    def subnets(self) -> list[Subnet]:
        if self.refused_first is not None:
            raise PurchaseRefused(self.refused_first)
        return [Subnet(id=f"subnet-{zone[-1]}", zone=zone, free=self.free.get(zone, 4096)) for zone in self.zones]

    def machine_types(self, names: Iterable[str]) -> dict[str, MachineType]:
        return {name: self._machine(name) for name in names if name not in self.unknown_types}

    def _machine(self, name: str) -> MachineType:
        efas = self.efas.get(name, 0)
        takes = ("interface", "efa", "efa-only") if efas else ("interface",)
        cards = tuple(Card(index=index, takes=takes, slots=2, gbps=100.0) for index in range(max(1, efas)))
        return MachineType(name=name, vcpus=2, gpus=self.gpus.get(name, 0), efas=efas, cards=cards)

    def base_template(self) -> Template:
        return Template(id="lt-base", version="1", image="ami-1")

    def template_for(self, base: Template, machine: MachineType, reservation: Reservation | None) -> Template:
        if not machine.efas and reservation is None:
            return base
        name = f"lt-{machine.name}"
        self.made_templates.setdefault(name, self.clock())
        return replace(base, id=name)

    def group_for(self, job_id: str, zone: str) -> str:
        self.made_groups[f"{job_id}-{zone}"] = job_id
        return f"{job_id}-{zone}"

    def reservation(self, reservation: str) -> Reservation:
        return self.reservations[reservation]

    def buy(self, purchase: Purchase) -> Bought:
        self.calls.append(purchase.fleet)
        self.purchases.append(purchase)
        if purchase.fleet in self.answers:
            return self.answers[purchase.fleet]
        self.answers[purchase.fleet] = self.scripted.pop(0) if self.scripted else self._usual(purchase)
        for part in self.answers[purchase.fleet].parts:
            for instance in part.instances:
                self.add(instance, job=purchase.job, fleet=purchase.fleet, instance_type=part.instance_type)
        return self.answers[purchase.fleet]

    def _usual(self, purchase: Purchase) -> Bought:
        given = purchase.nodes if self.short is None else min(self.short, purchase.nodes)
        place = purchase.places[0]
        part = self.part(purchase.instance_type, given, zone=place.zone, market=purchase.market)
        if given == purchase.nodes:
            return Bought(parts=(part,))
        kind = self.kinds.get(self.code, RefusalKind.POOL_COLD)
        return Bought(parts=(part,) if given else (), refusals=(Refusal(code=self.code, kind=kind),))

    def part(self, instance_type: str, count: int, *, zone: str = "us-east-1a", market: str = "spot") -> Part:
        """Some new instances, as an element of an answer."""
        self._made += count
        ids = tuple(f"i-{number:017x}" for number in range(self._made - count, self._made))
        return Part(instances=ids, instance_type=instance_type, zone=zone, market=market)

    _made: int = 0

    def console_tail(self, instance: str) -> str:
        return self.consoles.get(instance, "")

    def groups(self) -> list[OwnedGroup]:
        return [OwnedGroup(name=name, job=job) for name, job in self.made_groups.items()]

    def drop_group(self, name: str) -> bool:
        if name in self.groups_in_use:
            return False
        self.made_groups.pop(name, None)
        return True

    def templates(self) -> list[OwnedTemplate]:
        return [OwnedTemplate(id=name, name=name, created_at=at) for name, at in self.made_templates.items()]

    def drop_template(self, template: str) -> None:
        self.made_templates.pop(template, None)

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
        return [self.instances[one] for one in instances if one in self.instances and one not in self.unseen]

    def troubled(self) -> list[Trouble]:
        return [one for one in self.troubles if one.instance in self.live]

    def terminate(self, instances: Iterable[str]) -> None:
        for instance in instances:
            if instance not in self.refuses_to_die:
                self.kill(instance)

    @property
    def live(self) -> list[str]:
        return [found.id for found in self.instances.values() if found.live]

    def _seen(self) -> list[Instance]:
        return [found for found in self.instances.values() if found.id not in self.hidden | self.unseen]


@dataclass
class FakeCheckpoints:
    heads: dict[str, Head] = field(default_factory=dict)
    pointers: dict[str, SavePointer] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    line: list[Manifest] = field(default_factory=list)

    def pointer(self, prefix: str, job: Job, save: str) -> SavePointer | None:
        return self.pointers.get(save)

    def saves(self, prefix: str) -> list[str]:
        return sorted({*self.stored, *(manifest.save for manifest in self.line)})

    def lineage(self, prefix: str, job: Job, most: int) -> list[Manifest]:
        return self.line[:most]

    def forget(self, prefix: str, save: str) -> None:
        self.stored.discard(save)
        self.line = [manifest for manifest in self.line if manifest.save != save]

    def take_over(self, prefix: str, job: Job, attempt: int) -> Head:
        known = self.heads.get(prefix)
        if known is not None and of_an_older_life(known, job, attempt):
            raise IdentityReused(job.id)
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


@dataclass
class FakeCatalogue:
    """What AWS offers: nothing is known until a test says so. `busy` calls fail first."""

    known: Offers = field(default_factory=Offers)
    busy: int = 0

    def offers(self, instance_types: Sequence[str], market: str) -> Offers:
        if self.busy:
            self.busy -= 1
            raise Unavailable("throttled")
        return self.known


@dataclass
class FakeRequestFiles:
    objects: dict[tuple[str, str], bytes] = field(default_factory=dict)

    def read(self, bucket: str, key: str, *, limit_bytes: int) -> bytes:
        if (bucket, key) not in self.objects:
            raise Rejected("reference_not_found", f"s3://{bucket}/{key}")
        return self.objects[bucket, key]


class FakePorts:
    """The whole world, in memory."""

    def __init__(self) -> None:
        self.clock, self.pauses = FakeClock(), list[float]()
        self.store, self.workflow = FakeStore(), FakeWorkflow()
        self.catalogue, self.request_files = FakeCatalogue(), FakeRequestFiles()
        self.fleets, self.checkpoints, self.outbox = FakeFleets(self.clock), FakeCheckpoints(), FakeOutbox()

    def pause(self, seconds: float) -> None:
        """Time passes, for nobody else."""
        self.pauses.append(seconds)
        self.clock.step(seconds)

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
