"""Who is started next, and why everybody else waits: one pure function over the waiting jobs and the ledger.

1. A team's jobs of one market stand in a line of their own: first those with machines held for them, then urgent ones
   (policy of the team), then a head (4), then by rank. The rank is submitted_at - 600 s x priority: waiting alone
   moves a job forward.
2. Whoever used least of a market goes first there: usage with decay, and what it has in flight counted for one hour
   ahead, over its weight. Urgent jobs go before all others, heads before all but those.
3. A job starts when what it asks for is free of every quota now, and stays free for its whole run limit once every
   promise to a job before it is kept.
4. The first job that a quota stops is the head of that quota's line. It is promised the earliest moment at which the
   run limits of what is in flight make room for it. A later job may pass it only if it ends before that moment, or
   leaves the head its room: so back-fill never delays the head beyond its promise. The head of a market's line stays
   its head until it starts, whoever used less meanwhile: else teams in turn would take what it waits for.
5. A job that no quota stops by what is in use, but that is larger than the quota, is no head: it blocks nobody.
6. An urgent head may ask running jobs of lower priority to save, commit, and give their places up: the fewest that
   make room for it, lowest priority first, youngest first, and nobody when all of them together would not do.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from holdfast.domain.because import Because, Code
from holdfast.domain.job import PRIORITY_STEP_S, Job
from holdfast.domain.ledger import (
    ALL_TEAMS,
    MOST_IN_FLIGHT,
    OVERHEAD_S,
    SHARES_PER_GPU,
    InFlight,
    Ledger,
    Quotas,
    Reserved,
    account,
)
from holdfast.domain.room import FOR_EVER, Room

AHEAD_S = 3600.0
"""What is in flight weighs as if it had run for so long already: two starts at once are not two firsts."""

OVERDUE_S = 60.0
"""A place whose run limit has passed is still in use, and may be free in a minute."""

MOST_STARTS = 25
"""A start is a transaction and a StartExecution, together up to 100 ms; a dispatch has 30 s."""

UNITS = ("gpus", "vcpus", "nodes")
NAMES = {"gpus": "GPUs", "vcpus": "vCPUs", "nodes": "nodes"}


@dataclass(frozen=True, kw_only=True)
class Waiter:
    """What the order needs to know of a waiting job: fields of the row that the index `waiting` carries."""

    id: str
    team: str
    market: str
    priority: int
    submitted_at: float
    nodes: int
    vcpus_per_node: int = 0
    gpus_per_node: int = 0
    run_s: int
    wait_s: int
    step: int = 0
    not_before: float = 0.0
    over_quota: bool = False
    failure: str | None = None
    attempt_open: bool = False
    reserved: Reserved | None = None
    waiting: Because | None = None
    version: int = 1

    @classmethod
    def of(cls, job: Job) -> Waiter:
        return cls(**{known.name: getattr(job, known.name) for known in fields(cls)})

    @property
    def rank(self) -> float:
        return self.submitted_at - PRIORITY_STEP_S * self.priority

    @property
    def wanted(self) -> Reserved:
        """What the job will hold when it is started."""
        return Reserved(vcpus=self.amount("vcpus"), gpus=self.amount("gpus"), nodes=self.nodes, market=self.market)

    def amount(self, unit: str) -> int:
        if unit == "nodes":
            return self.nodes
        return self.nodes * (self.gpus_per_node if unit == "gpus" else self.vcpus_per_node)


class Limit(NamedTuple):
    """One quota: `kind` is team or market."""

    kind: str
    name: str
    unit: str

    def __str__(self) -> str:
        return f"{NAMES[self.unit]} of {self.kind} {self.name}"


class Ask(NamedTuple):
    """So much of a limit: `more` from the start on, `kept` (held already) from when its hold would have ended."""

    limit: Limit
    more: int
    kept: int


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """The victim is to save, commit, and only then give its place to `by`."""

    victim: str
    attempt: int
    by: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Every waiting job is in `starts`, in that order, or in `because`. `promised`: when a head starts at latest."""

    starts: tuple[str, ...] = ()
    because: Mapping[str, Because] = field(default_factory=dict)
    preempt: tuple[Preemption, ...] = ()
    promised: Mapping[str, float] = field(default_factory=dict)


