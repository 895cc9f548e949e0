"""What is in flight, who used how much, and what is held: one versioned item that every start and every end moves.

Usage is counted in share-seconds: a GPU counts 24 a second, where a job has none its vCPUs count 1 each, and where
neither is known a node counts 24. Used seconds lose half their weight every HALF_LIFE_S.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.domain.job import Job

HALF_LIFE_S = 7 * 86400.0
SHARES_PER_GPU = 24
"""A p5.48xlarge has 192 vCPUs and 8 GPUs."""

OVERHEAD_S = 1200.0
"""What an attempt takes besides its training: machines boot for up to 15 minutes, and are seen ending after it."""

FORGOTTEN_SHARES = SHARES_PER_GPU * 36.0
"""Less than this much use, 36 GPU-seconds, is dropped: teams that are gone leave the item."""

ALL_TEAMS = "*"
MOST_IN_FLIGHT = 1_500
"""A DynamoDB item holds 400 KB, and a job in flight takes up to 250 bytes of it."""


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """What a job holds of the quotas. `yields_to`: the job for which it saves and gives its place up."""

    vcpus: int = 0
    gpus: int = 0
    nodes: int = 0
    market: str
    yields_to: str | None = None

    @property
    def shares(self) -> int:
        """Share-seconds that a second of it costs."""
        return self.gpus * SHARES_PER_GPU or self.vcpus or self.nodes * SHARES_PER_GPU

    def of_nodes(self, nodes: int) -> Reserved | None:
        """Return what is left when only so many of the nodes are kept; None when none is."""
        if not nodes:
            return None
        part = nodes / self.nodes
        return replace(
            self, nodes=nodes, vcpus=math.ceil(self.vcpus * part), gpus=math.ceil(self.gpus * part), yields_to=None
        )


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """One job's place. `running` is False for machines that are held while their job waits."""

    job: str
    team: str
    priority: int
    attempt: int
    since_at: float
    ends_at: float
    running: bool
    reserved: Reserved


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Nothing of the scope (a team, or ALL_TEAMS) is started while this stands."""

    scope: str
    since_at: float
    by: str = ""


@dataclass(frozen=True, kw_only=True)
class Quota:
    """What a team or a market may have in flight; None = no limit of ours (EC2 may refuse, then the job parks).

    `weight` is a team's share of what there is. Jobs of a team from priority `preempt_from` up are urgent: they go
    before fair share, and may ask running jobs of lower priority to save and make room. Jobs of a team that is not
    `preemptible` are never asked. The three mean nothing for a market. `version`: how often it was set.
    """

    nodes: int | None = None
    vcpus: int | None = None
    gpus: int | None = None
    weight: float = 1.0
    preempt_from: int | None = None
    preemptible: bool = True
    version: int = field(default=0, compare=False)


NO_QUOTA = Quota()


@dataclass(frozen=True, kw_only=True)
class QuotaChange:
    """Who set a quota, when, from what to what. `kind` is team or market; `key` names the wish behind it."""

    kind: str
    name: str
    before: Quota
    after: Quota
    by: str
    at: float
    key: str


@dataclass(frozen=True, kw_only=True)
class Quotas:
    teams: Mapping[str, Quota] = field(default_factory=dict)
    markets: Mapping[str, Quota] = field(default_factory=dict)

    def team(self, name: str) -> Quota:
        return self.teams.get(name, NO_QUOTA)

    def market(self, name: str) -> Quota:
        return self.markets.get(name, NO_QUOTA)


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Version 0 is the ledger of a stack in which nothing ever started.

    `usage` is keyed `team/market`, true at `usage_at`. `freed` grows whenever a place or a hold was given up, so the
    table's stream can wake the dispatcher on it.
    """

    version: int = 0
    in_flight: tuple[InFlight, ...] = ()
    usage: Mapping[str, float] = field(default_factory=dict)
    usage_at: float = 0.0
    holds: tuple[Hold, ...] = ()
    freed: int = 0

    def accrued(self, now: float) -> Ledger:
        """Return the ledger with usage counted up to now; a `now` before the last count changes nothing.

        Exact whenever it is asked: what is in flight has not changed since the last write.
        """
        passed = now - self.usage_at
        if passed <= 0:
            return self
        kept = 0.5 ** (passed / HALF_LIFE_S)
        usage, rates = {key: used * kept for key, used in self.usage.items()}, self.rates()
        for key, rate in rates.items():
            usage[key] = usage.get(key, 0.0) + rate * (1 - kept) * HALF_LIFE_S / math.log(2)
        usage = {key: used for key, used in sorted(usage.items()) if used >= FORGOTTEN_SHARES or key in rates}
        return replace(self, usage=usage, usage_at=now)

    def rates(self) -> dict[str, int]:
        """Return the shares in flight by `team/market`."""
        rates: dict[str, int] = {}
        for place in self.in_flight:
            key = account(place.team, place.reserved.market)
            rates[key] = rates.get(key, 0) + place.reserved.shares
        return rates

    def moved(self, before: Job, after: Job, at: float) -> Ledger:
        """Return the ledger after the job's place changed from what it held before to what it holds after."""
        known = next((place for place in self.in_flight if place.job == after.id), None)
        places = [place for place in self.in_flight if place.job != after.id]
        if after.reserved is not None:
            places.append(_place(after, after.reserved, at, known))
        return replace(
            self.accrued(at),
            version=self.version + 1,
            in_flight=tuple(sorted(places, key=lambda place: place.job)),
            freed=self.freed + _freed(before.reserved, after.reserved),
        )

    def without(self, jobs: set[str], at: float) -> Ledger:
        """Return the ledger without the places of these jobs: the repair of a ledger that drifted."""
        left = tuple(place for place in self.in_flight if place.job not in jobs)
        return replace(self.accrued(at), version=self.version + 1, in_flight=left, freed=self.freed + 1)

    def held(self, scope: str, at: float, by: str) -> Ledger:
        """Return the ledger with a hold on the scope; the same object when it is held already."""
        if self.hold_on(scope) is not None:
            return self
        holds = (*self.holds, Hold(scope=scope, since_at=at, by=by))
        return replace(self, version=self.version + 1, holds=tuple(sorted(holds, key=lambda standing: standing.scope)))

    def unheld(self, scope: str) -> Ledger:
        """Return the ledger without the hold on the scope; the same object when there is none."""
        if self.hold_on(scope) is None:
            return self
        holds = tuple(standing for standing in self.holds if standing.scope != scope)
        return replace(self, version=self.version + 1, holds=holds, freed=self.freed + 1)

    def hold_on(self, scope: str) -> Hold | None:
        return next((standing for standing in self.holds if standing.scope == scope), None)


def account(team: str, market: str) -> str:
    """Return the key of a team's usage in a market."""
    return f"{team}/{market}"


def _place(job: Job, reserved: Reserved, at: float, known: InFlight | None) -> InFlight:
    same = known is not None and known.attempt == job.attempt
    return InFlight(
        job=job.id,
        team=job.team,
        priority=job.priority,
        attempt=job.attempt,
        since_at=known.since_at if known is not None and same else at,
        ends_at=known.ends_at if known is not None and same else at + job.run_s + OVERHEAD_S,
        running=job.attempt_open,
        reserved=reserved,
    )


def _freed(before: Reserved | None, after: Reserved | None) -> bool:
    if before is None:
        return False
    return after is None or after.nodes < before.nodes or after.market != before.market
