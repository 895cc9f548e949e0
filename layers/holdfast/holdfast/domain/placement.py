"""Which machines to ask for, in which order, and how often.

A pool is (type, zone, market, in a cluster group or not). One that refused is cold for a time that grows with each
refusal in a row, and while it is cold no job asks it. A job may wait for days: its calls an hour are counted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.domain.network_cards import family

SPOT, ON_DEMAND, MIXED = "spot", "on_demand", "mixed"
ANY = "*"
CLUSTER = "cluster"

CALLS_AN_HOUR = 30
"""How many CreateFleet calls one job makes in any hour."""

HOUR_S = 3600.0
LONGEST_COOL_S = 900.0
"""A refusal after a refusal doubles the time that a pool is left alone, up to this."""

WHOLE_GANG_FIRST_S = 1800.0
"""How long a job that may start with fewer nodes waits for all of them."""

FORGET_S = 3600.0
"""A pool that was not asked for so long after it thawed starts anew."""

SPREAD_S = 30.0
"""Jobs that wait for one pool do not ask it in one moment."""

SOONEST_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One CreateFleet call: one instance type and market, one zone of those allowed, all nodes or none.

    `minimum` nodes of `nodes` are enough; the same unless the job goes on with fewer. A mixed gang has
    `on_demand_nodes` on-demand machines, the leader one of them, and spot ones for the rest. `reservation` is the id of
    a capacity reservation to buy in.
    """

    instance_type: str
    market: str
    nodes: int
    zones: tuple[str, ...] = ()
    fewest: int = 0
    on_demand_nodes: int = 0
    reservation: str = ""

    @property
    def minimum(self) -> int:
        return self.fewest or self.nodes

    @property
    def markets(self) -> tuple[str, ...]:
        """Markets whose pools must not be cold."""
        if self.reservation:
            return (reserved(self.reservation),)
        return (SPOT, ON_DEMAND) if self.market == MIXED else (self.market,)

    @property
    def shares(self) -> Mapping[str, int]:
        """How many nodes at least are bought on each market, reserved ones left out: quotas do not stop those."""
        if self.reservation:
            return {}
        if self.market == MIXED:
            return {ON_DEMAND: self.on_demand_nodes, SPOT: self.nodes - self.on_demand_nodes}
        return {self.market: self.minimum}

    @property
    def one_zone(self) -> bool:
        """True when EC2 cannot be left to choose among zones: its all-or-nothing holds for each market alone."""
        return self.market == MIXED or bool(self.reservation)


def reserved(reservation: str) -> str:
    """Return the market of a pool that is one reservation."""
    return f"reserved {reservation}"


def candidates(
    *,
    instance_types: Sequence[str],
    market: str,
    zones: Sequence[str],
    nodes: int,
    fewest: int | None = None,
    on_demand_floor: float | None = None,
    reservation: str | None = None,
) -> tuple[Candidate, ...]:
    """Return the candidates in the user's order of types. No zones = any zone of the stack's subnets.

    A reservation is asked first. After all that want every node come those that are content with `fewest`.
    """
    whole = tuple(
        Candidate(
            instance_type=kind,
            market=_market(market, on_demand_nodes(nodes, market, on_demand_floor), nodes),
            nodes=nodes,
            zones=tuple(zones),
            on_demand_nodes=on_demand_nodes(nodes, market, on_demand_floor),
        )
        for kind in instance_types
    )
    booked = tuple(replace(one, market=ON_DEMAND, on_demand_nodes=0, reservation=reservation or "") for one in whole)
    few = fewest if fewest and fewest < nodes else 0
    # A mixed answer cannot be asked for with a minimum of its own: the minima of EC2 hold for each market alone.
    elastic = tuple(replace(one, fewest=few) for one in whole if few and one.market != MIXED)
    return (*(booked if reservation else ()), *whole, *elastic)


def on_demand_nodes(nodes: int, market: str, floor: float | None) -> int:
    """Return how many nodes of a mixed gang are on demand: the floor's share, and always the leader."""
    return max(1, math.ceil(nodes * (floor or 0.0))) if market == MIXED else 0


def _market(market: str, on_demand: int, nodes: int) -> str:
    return ON_DEMAND if market == MIXED and on_demand >= nodes else market


def spread(asked: Sequence[Candidate], zones: Iterable[str]) -> tuple[Candidate, ...]:
    """Return the candidates with their zones filled in, those that need one zone once for each.

    Their places in the answer are their numbers: the same for the same request and subnets, whatever is cold or cheap.
    """
    known = tuple(sorted(set(zones)))
    found: list[Candidate] = []
    for one in asked:
        allowed = tuple(zone for zone in known if not one.zones or zone in one.zones)
        found += [replace(one, zones=(zone,)) for zone in allowed] if one.one_zone else [replace(one, zones=allowed)]
    return tuple(found)


Prices = Mapping[tuple[str, str, str], float]
"""US dollars an hour by (instance type, zone, market), ANY where a price holds in every zone; what is not in it is not
known."""