def order(
    waiting: Iterable[Waiter], *, ledger: Ledger, quotas: Quotas, now: float, most_starts: int = MOST_STARTS
) -> Decision:
    """Return who starts now, why each other job does not, and who is asked to make room.

    The same jobs in another order give the same decision.
    """
    return _Pass(ledger.accrued(now), quotas, now, most_starts).run(waiting)


class _Pass:
    """One look at everything that waits."""

    def __init__(self, ledger: Ledger, quotas: Quotas, now: float, most_starts: int) -> None:
        self.ledger, self.quotas, self.now, self.most_starts = ledger, quotas, now, most_starts
        self.rooms: dict[Limit, Room] = {}
        self.free_before: dict[Limit, int] = {}
        self.rates = ledger.rates()
        self.in_flight = {place.job: place for place in ledger.in_flight}
        self.by_name = _by_name(ledger.in_flight)
        self.starts: list[str] = []
        self.started_teams: dict[Limit, set[str]] = {}
        self.asks: dict[str, list[Ask]] = {}
        self.limits: dict[tuple[str, str], list[Limit]] = {}
        self.yielding = _yielding(ledger.in_flight)
        self.heads: dict[Limit, str] = {}
        self.keepers: dict[Limit, str] = {}
        self.promised: dict[str, float] = {}
        self.because: dict[str, Because] = {}
        self.preempt: tuple[Preemption, ...] = ()

    def run(self, waiting: Iterable[Waiter]) -> Decision:
        lines = self._lines(waiting)
        queue = [(self._key(line[-1]), key) for key, line in lines.items()]
        heapq.heapify(queue)
        while queue:
            _, key = heapq.heappop(queue)
            self._decide(lines[key].pop())
            if lines[key]:
                heapq.heappush(queue, (self._key(lines[key][-1]), key))
        return Decision(starts=tuple(self.starts), because=self.because, preempt=self.preempt, promised=self.promised)

    # -- the line --------------------------------------------------------------------------------------------------

    def _lines(self, waiting: Iterable[Waiter]) -> dict[tuple[str, str], list[Waiter]]:
        """Return those that may start at all by team and market, the first last; the others get their reason."""
        lines: dict[tuple[str, str], list[Waiter]] = {}
        for waiter in waiting:
            barred = self._barred(waiter)
            if barred is None:
                lines.setdefault((waiter.team, waiter.market), []).append(waiter)
            else:
                self.because[waiter.id] = barred
        for line in lines.values():
            line.sort(key=self._place_in_line, reverse=True)
        return lines

    def _place_in_line(self, waiter: Waiter) -> tuple[bool, bool, float, float, str]:
        return (waiter.reserved is None, not self._urgent(waiter), _head_since(waiter), waiter.rank, waiter.id)

    def _key(self, waiter: Waiter) -> tuple[bool, float, float, float, str]:
        urgent = self._urgent(waiter)
        standing = 0.0 if urgent else self._standing(waiter.team, waiter.market)
        return (not urgent, _head_since(waiter), standing, waiter.rank, waiter.id)

    def _standing(self, team: str, market: str) -> float:
        """Return what the team used of the market, over its weight: the least goes first."""
        key = account(team, market)
        used = self.ledger.usage.get(key, 0.0) + self.rates.get(key, 0) * AHEAD_S
        return used / self.quotas.team(team).weight

    def _urgent(self, waiter: Waiter) -> bool:
        floor = self.quotas.team(waiter.team).preempt_from
        return floor is not None and waiter.priority >= floor

    # -- one job ---------------------------------------------------------------------------------------------------

    def _barred(self, waiter: Waiter) -> Because | None:
        """Return why the job cannot start whatever is free, None when it can."""
        if waiter.attempt_open:
            return Because(
                code=Code.ATTEMPT_OPEN,
                sentence="the machines of its last attempt are still being released",
                unblock="the run's last step, or the sweep in its stead, closes the attempt",
            )
        for scope in (ALL_TEAMS, waiter.team):
            hold = self.ledger.hold_on(scope)
            if hold is not None:
                whose = "all teams" if scope == ALL_TEAMS else f"team {scope}"
                return Because(
                    code=Code.HELD,
                    sentence=f"dispatch is held for {whose}" + (f" by {hold.by}" if hold.by else ""),
                    unblock=f"unhold {'all' if scope == ALL_TEAMS else scope}",
                )
        if waiter.not_before > self.now:
            return _cold(waiter)
        return self._too_large(waiter)

    def _too_large(self, waiter: Waiter) -> Because | None:
        for limit, more, kept in self._asks(waiter):
            if more + kept > self._room(limit).limit:
                return Because(
                    code=Code.OVER_TEAM_QUOTA if limit.kind == "team" else Code.OVER_MARKET_QUOTA,
                    sentence=f"it needs {more + kept} {limit}, more than the quota of {self._room(limit).limit}",
                    unblock=f"ask for fewer nodes; or a higher quota: {_raised(limit)}",
                )
        return None

    def _decide(self, waiter: Waiter) -> None:
        if len(self.ledger.in_flight) + len(self.starts) >= MOST_IN_FLIGHT:
            self.because[waiter.id] = STACK_FULL
            return
        asks, end = self._asks(waiter), self.now + waiter.run_s + OVERHEAD_S
        held_until = self._held_until(waiter, end)
        stopped_by = next((ask.limit for ask in asks if not self._fits(ask, held_until, end)), None)
        if stopped_by is None and len(self.starts) < self.most_starts:
            self._start(waiter, asks, held_until, end)
            return
        if stopped_by is None:
            self.because[waiter.id] = NEXT_PASS
            return
        lacking = [ask for ask in asks if ask.more > self._room(ask.limit).now]
        headless = [ask.limit for ask in lacking if ask.limit not in self.heads]
        if headless:
            self._promise(waiter, asks, headless, held_until)
        self.because[waiter.id] = self._reason(waiter, lacking, stopped_by)

    def _start(self, waiter: Waiter, asks: Sequence[Ask], held_until: float, end: float) -> None:
        self.starts.append(waiter.id)
        key, held = account(waiter.team, waiter.market), waiter.reserved
        more = waiter.wanted.shares - (held.shares if held is not None else 0)
        self.rates[key] = self.rates.get(key, 0) + max(0, more)
        for ask in asks:
            self._take(ask, self.now, held_until, end)
            self.started_teams.setdefault(ask.limit, set()).add(waiter.team)

    def _promise(self, waiter: Waiter, asks: Sequence[Ask], limits: Sequence[Limit], held_until: float) -> None:
        """The job is the head of these limits; its room is kept from the earliest moment at which there is enough."""
        start, length = self.now, waiter.run_s + OVERHEAD_S
        while True:
            later = max(self._room(ask.limit).earliest(ask.more, length, start) for ask in asks)
            if later == start:
                break
            start = later
        self.promised[waiter.id] = start
        self.heads.update(dict.fromkeys(limits, waiter.id))
        if start != FOR_EVER:
            for ask in asks:
                self.keepers.setdefault(ask.limit, waiter.id)
                self._take(ask, start, max(start, held_until), start + length)
        if self._urgent(waiter):
            self._ask_for_room(waiter, [ask for ask in asks if ask.more > self._room(ask.limit).now])

    # -- room ------------------------------------------------------------------------------------------------------

    def _asks(self, waiter: Waiter) -> list[Ask]:
        """Return what the job needs of each quota that there is."""
        known = self.asks.get(waiter.id)
        if known is not None:
            return known
        held = waiter.reserved if waiter.reserved is not None and waiter.reserved.market == waiter.market else None
        asks = []
        for limit in self._limits(waiter.team, waiter.market):
            amount = waiter.amount(limit.unit)
            if amount:
                kept = min(amount, getattr(held, limit.unit)) if held is not None else 0
                asks.append(Ask(limit, amount - kept, kept))
        self.asks[waiter.id] = asks
        return asks

    def _limits(self, team: str, market: str) -> list[Limit]:
        """Return the quotas that a job of the team in the market is under."""
        if (team, market) not in self.limits:
            every = [Limit(kind, name, unit) for kind, name in (("team", team), ("market", market)) for unit in UNITS]
            self.limits[team, market] = [limit for limit in every if self._quota(limit) is not None]
        return self.limits[team, market]

    def _quota(self, limit: Limit) -> int | None:
        quota = self.quotas.team(limit.name) if limit.kind == "team" else self.quotas.market(limit.name)
        allowed: int | None = getattr(quota, limit.unit)
        return allowed

    def _room(self, limit: Limit) -> Room:
        if limit not in self.rooms:
            ends = [
                (max(place.ends_at, self.now + OVERDUE_S), getattr(place.reserved, limit.unit))
                for place in self.by_name.get((limit.kind, limit.name), ())
            ]
            self.rooms[limit] = Room(self._quota(limit) or 0, now=self.now, ends=ends)
            self.free_before[limit] = self.rooms[limit].now
        return self.rooms[limit]

    def _fits(self, ask: Ask, held_until: float, end: float) -> bool:
        room = self._room(ask.limit)
        if not ask.kept:
            return room.lowest(self.now, end) >= ask.more
        return room.lowest(self.now, held_until) >= ask.more and (
            held_until >= end or room.lowest(held_until, end) >= ask.more + ask.kept
        )

    def _take(self, ask: Ask, start: float, held_until: float, end: float) -> None:
        self._room(ask.limit).take(ask.more, start, end)
        self._room(ask.limit).take(ask.kept, held_until, end)

    def _held_until(self, waiter: Waiter, end: float) -> float:
        place = self.in_flight.get(waiter.id)
        return end if place is None else max(place.ends_at, self.now + OVERDUE_S)

    # -- reasons ---------------------------------------------------------------------------------------------------

    def _reason(self, waiter: Waiter, lacking: Sequence[Ask], stopped_by: Limit) -> Because:
        promised = self.promised.get(waiter.id)
        until, since = None if promised == FOR_EVER else promised, self._head_since(waiter, lacking)
        making_room = [move.victim for move in self.preempt if move.by == waiter.id]
        making_room += self.yielding.get(waiter.id, ())
        if making_room:
            return Because(
                code=Code.MAKING_ROOM,
                sentence=f"{_some(making_room)} will save and then make room for it",
                unblock="the commit of the saves; nothing is killed for it",
                until=until,
                head_since=since,
            )
        if not lacking:
            head = self.keepers.get(stopped_by, "the jobs before it")
            return Because(
                code=Code.HEAD_RESERVE,
                sentence=f"there is room now, but it would run into what is kept of {stopped_by} for {head}",
                unblock=f"{head} starts; or a run_s that ends before it; or a higher quota",
            )
        ask = lacking[0]
        rivals = sorted(self.started_teams.get(ask.limit, set()) - {waiter.team})
        if rivals and all(ask.more <= self.free_before[ask.limit] for ask in lacking):
            return Because(
                code=Code.FAIR_SHARE,
                sentence=f"team {rivals[0]} used less of market {waiter.market} and was first",
                unblock="nothing is needed: use counts less every day; or a higher quota",
                until=until,
                head_since=since,
            )
        room = self._room(ask.limit)
        ahead = self.heads.get(ask.limit, waiter.id)
        place = "it is the first in line for them" if ahead == waiter.id else f"{ahead} is the first in line for them"
        return Because(
            code=Code.TEAM_QUOTA if ask.limit.kind == "team" else Code.MARKET_QUOTA,
            sentence=f"it needs {ask.more} {ask.limit}, {max(0, room.now)} of {room.limit} are free; {place}",
            unblock=f"jobs in flight end; or a higher quota: {_raised(ask.limit)}",
            until=until,
            head_since=since,
        )

    def _head_since(self, waiter: Waiter, lacking: Sequence[Ask]) -> float | None:
        """Return since when the job is a head that stays one. One that its own team's quota stops is none: it would
        pass other teams for it."""
        if not lacking or any(ask.limit.kind == "team" for ask in lacking):
            return None
        if waiter.waiting is not None and waiter.waiting.head_since is not None:
            return waiter.waiting.head_since
        return self.now if waiter.id in self.promised else None

    # -- preemption ------------------------------------------------------------------------------------------------

    def _ask_for_room(self, waiter: Waiter, lacking: Sequence[Ask]) -> None:
        """The fewest running jobs that make room for the head are asked; those asked before count as coming."""
        missing = {ask.limit: ask.more - self._room(ask.limit).now for ask in lacking}
        for name in self.yielding.get(waiter.id, ()):
            _give(missing, self.in_flight[name])
        chosen: list[InFlight] = []
        for place in self._askable(waiter):
            if _short(missing) and _gives(missing, place):
                chosen.append(place)
                _give(missing, place)
        if _short(missing):
            return
        for place in list(chosen):
            if all(left + _amount(limit, place) <= 0 for limit, left in missing.items()):
                chosen.remove(place)
                _give(missing, place, -1)
        self.preempt += tuple(
            Preemption(victim=place.job, attempt=place.attempt, by=waiter.id)
            for place in sorted(chosen, key=lambda place: place.job)
        )

    def _askable(self, waiter: Waiter) -> list[InFlight]:
        """Return running jobs of lower priority that may be asked, lowest priority first, youngest first."""
        return sorted(
            (place for place in self.ledger.in_flight if self._may_ask(waiter, place)),
            key=lambda place: (place.priority, -place.since_at, place.job),
        )

    def _may_ask(self, waiter: Waiter, place: InFlight) -> bool:
        quota = self.quotas.team(place.team)
        urgent = quota.preempt_from is not None and place.priority >= quota.preempt_from
        return (
            place.running
            and place.reserved.yields_to is None
            and place.priority < waiter.priority
            and quota.preemptible
            and not urgent
        )


