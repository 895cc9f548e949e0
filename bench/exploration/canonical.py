"""What of a world can still make a difference. Worlds that agree in it have the same future, so one is enough.

Left out, and why nothing in the future rests on it:

* Events of an attempt that is closed. `advance` changes nothing for them, whether they were seen before or not; a save
  is remembered by its order alone.
* The version of the row, the number of its news, the generation of its orders and the version of the ledger, while no
  function is at work: they only grow, and are compared only with what a function has read. The ranks ask of a
  generation only whether there is one. That each grows as it must is judged at every step, before it is left out.
* The ids of news, likewise, as long as they count up as they should.
* A gang that is over, but for its attempt and the nodes that it had and that are still alive.
* Which attempt a node spoke of last, but for whether it is the one of the orders; nodes that are gone do not speak.
* What was uploaded and not committed, but for what the gang is about to commit: only the head says what is committed.
* The newest save that was acknowledged: the row has this one or a newer one in every world that is judged, and never
  an older one again.
* When machines that are gone had checked in, once their attempt is closed; notices for them; ended executions of older
  attempts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.exploration.activity import Serials
from bench.exploration.world import JOB, Gang, Message, World
from holdfast.domain.events import AttemptEvent, OrderHeard
from holdfast.domain.job import Job
from holdfast.domain.ownership import Node, Ownership
from job_contract import reports
from job_contract.orders import Orders


class Canonical:
    """Keys of worlds, equal for worlds with the same future."""

    def __init__(self, serials: Serials) -> None:
        self.serials = serials
        self._bare: dict[int, int] = {}
        self._messages: dict[Message, Message] = {}
        self._live_events: dict[tuple[int, int, bool], frozenset[str]] = {}
        self._kept: list[Any] = []

    def key(self, world: World) -> int:
        of, store, fleets, row = self.serials.of, world.store, world.fleets, world.row
        calm = not world.flights
        orders = store.orders.get(JOB)
        alive = {name for name, found in fleets.instances.items() if found.live}
        told: Any = world.told
        if len(told) == row.news - 1 and all(news.rpartition("#")[2].isdecimal() for news in told):
            told = None
        messages = world.messages
        if calm:
            messages = tuple(self._messages.get(one) or self._message(one) for one in messages)
        last = orders.attempt if orders else 0
        return hash(
            (
                calm,
                self._without_versions(row) if calm else of(row),
                self._events(store.events[row.id], row),
                of(orders) if not calm else orders and self._without_versions(orders),
                frozenset((wait, item.token) for (_, wait), item in store.wait_items.items()),
                frozenset(of(intent) for intent in store.intents.values()),
                frozenset(of(_node(node, row)) for node in store.owners.values()),
                frozenset(store.suspects),
                self._without_versions(store.ledger_row) if calm else of(store.ledger_row),
                frozenset(store.colds.values()),
                frozenset(store.patiences.values()),
                tuple((known, *sorted(left.items())) for known, left in store.notices.items()),
                frozenset(of(instance) for instance in fleets.instances.values()),
                frozenset(fleets.hidden),
                frozenset(fleets.answers),
                world.clock.now,
                frozenset(
                    (attempt, one)
                    for attempt, one in world.executions.items()
                    if attempt >= row.attempt or one.status == "RUNNING"
                ),
                _gang(world.gang, alive),
                world.head,
                frozenset(name for name, attempt in world.said.items() if name in alive and attempt == last),
                world.noticed & alive,
                world.swept,
                told,
                messages,
                tuple(flight.key() for flight in world.flights),
            )
        )

    def _without_versions(self, value: Any) -> int:
        serial = self.serials.of(value)
        bare = self._bare.get(serial)
        if bare is None:
            if isinstance(value, Job):
                value = replace(value, version=0, news=0, generation=0)
            elif isinstance(value, Orders):
                value = replace(value, generation=0)
            else:
                value = replace(value, version=0)
            bare = self._bare[serial] = self.serials.of(value)
        return bare

    def _events(self, events: dict[str, Any], row: Job) -> frozenset[str]:
        # A dict of events is replaced with each save, never changed: its id tells it as long as it is kept.
        known = self._live_events.get((id(events), row.attempt, row.attempt_open))
        if known is None:
            oldest = row.attempt if row.attempt_open else row.attempt + 1
            known = frozenset(
                f"heard {event.attempt}" if isinstance(event, OrderHeard) else name
                for name, event in events.items()
                if not isinstance(event, AttemptEvent) or event.attempt >= oldest
            )
            self._live_events[id(events), row.attempt, row.attempt_open] = known
            self._kept.append(events)
        return known

    def _message(self, message: Message) -> Message:
        bare = message
        if message[0] == "report":
            report = message[1]
            if isinstance(report, reports.Heard):
                bare = ("report", replace(report, generation=1))
            elif isinstance(report, reports.CheckpointSaved):
                bare = ("report", replace(report, answers_generation=min(1, report.answers_generation)))
        self._messages[message] = bare
        return bare


def _gang(gang: Gang, alive: set[str]) -> Gang:
    if gang.over:
        return Gang(attempt=gang.attempt, nodes=tuple(node for node in gang.nodes if node in alive))
    return replace(gang, stop=min(1, gang.stop)) if gang.stop > 1 else gang


def _node(node: Node, row: Job) -> Node:
    closed = node.attempt < row.attempt or not row.attempt_open
    if closed and node.state is Ownership.ENDING and node.ready is not None:
        return replace(node, ready=None)
    return node