def ranked(asked: Sequence[Candidate]) -> list[tuple[int, Candidate]]:
    """Return (number, candidate) in the order to ask: reservations, whole gangs, then fewer nodes; each as given.

    The user's order of types stands whatever they cost: price says nothing of how long one is kept.
    """
    return sorted(enumerate(asked), key=lambda one: (not one[1].reservation, bool(one[1].fewest)))


def node_price(prices: Prices, instance_type: str, zone: str, markets: Iterable[str]) -> float | None:
    """Return what a node of the gang costs an hour, on average over `markets`, one entry a node; None = not known."""
    known = [prices.get((instance_type, zone, one), prices.get((instance_type, ANY, one))) for one in markets]
    told = [usd for usd in known if usd is not None]
    return round(sum(told) / len(told), 6) if told and len(told) == len(known) else None


def fleet_name(job: str, attempt: int, candidate: int) -> str:
    """Return the name under which a candidate is bought: tag, owner and idempotency token at once."""
    return f"{job}-{attempt}-{candidate}"


def jitter_of(text: str) -> float:
    """Return a number from 0 to 1 that is the same for the same text and spread evenly over texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32


# -- pools ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Where machines come from. `group` is CLUSTER in a cluster placement group: a refusal says little without one."""

    instance_type: str
    zone: str
    market: str
    group: str = ""

    @property
    def key(self) -> str:
        return "#".join((self.instance_type, self.zone, self.market, self.group or "-"))


EVERY_POOL = Pool(instance_type=ANY, zone=ANY, market=ANY)
"""Cold while EC2 throttles us."""


def quota_pool(instance_type: str, market: str) -> Pool:
    """Return what one vCPU quota covers: a family of types in one market, in every zone."""
    return Pool(instance_type=f"{family(instance_type)}{ANY}", zone=ANY, market=market)


@dataclass(frozen=True, kw_only=True)
class Cold:
    """A pool that is not asked before `until`; `misses` refusals in a row made it so, the last with `code`."""

    pool: Pool
    until: float
    misses: int
    code: str


def cooled(pool: Pool, before: Cold | None, *, code: str, base_s: float, now: float, jitter: float) -> Cold:
    """Return the pool cold for `base_s`, doubled for each refusal in a row, and up to half as much again by `jitter`.

    Two jobs that were refused in one moment are one refusal.
    """
    misses = 1
    if before is not None and now < before.until + FORGET_S:
        if now < before.until and code == before.code:
            return before
        misses = before.misses + (now >= before.until)
    grown = base_s * 2.0 ** min(misses - 1, 10)
    delay = min(grown, max(LONGEST_COOL_S, base_s))
    return Cold(pool=pool, until=round(now + delay * (1 + jitter / 2), 3), misses=misses, code=code)


def pools_of(candidate: Candidate, zone: str, group: str) -> list[Pool]:
    """Return the pools that must not be cold for the candidate to be asked in this zone."""
    exact = [
        Pool(instance_type=candidate.instance_type, zone=zone, market=market, group=group)
        for market in candidate.markets
    ]
    return [*exact, *(quota_pool(candidate.instance_type, market) for market in candidate.markets), EVERY_POOL]


def coldest(pools: Iterable[Pool], cold: Mapping[Pool, Cold], now: float) -> Cold | None:
    """Return the one that keeps the pools closed longest, None when all may be asked."""
    closed = [cold[pool] for pool in pools if pool in cold and cold[pool].until > now]
    return max(closed, key=lambda one: one.until, default=None)


# -- patience of one job ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Patience:
    """What a job's asking has cost: its calls within the last hour, and errors in a row that no wait explains."""

    asked_at: tuple[float, ...] = ()
    refused_since: float | None = None
    soon: int = 0
    unknown: int = 0

    def fewer_will_do(self, now: float) -> bool:
        """True once the whole gang was refused for so long that a job which can starts with fewer nodes."""
        return self.refused_since is not None and now - self.refused_since >= WHOLE_GANG_FIRST_S

    def asking(self, now: float) -> Patience:
        """Return it with one more call."""
        return replace(self, asked_at=(*(at for at in self.asked_at if at > now - HOUR_S), now))

    def free_at(self, now: float) -> float:
        """Return when the next call may be made: now, or when the oldest of a full hour's calls is an hour old."""
        recent = sorted(at for at in self.asked_at if at > now - HOUR_S)
        return now if len(recent) < CALLS_AN_HOUR else recent[-CALLS_AN_HOUR] + HOUR_S


def ask_again_at(now: float, thaws: Iterable[float], patience: Patience, jitter: float) -> float:
    """Return when a job may ask again: at the first thaw, within its calls an hour, a little apart from other jobs."""
    first = min(thaws, default=now + SOONEST_S)
    return round(max(first, patience.free_at(now), now + SOONEST_S) + jitter * SPREAD_S, 3)