STACK_FULL = Because(
    code=Code.STACK_FULL,
    sentence=f"{MOST_IN_FLIGHT} jobs are in flight, the most that one stack keeps account of",
    unblock="jobs in flight end; or a second stack",
)

NEXT_PASS = Because(
    code=Code.NEXT_PASS,
    sentence="there is room for it, and one dispatch starts only so many jobs",
    unblock="nothing is needed: the next dispatch, within a minute",
)


def hours(usage: float) -> float:
    """Return share-seconds as GPU-hours, for people."""
    return usage / SHARES_PER_GPU / 3600


def _head_since(waiter: Waiter) -> float:
    because = waiter.waiting
    return FOR_EVER if because is None or because.head_since is None else because.head_since


def _cold(waiter: Waiter) -> Because:
    if waiter.failure == "capacity" and waiter.over_quota:
        return Because(
            code=Code.ACCOUNT_QUOTA,
            sentence="the account's vCPU quota cannot hold its machines; EC2 is not asked before `until`",
            unblock="ask for more (Service Quotas, EC2; `holdfast explain` names the quota), or allow another family "
            "or market in the request",
            until=waiter.not_before,
        )
    if waiter.failure == "capacity":
        return Because(
            code=Code.CAPACITY_COLD,
            sentence="EC2 had no such machines a moment ago; its pools are not asked again before `until`",
            unblock="time; or more instance types, zones or markets in the request",
            until=waiter.not_before,
        )
    return Because(
        code=Code.NOT_BEFORE,
        sentence="it is not to start before `until`",
        unblock="time",
        until=waiter.not_before,
    )


