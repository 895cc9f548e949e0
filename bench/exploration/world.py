"""One job, its machines and everything under way, as a value: it can be copied, compared and stepped.

The application runs unchanged on the fakes of tests/application. Around it stands what AWS and the nodes do: executions
of the run machine, EC2, the bucket, and a gang of ranks that keeps the contract. Messages wait until they are
delivered, in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bench.exploration.activity import Activity, Serials
from holdfast.application.news import publish
from holdfast.domain.errors import ExecutionOver
from holdfast.domain.events import Event
from holdfast.domain.job import Job
from holdfast.domain.ledger import Ledger
from holdfast.domain.ownership import Instance
from holdfast.domain.purchase import Bought, Purchase
from job_contract.checkpoint_layout import Head, SavePointer, parse_save_name, save_name
from job_contract.orders import Wait
from tests.application.fakes import FakeClock, FakeFleets, FakeOutbox, FakeStore
from tests.builders import NOW, a_job

FOR_EVER = 1e12
JOB = a_job().id
PREFIX = "teams/research/jobs/demo-0123456789"
WAIT_OF = {"ready": Wait.READY, "watch": Wait.TRAINING, "again": Wait.TRAINING, "checkpoint": Wait.CHECKPOINT}
"""The states of the run machine that wait for a token."""

Message = tuple[Any, ...]


class Broken(Exception):
    """An invariant does not hold; `rule` is its sentence."""

    def __init__(self, rule: str, detail: str = "") -> None:
        super().__init__(f"{rule}: {detail}" if detail else rule)
        self.rule = rule


@dataclass(frozen=True)
class Budgets:
    """How much may still go wrong."""

    interruptions: int = 0
    cancels: int = 0
    lost: int = 0
    duplicated: int = 0
    crashes: int = 0
    sweeps: int = 0
    timeouts: int = 0
    refusals: int = 0
    aborts: int = 0

    def left(self) -> int:
        return sum(vars(self).values())

    def cover(self, other: Budgets) -> bool:
        """True when everything that may go wrong with the others may go wrong with these."""
        return all(mine >= its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True))


@dataclass(frozen=True)
class Gang:
    """The ranks of one attempt. `uploaded` is a save whose parts are in and whose commit is not."""

    attempt: int = 0
    nodes: tuple[str, ...] = ()
    step: int = 0
    saved: SavePointer | None = None
    numbered: int = 0
    uploaded: str | None = None
    stop: int = 0
    started: bool = False
    over: bool = True


@dataclass(frozen=True)
class Execution:
    """An execution of the run machine: its state by a short name, how often its function was called, and whether a
    token was asked to be left. `resting`: the function failed, and is called again after a pause.
    """

    state: str = "launch"
    tries: int = 0
    asked: bool = False
    resting: bool = False
    status: str = "RUNNING"

    def token(self, attempt: int) -> str:
        return f"{attempt}/{self.state}/{self.tries}"


class Fleets(FakeFleets):
    """EC2 that may show new machines late, and tells of every end."""

    def described(self, instances: Iterable[str]) -> list[Instance]:
        return [found for found in super().described(instances) if found.id not in self.hidden]


@dataclass(frozen=True)
class InFlight:
    """An activity between two calls, and what brought it: a message, a state of an execution, or nothing."""

    activity: Activity
    origin: Message

    def key(self) -> tuple[int, Message]:
        return (self.activity.number, self.origin)


@dataclass
class World:
    """Everything. `commits` are all committed saves in turn, `reported` is the newest whose report was acknowledged.

    `swept`: 2 when a sweep has looked and nothing has happened since it began, 1 while it looks.
    """

    store: FakeStore
    fleets: Fleets
    clock: FakeClock
    budgets: Budgets
    steps: int = 2
    executions: dict[int, Execution] = field(default_factory=dict)
    gang: Gang = field(default_factory=Gang)
    head: Head | None = None
    commits: tuple[SavePointer, ...] = ()
    listed: tuple[SavePointer, ...] = ()
    reported: SavePointer | None = None
    said: dict[str, int] = field(default_factory=dict)
    noticed: frozenset[str] = frozenset()
    told: frozenset[str] = frozenset()
    results: frozenset[str] = frozenset()
    swept: int = 0
    messages: tuple[Message, ...] = ()
    flights: tuple[InFlight, ...] = ()

    def copy(self) -> World:
        """A world that can be changed without this one noticing."""
        twin = object.__new__(World)
        twin.__dict__.update(self.__dict__)
        twin.clock = FakeClock(self.clock.now)
        store = twin.store = object.__new__(type(self.store))
        store.__dict__.update(
            {name: value.copy() if isinstance(value, dict) else value for name, value in vars(self.store).items()}
        )
        fleets = twin.fleets = object.__new__(type(self.fleets))
        fleets.__dict__.update(vars(self.fleets))
        fleets.clock, fleets.calls, fleets.purchases = twin.clock, [], []
        fleets.instances, fleets.answers = dict(self.fleets.instances), dict(self.fleets.answers)
        fleets.hidden = set(self.fleets.hidden)
        twin.executions, twin.said = dict(self.executions), dict(self.said)
        return twin

    def key(self, serials: Serials) -> int:
        """Equal for equal worlds, whatever led to them."""
        of, store = serials.of, self.store
        return hash(
            (
                of(self.row),
                frozenset(store.events[self.row.id]),
                tuple(of(orders) for orders in store.orders.values()),
                frozenset((wait, item.token) for (_, wait), item in store.wait_items.items()),
                frozenset(of(intent) for intent in store.intents.values()),
                frozenset(of(node) for node in store.owners.values()),
                frozenset(store.suspects),
                of(store.ledger_row),
                frozenset(store.colds.values()),
                frozenset(store.patiences.values()),
                tuple((known, *sorted(left.items())) for known, left in store.notices.items()),
                frozenset(of(instance) for instance in self.fleets.instances.values()),
                frozenset(self.fleets.hidden),
                frozenset(self.fleets.answers),
                self.clock.now,
                frozenset(self.executions.items()),
                self.gang,
                self.head,
                self.listed,
                self.reported,
                frozenset(self.said.items()),
                self.noticed,
                self.swept,
                self.told,
                self.messages,
                tuple(flight.key() for flight in self.flights),
            )
        )

    @property
    def row(self) -> Job:
        return self.store.rows[JOB]

    @property
    def live(self) -> list[str]:
        return [name for name, found in self.fleets.instances.items() if found.state == "running"]

    def alive(self, instance: str) -> bool:
        found = self.fleets.instances.get(instance)
        return found is not None and found.live

    def spend(self, name: str) -> None:
        self.budgets = replace(self.budgets, **{name: getattr(self.budgets, name) - 1})

    def send(self, *message: Any) -> None:
        self.messages = tuple(sorted((*self.messages, message), key=repr))

    def take(self, message: Message) -> None:
        left = list(self.messages)
        left.remove(message)
        self.messages = tuple(left)

    def fly(self, flights: Iterable[InFlight]) -> None:
        self.flights = tuple(sorted(flights, key=lambda flight: (flight.activity.number, repr(flight.origin))))

    # -- what a port answers ---------------------------------------------------------------------------------------

    def answer(self, port: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The call is done, and its answer (or what it raised) returned."""
        if port == "store" and method == "save":
            return self._save(*args)
        if port == "store" and method == "leave_notice":
            # Worlds share what they did not change.
            self.store.notices = {known: dict(left) for known, left in self.store.notices.items()}
        if method == "claim":
            # One job alone has no neighbours to warn.
            return False
        held = {"store": self.store, "fleets": self.fleets, "workflow": self, "checkpoints": self}[port]
        return getattr(held, method)(*args, **kwargs)

    def _save(self, before: Job, after: Job, event: Event, key: str, ledger: Ledger | None = None) -> None:
        # Worlds share what they did not change.
        self.store.events[after.id] = dict(self.store.events[after.id])
        self.store.save(before, after, event, key, ledger)
        outbox = FakeOutbox()
        publish(before, after, bucket="bucket", outbox=outbox)
        if (after.phase is not before.phase or after.over is not before.over) and not outbox.published:
            raise Broken(NEWS, f"{before.phase} -> {after.phase}, over {after.over}: nothing was told")
        for news, _ in outbox.published:
            if news in self.told:
                raise Broken(NEWS, f"{news} was used before; readers drop what comes under it")
            self.told |= {news}
        self.results |= set(outbox.results)
        if after.dispatchable and not before.dispatchable:
            self.send("dispatch")

    def start(self, job_id: str, attempt: int) -> None:
        del job_id
        execution = self.executions.setdefault(attempt, Execution())
        if execution.status != "RUNNING":
            raise ExecutionOver(str(attempt))

    def status(self, job_id: str, attempt: int) -> str | None:
        del job_id
        execution = self.executions.get(attempt)
        return execution.status if execution else None

    def settle(self, token: str, answer: Mapping[str, Any]) -> None:
        for attempt, execution in self.executions.items():
            if execution.state in WAIT_OF and execution.token(attempt) == token:
                self.executions[attempt] = next_state(execution, answer["outcome"])

    def saves(self, prefix: str) -> list[str]:
        """Nothing to delete, ever: retention is tried elsewhere, so the answer decides nothing here."""
        del prefix
        return []

    def take_over(self, prefix: str, job: Job, attempt: int) -> Head:
        del prefix
        head = self.head or Head(job=job.id, attempt=attempt)
        if head.attempt > attempt:
            raise Broken("attempts only grow", f"head is at {head.attempt}, {attempt} wants it")
        self.head = replace(head, attempt=attempt)
        return self.head


