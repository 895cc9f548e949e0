"""What the supervisor wants of this node: the polled item, with the spec and the roster that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from agent.cloud import CLOUD_ERRORS, OrdersTable, error_code
from agent.journal import Journal
from agent.threads import Loop
from job_contract.orders import Orders, Roster, orders_key, roster_key, spec_key
from job_contract.spec import JobSpec
from job_contract.version import decode


@dataclass(frozen=True)
class Seen:
    """Orders together with the immutable items they name."""

    orders: Orders
    spec: JobSpec
    roster: Roster | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Attempt and generation; grows with every order of the job."""
        return self.orders.attempt, self.orders.generation


class OrdersPoller:
    """Keeps the newest orders of the job. Spec and roster are read once an id; incomplete orders are not shown."""

    def __init__(
        self, table: OrdersTable, job: str, journal: Journal, *, interval_s: Callable[[], float], gpus: int = 0
    ) -> None:
        self._table, self._job, self._journal, self._interval_s = table, job, journal, interval_s
        self._ranks = max(1, gpus)
        self._spec: JobSpec | None = None
        self._roster: Roster | None = None
        self._latest: Seen | None = None
        self.loop = Loop("orders", self._round, journal)

    def latest(self) -> Seen | None:
        return self._latest

    def _round(self) -> float:
        try:
            self._latest = self.poll() or self._latest
        except CLOUD_ERRORS as error:
            self._journal.note("orders_unread", error=error_code(error))
        return self._interval_s()

    def poll(self) -> Seen | None:
        """Return the orders as they stand, None while there are none or an item they name is missing."""
        item = self._table.read(orders_key(self._job))
        if item is None:
            return None
        orders = decode(Orders, item)
        spec, roster = self._spec_of(orders), self._roster_of(orders)
        if spec is None or (orders.roster_id and roster is None):
            self._journal.note("orders_incomplete", spec_id=orders.spec_id, roster_id=orders.roster_id)
            return None
        return Seen(orders, spec, roster)

    def _spec_of(self, orders: Orders) -> JobSpec | None:
        if self._spec is None or self._spec.spec_id != orders.spec_id:
            item = self._table.read(spec_key(self._job, orders.spec_id))
            if item is None:
                return None
            spec = decode(JobSpec, item)
            self._spec = replace(spec, ranks_per_node=spec.ranks_per_node or self._ranks)
        return self._spec

    def _roster_of(self, orders: Orders) -> Roster | None:
        if orders.roster_id is None:
            return None
        if self._roster is None or self._roster.roster_id != orders.roster_id:
            item = self._table.read(roster_key(self._job, orders.roster_id))
            self._roster = item and decode(Roster, item)  # type: ignore[assignment]
        return self._roster