def _by_name(places: Iterable[InFlight]) -> dict[tuple[str, str], list[InFlight]]:
    found: dict[tuple[str, str], list[InFlight]] = {}
    for place in places:
        found.setdefault(("team", place.team), []).append(place)
        found.setdefault(("market", place.reserved.market), []).append(place)
    return found


def _yielding(places: Iterable[InFlight]) -> dict[str, list[str]]:
    """Return the jobs that were asked to make room and have not yet, by the one that they make it for."""
    found: dict[str, list[str]] = {}
    for place in places:
        if place.reserved.yields_to is not None:
            found.setdefault(place.reserved.yields_to, []).append(place.job)
    return {by: sorted(jobs) for by, jobs in found.items()}


def _amount(limit: Limit, place: InFlight) -> int:
    owner = place.team if limit.kind == "team" else place.reserved.market
    amount: int = getattr(place.reserved, limit.unit) if owner == limit.name else 0
    return amount


def _give(missing: dict[Limit, int], place: InFlight, sign: int = 1) -> None:
    for limit in missing:
        missing[limit] -= sign * _amount(limit, place)


def _gives(missing: Mapping[Limit, int], place: InFlight) -> bool:
    return any(left > 0 and _amount(limit, place) for limit, left in missing.items())


def _short(missing: Mapping[Limit, int]) -> bool:
    return any(left > 0 for left in missing.values())


def _raised(limit: Limit) -> str:
    return f"holdfast quota set --{limit.kind} {limit.name} --{limit.unit} N"


def _some(jobs: Sequence[str]) -> str:
    return ", ".join(jobs[:3]) + (f" and {len(jobs) - 3} more" if len(jobs) > 3 else "")