NEWS = "each change of phase and each end is told under an id of its own"


def next_state(execution: Execution, outcome: str) -> Execution:
    """The run machine after an answer: statemachines/run_attempt.asl.json, its Choice states folded in."""
    following = {
        ("launch", "launched"): "ready",
        ("launch", "again"): "launch",
        ("ready", "started"): "watch",
        ("watch", "interrupted"): "checkpoint",
        ("again", "interrupted"): "checkpoint",
        ("release", "done"): "close",
    }.get((execution.state, outcome), "release")
    return Execution(following)


class LateFleets(Fleets):
    """Hides what it sells until the world shows it."""

    def buy(self, purchase: Purchase) -> Bought:
        before = set(self.instances)
        bought = super().buy(purchase)
        self.hidden |= self.instances.keys() - before
        return bought


def a_world(budgets: Budgets, *, late: bool = False, steps: int = 2) -> World:
    """A job of two nodes that was just accepted. `late`: EC2 shows new machines only after a while."""
    clock = FakeClock(NOW)
    job = a_job(run_s=10**12, wait_s=10**12, report_s=FOR_EVER)
    store = FakeStore()
    store.rows[job.id], store.events[job.id] = job, {}
    world = World(store, (LateFleets if late else Fleets)(clock), clock, budgets, steps)
    world.send("dispatch")
    return world


def newest(saves: Iterable[SavePointer]) -> SavePointer | None:
    return max(saves, key=lambda save: _order(save.save), default=None)


def _order(save: str) -> tuple[int, int, int]:
    name = parse_save_name(save)
    return (name.attempt, name.number, name.step)


def a_save(step: int, attempt: int, number: int) -> SavePointer:
    return SavePointer(save=save_name(step, attempt, number), manifest_sha256=f"{attempt:032x}{number:032x}")
