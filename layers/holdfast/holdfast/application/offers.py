"""What a candidate is asked as: subnets with room, pools that are not cold, template, group, reservation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.application.ports import Ports
from holdfast.domain.catalogue import Room
from holdfast.domain.job import Pool as JobPool
from holdfast.domain.network_cards import MachineType, layout
from holdfast.domain.placement import (
    CLUSTER,
    EVERY_POOL,
    Candidate,
    Cold,
    Patience,
    Pool,
    coldest,
    pools_of,
    quota_pool,
)
from holdfast.domain.purchase import (
    Place,
    Purchase,
    Reservation,
    Subnet,
    Template,
    cluster_group_wanted,
    expectation,
)
from job_contract.checkpoint_layout import Head

LOOK_AGAIN_S = 300.0
"""Addresses, places in a reservation and reservations that are being made come back within minutes."""

QUOTA_S = 1800.0
COMING = frozenset({"scheduled", "pending", "assessing", "payment-pending", "delayed"})
"""States of a reservation that become `active`."""


class Stop(Exception):
    """This round of asking is over; `outcome` is what the run machine hears, None when it is a refusal."""

    def __init__(self, outcome: str | None = None) -> None:
        self.outcome = outcome


@dataclass(kw_only=True)
class Look:
    """What one look at AWS has learned: why nothing can be bought, which of it is for a quota, and until when."""

    reasons: list[str] = field(default_factory=list)
    for_quota: set[str] = field(default_factory=set)
    again_at: list[float] = field(default_factory=list)
    cooled_here: dict[Pool, Cold] = field(default_factory=dict)
    cold: dict[Pool, Cold] = field(default_factory=dict)
    subnets: Sequence[Subnet] = ()
    machines: Mapping[str, MachineType] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)

    def wait(self, reason: str, until: float, *, quota: bool = False) -> None:
        self.reasons.append(reason)
        self.again_at.append(until)
        if quota:
            self.for_quota.add(reason)

    @property
    def only_for_quota(self) -> bool:
        """True when nothing but vCPU quotas of the account stands in the way."""
        return bool(self.for_quota) and self.for_quota.issuperset(self.reasons)


@dataclass(kw_only=True)
class Round(Look):
    """One run of the launch step: whose it is, what it may still do, and what it has learned."""

    job_id: str
    attempt: int
    head: Head
    ends_at: float
    patience: Patience
    avoided: JobPool | None = None
    fatal: str | None = None
    base: Template | None = None
    image: str = ""


class Offers:
    """Turns candidates into purchases; `quotas_reached` counts those that no quota of the account allows."""

    def __init__(self, ports: Ports) -> None:
        self.ports = ports
        self.quotas: Mapping[tuple[str, str], Room] = {}
        self.quotas_reached = 0

    def read(self, asked: Sequence[Candidate], this: Look) -> None:
        """What EC2 says of subnets, types and reservations is known. Raises PurchaseRefused or Unavailable."""
        this.subnets = self.ports.fleets.subnets()
        this.machines = self.ports.fleets.machine_types(one.instance_type for one in asked)
        this.reservations = {
            one.reservation: self.ports.fleets.reservation(one.reservation) for one in asked if one.reservation
        }

    def purchase(self, fleet: str, candidate: Candidate, this: Round) -> Purchase | None:
        """Return the call to make; None, with the reason noted, when it would be refused or must not be made now."""
        open_now = self.open_now(candidate, this)
        if not open_now:
            return None
        machine = this.machines[candidate.instance_type]
        reservation = this.reservations.get(candidate.reservation)
        cluster = cluster_group_wanted(candidate, machine, reservation)
        this.base = this.base or self.ports.fleets.base_template()
        template = self._template(candidate, machine, reservation, this.base)
        places = tuple(
            Place(
                subnet=subnet.id,
                zone=subnet.zone,
                group=self.ports.fleets.group_for(this.job_id, subnet.zone) if cluster else _group_of(reservation),
            )
            for subnet in open_now
        )
        return Purchase(
            fleet=fleet,
            job=this.job_id,
            instance_type=candidate.instance_type,
            market=candidate.market,
            nodes=candidate.nodes,
            minimum=candidate.minimum,
            places=places,
            template=template,
            on_demand_nodes=candidate.on_demand_nodes,
            reservation=candidate.reservation,
            reservation_kind=reservation.kind.value if reservation else "",
            image=this.image,
            expected=expectation(machine, places, candidate.nodes, image=this.image),
        )

    def open_now(self, candidate: Candidate, this: Look) -> list[Subnet]:
        """Return the subnets in which the candidate may be asked now; none, with the reason noted, when it may not."""
        machine = this.machines.get(candidate.instance_type)
        if machine is None:
            this.reasons.append(f"EC2 knows no type {candidate.instance_type} in this region; name another")
            return []
        reservation = this.reservations.get(candidate.reservation)
        if reservation is not None and not self._bookable(reservation, candidate, this):
            return []
        cluster = cluster_group_wanted(candidate, machine, reservation)
        subnets = self._roomy(candidate, machine, this)
        open_now = self._not_cold(candidate, subnets, CLUSTER if cluster else "", this)
        return open_now if open_now and self._within_quota(candidate, machine, this) else []

    def _template(
        self, candidate: Candidate, machine: MachineType, reservation: Reservation | None, base: Template
    ) -> Template:
        # A node on its own has nobody to talk to over EFA.
        plain = machine if candidate.nodes > 1 else replace(machine, efas=0)
        return self.ports.fleets.template_for(base, plain, reservation)

    def _roomy(self, candidate: Candidate, machine: MachineType, this: Look) -> list[Subnet]:
        """Return the subnets of the candidate's zones that have an address for every interface that needs one."""
        mine = [subnet for subnet in this.subnets if subnet.zone in candidate.zones]
        if not mine:
            zones = ", ".join(candidate.zones) or "the zones that are allowed"
            this.reasons.append(f"no subnet of the stack lies in {zones}; add one or allow any")
        needed = candidate.nodes * sum(one.has_address for one in layout(machine))
        roomy = [subnet for subnet in mine if subnet.free is None or subnet.free >= needed]
        for subnet in mine:
            if subnet not in roomy:
                what = f"subnet {subnet.id} in {subnet.zone} has {subnet.free} free addresses, {needed} are needed"
                this.wait(what, self.ports.clock() + LOOK_AGAIN_S)
        return roomy

    def _not_cold(self, candidate: Candidate, subnets: Sequence[Subnet], group: str, this: Look) -> list[Subnet]:
        """Return the subnets whose pools may be asked now."""
        pools = {subnet.id: pools_of(candidate, subnet.zone, group) for subnet in subnets}
        this.cold |= self.ports.store.cold(pool for named in pools.values() for pool in named)
        open_now = []
        for subnet in subnets:
            closed = coldest(_asked(candidate, pools[subnet.id], this), this.cold, self.ports.clock())
            if closed is None:
                open_now.append(subnet)
            else:
                quota = closed.pool in {quota_pool(candidate.instance_type, one) for one in candidate.markets}
                told = f"{candidate.instance_type} in {subnet.zone} is left alone ({closed.code})"
                this.wait(told, closed.until, quota=quota)
        return open_now

    def _within_quota(self, candidate: Candidate, machine: MachineType, this: Look) -> bool:
        for market, nodes in candidate.shares.items():
            room, needed = self.quotas.get((machine.name, market)), machine.vcpus * nodes
            if room is None or needed <= room.free:
                continue
            # What our own jobs use comes back when one of them ends; more than the quota takes a person.
            too_large = needed > room.vcpus
            self.quotas_reached += too_large
            used = f", of which this stack uses {room.used}" if room.used else ""
            this.wait(
                f"{nodes} {machine.name} need {needed} vCPUs, the account may run {room.vcpus} ({market}){used}; "
                f"ask for more (Service Quotas, EC2, {room.code})",
                self.ports.clock() + (QUOTA_S if too_large else LOOK_AGAIN_S),
                quota=True,
            )
            return False
        return True

    def _bookable(self, reservation: Reservation, candidate: Candidate, this: Look) -> bool:
        """True when the reservation can be bought in now; the candidate of its zone says why not."""
        if (reservation.zone, reservation.instance_type) != (*candidate.zones, candidate.instance_type):
            return False
        now, name = self.ports.clock(), f"reservation {reservation.id}"
        if reservation.state in COMING or (reservation.starts_at or 0.0) > now:
            starts = max(reservation.starts_at or 0.0, now + LOOK_AGAIN_S / 5)
            this.wait(f"{name} is {reservation.state}, not active yet", starts)
            return False
        if reservation.state != "active":
            this.reasons.append(f"{name} is {reservation.state}; name another")
            return False
        if reservation.free < candidate.minimum:
            this.wait(f"{name} has {reservation.free} free places, {candidate.minimum} are needed", now + LOOK_AGAIN_S)
            return False
        return True


def misplaced(this: Look, asked: Sequence[Candidate]) -> list[str]:
    """Why a reservation fits no candidate at all."""
    zones = {subnet.zone for subnet in this.subnets}
    found = []
    for name, one in this.reservations.items():
        types = {candidate.instance_type for candidate in asked if candidate.reservation == name}
        if one.instance_type not in types:
            found.append(f"reservation {name} is for {one.instance_type}, the job wants {', '.join(sorted(types))}")
        if one.zone not in zones:
            found.append(f"reservation {name} lies in {one.zone}, where the stack has no subnet")
    return found


def _asked(candidate: Candidate, pools: Iterable[Pool], this: Look) -> list[Pool]:
    """The pools that count: that all nodes were refused a moment ago says nothing of fewer."""
    if not candidate.fewest:
        return list(pools)
    everywhere = {EVERY_POOL, *(quota_pool(candidate.instance_type, market) for market in candidate.markets)}
    return [pool for pool in pools if pool in everywhere or pool not in this.cooled_here]


def _group_of(reservation: Reservation | None) -> str:
    return reservation.group if reservation else ""
