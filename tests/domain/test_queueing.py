"""Who is started next, and why the others wait: rule by rule, then on lines and futures drawn by a seeded dice."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from holdfast.domain.because import Because, Code
from holdfast.domain.ledger import (
    ALL_TEAMS,
    HALF_LIFE_S,
    MOST_IN_FLIGHT,
    OVERHEAD_S,
    InFlight,
    Ledger,
    Quota,
    Quotas,
    Reserved,
    account,
)
from holdfast.domain.queueing import (
    UNITS,
    Decision,
    Waiter,
    hours,
    order,
)
from tests import builders as b

HOUR = 3600.0
NO_QUOTAS = Quotas()
SIXTEEN = Quotas(markets={"spot": Quota(gpus=16)})


def waits(name: str, *, gpus: int = 8, age_s: float = 0, **changes: Any) -> Waiter:
    """A waiting job of nodes with eight GPUs; `gpus` in all."""
    per_node = min(gpus, 8)
    waiter = Waiter(
        id=name, team="research", market="spot", priority=50, submitted_at=b.NOW - age_s, nodes=gpus // per_node,
        vcpus_per_node=24 * per_node, gpus_per_node=per_node, run_s=int(HOUR), wait_s=90_000,
    )  # fmt: skip
    return replace(waiter, **changes)


def runs(name: str, *, gpus: int = 8, left_s: float = HOUR, **changes: Any) -> InFlight:
    place = InFlight(
        job=name, team="other", priority=50, attempt=1, since_at=b.NOW - 60, ends_at=b.NOW + left_s, running=True,
        reserved=Reserved(vcpus=24 * gpus, gpus=gpus, nodes=max(1, gpus // 8), market="spot"),
    )  # fmt: skip
    return replace(place, **changes)


def ledger(*places: InFlight, **changes: Any) -> Ledger:
    return replace(Ledger(in_flight=places, usage_at=b.NOW), **changes)


def decide(*jobs: Waiter, ledger: Ledger = Ledger(), quotas: Quotas = NO_QUOTAS, **more: Any) -> Decision:
    return order(jobs, ledger=ledger, quotas=quotas, now=b.NOW, **more)


def code(decision: Decision, name: str) -> Code:
    return decision.because[name].code


# -- the line of a team ------------------------------------------------------------------------------------------------


def test_without_quotas_everything_starts_best_rank_first() -> None:
    assert decide(waits("b", age_s=1), waits("a"), waits("c", priority=90)).starts == ("c", "b", "a")


def test_ten_minutes_of_waiting_are_worth_one_point_of_priority() -> None:
    assert decide(waits("old", age_s=601), waits("new", priority=51)).starts == ("old", "new")
    assert decide(waits("old", age_s=599), waits("new", priority=51)).starts == ("new", "old")


def test_a_job_with_machines_held_for_it_goes_first_and_asks_only_for_the_rest() -> None:
    held = Reserved(vcpus=192, gpus=8, nodes=1, market="spot")
    survivor = waits("survivor", gpus=16, reserved=held)
    holding = ledger(runs("survivor", team="research", running=False, reserved=held))
    decision = decide(waits("older", age_s=9e5), survivor, ledger=holding, quotas=SIXTEEN)
    assert decision.starts == ("survivor",)
    assert code(decision, "older") is Code.MARKET_QUOTA


# -- between teams -----------------------------------------------------------------------------------------------------


def test_the_team_that_used_least_goes_first_and_the_other_is_told() -> None:
    used = ledger(usage={account("heavy", "spot"): 9e6, account("light", "spot"): 1e6})
    decision = decide(
        waits("h", team="heavy", age_s=9000, gpus=16), waits("l", team="light", gpus=16), ledger=used, quotas=SIXTEEN
    )
    assert decision.starts == ("l",)
    assert decision.because["h"].code is Code.FAIR_SHARE
    assert "light" in decision.because["h"].sentence


def test_a_weight_is_a_share() -> None:
    used = ledger(usage={account("heavy", "spot"): 3e6, account("light", "spot"): 2e6})
    quotas = replace(SIXTEEN, teams={"heavy": Quota(weight=2.0)})
    jobs = (waits("h", team="heavy", gpus=16), waits("l", team="light", gpus=16))
    assert decide(*jobs, ledger=used, quotas=quotas).starts == ("h",)


def test_what_starts_in_one_look_counts_at_once() -> None:
    jobs = [waits(f"{team}{n}", team=team, gpus=8, age_s=n) for team in ("a", "b") for n in range(4)]
    quotas = Quotas(markets={"spot": Quota(gpus=32)})
    started = decide(*jobs, quotas=quotas).starts
    assert Counter(name[0] for name in started) == {"a": 2, "b": 2}


def test_use_of_one_market_costs_no_place_in_another() -> None:
    used = ledger(usage={account("heavy", "on_demand"): 9e9, account("light", "spot"): 1.0})
    jobs = (waits("h", team="heavy", gpus=16), waits("l", team="light", gpus=16))
    assert decide(*jobs, ledger=used, quotas=SIXTEEN).starts == ("h",)


# -- why not -----------------------------------------------------------------------------------------------------------


def test_a_hold_on_all_or_on_a_team_stops_its_starts_and_no_others() -> None:
    jobs = (waits("a", team="a"), waits("b", team="b"))
    held = Ledger().held("a", b.NOW, "ann")
    decision = decide(*jobs, ledger=held)
    assert decision.starts == ("b",)
    assert decision.because["a"] == Because(
        code=Code.HELD, sentence="dispatch is held for team a by ann", unblock="unhold a"
    )
    assert decide(*jobs, ledger=held.held(ALL_TEAMS, b.NOW, "")).starts == ()


def test_a_job_whose_attempt_is_open_waits_for_its_closing() -> None:
    assert code(decide(waits("a", attempt_open=True)), "a") is Code.ATTEMPT_OPEN


@pytest.mark.parametrize(("failure", "expected"), [("capacity", Code.CAPACITY_COLD), ("gate", Code.NOT_BEFORE)])
def test_a_job_that_is_not_to_start_yet_says_until_when_and_holds_nobody_up(failure: str, expected: Code) -> None:
    cold = waits("cold", gpus=16, not_before=b.NOW + 60, failure=failure, age_s=9000)
    decision = decide(cold, waits("next", gpus=16), quotas=SIXTEEN)
    assert decision.starts == ("next",)
    assert (code(decision, "cold"), decision.because["cold"].until) == (expected, b.NOW + 60)


def test_what_is_larger_than_a_quota_says_so_and_holds_nobody_up() -> None:
    quotas = Quotas(markets={"spot": Quota(gpus=16)}, teams={"small": Quota(nodes=1)})
    huge, wide = waits("huge", gpus=24, age_s=9000), waits("wide", gpus=16, team="small", age_s=9000)
    decision = decide(huge, wide, waits("next", gpus=16), quotas=quotas)
    assert decision.starts == ("next",)
    assert decision.because["huge"].sentence == "it needs 24 GPUs of market spot, more than the quota of 16"
    assert code(decision, "huge") is Code.OVER_MARKET_QUOTA
    assert code(decision, "wide") is Code.OVER_TEAM_QUOTA


def test_a_team_at_its_quota_waits_and_others_go_on() -> None:
    quotas = Quotas(teams={"research": Quota(gpus=8)})
    full = ledger(runs("r", team="research", left_s=600))
    decision = decide(waits("mine"), waits("theirs", team="vision"), ledger=full, quotas=quotas)
    assert decision.starts == ("theirs",)
    because = decision.because["mine"]
    assert (because.code, because.until) == (Code.TEAM_QUOTA, b.NOW + 600)
    assert because.sentence == ("it needs 8 GPUs of team research, 0 of 8 are free; it is the first in line for them")


def test_one_look_starts_only_so_many() -> None:
    decision = decide(*(waits(f"j{n}", age_s=n) for n in range(5)), most_starts=2)
    assert decision.starts == ("j4", "j3")
    assert {because.code for because in decision.because.values()} == {Code.NEXT_PASS}


def test_a_stack_keeps_account_of_only_so_many() -> None:
    full = ledger(*(runs(f"r{n}") for n in range(MOST_IN_FLIGHT)))
    assert code(decide(waits("a"), ledger=full), "a") is Code.STACK_FULL


def test_shares_are_told_as_gpu_hours() -> None:
    assert hours(24 * 3600 * 8) == 8


# -- back-fill ---------------------------------------------------------------------------------------------------------


BUSY = ledger(runs("r", gpus=8, left_s=2 * HOUR))


def test_a_job_that_ends_before_the_head_can_start_passes_it() -> None:
    decision = decide(waits("head", gpus=16, age_s=9000), waits("short", run_s=600), ledger=BUSY, quotas=SIXTEEN)
    assert decision.starts == ("short",)
    assert decision.promised == {"head": b.NOW + 2 * HOUR}
    assert decision.because["head"].until == b.NOW + 2 * HOUR


def test_a_job_that_would_delay_the_head_does_not_pass_it() -> None:
    decision = decide(waits("head", gpus=16, age_s=9000), waits("long", run_s=86_400), ledger=BUSY, quotas=SIXTEEN)
    assert decision.starts == ()
    assert code(decision, "long") is Code.HEAD_RESERVE
    assert "head" in decision.because["long"].sentence


def test_a_long_job_passes_the_head_when_it_leaves_it_its_room() -> None:
    quotas = Quotas(markets={"spot": Quota(gpus=24)})
    busy = ledger(runs("r", gpus=16, left_s=2 * HOUR))
    jobs = (waits("head", gpus=16, age_s=9000), waits("long", run_s=86_400), waits("longer", run_s=86_401))
    assert decide(*jobs, ledger=busy, quotas=quotas).starts == ("long",)


def test_a_job_of_another_market_passes_the_head() -> None:
    jobs = (waits("head", gpus=16, age_s=9000), waits("long", run_s=86_400, market="on_demand"))
    assert decide(*jobs, ledger=BUSY, quotas=SIXTEEN).starts == ("long",)


def test_a_job_without_gpus_must_leave_the_head_its_vcpus() -> None:
    quotas = Quotas(markets={"spot": Quota(gpus=16, vcpus=384)})
    cpu = waits("cpu", run_s=86_400, gpus_per_node=0, vcpus_per_node=96)
    decision = decide(waits("head", gpus=16, age_s=9000), cpu, ledger=BUSY, quotas=quotas)
    assert decision.starts == ()
    assert code(decision, "cpu") is Code.HEAD_RESERVE


def test_a_head_stays_the_head_though_another_team_used_less_meanwhile() -> None:
    first = decide(waits("head", gpus=16, age_s=9000), ledger=BUSY, quotas=SIXTEEN)
    head = waits("head", gpus=16, age_s=9000, waiting=first.because["head"])
    meanwhile = replace(BUSY, usage={account("research", "spot"): 1e9})
    decision = decide(head, waits("rival", team="rival", run_s=86_400), ledger=meanwhile, quotas=SIXTEEN)
    assert decision.starts == ()
    assert decision.because["head"].head_since == b.NOW
    forgotten = decide(replace(head, waiting=None), waits("rival", team="rival"), ledger=meanwhile, quotas=SIXTEEN)
    assert forgotten.starts == ("rival",)


def test_a_job_that_its_own_team_stops_is_no_head_that_passes_other_teams() -> None:
    quotas = Quotas(teams={"research": Quota(gpus=8)}, markets={"spot": Quota(gpus=8)})
    full = ledger(runs("r", team="research"))
    assert decide(waits("mine"), ledger=full, quotas=quotas).because["mine"].head_since is None


def test_what_outlived_its_run_limit_is_still_in_use() -> None:
    late = ledger(runs("r", gpus=16, left_s=-600))
    decision = decide(waits("head", gpus=16, age_s=9000), waits("short", run_s=600), ledger=late, quotas=SIXTEEN)
    assert decision.starts == ()
    assert b.NOW < decision.promised["head"] < b.NOW + 600


# -- preemption --------------------------------------------------------------------------------------------------------


URGENT = Quotas(
    markets={"spot": Quota(gpus=32)}, teams={"research": Quota(preempt_from=90), "safe": Quota(preemptible=False)}
)


def running_at(*priorities: int, **changes: Any) -> Ledger:
    return ledger(
        *(runs(f"p{priority}", priority=priority, since_at=b.NOW - priority, **changes) for priority in priorities)
    )


def test_nobody_makes_room_unless_policy_says_so() -> None:
    full = running_at(10, 20, 30, 40)
    quotas = replace(URGENT, teams={})
    assert decide(waits("u", priority=95), ledger=full, quotas=quotas).preempt == ()
    assert decide(waits("u", priority=89), ledger=full, quotas=URGENT).preempt == ()


def test_the_fewest_of_the_lowest_priority_are_asked() -> None:
    full = running_at(40, 10, 30, 20)
    decision = decide(waits("u", priority=95, gpus=16), ledger=full, quotas=URGENT)
    assert [(move.victim, move.by) for move in decision.preempt] == [("p10", "u"), ("p20", "u")]
    assert decision.because["u"].code is Code.MAKING_ROOM
    assert decision.starts == ()


def test_one_large_job_is_asked_rather_than_it_and_a_small_one() -> None:
    full = ledger(runs("small", gpus=8, priority=1), runs("large", gpus=24, priority=2))
    decision = decide(waits("u", priority=95, gpus=24), ledger=full, quotas=URGENT)
    assert [move.victim for move in decision.preempt] == ["large"]


def test_nobody_is_asked_in_vain_nor_twice() -> None:
    half = running_at(99, 98, 20, 30)
    assert decide(waits("u", priority=95, gpus=24), ledger=half, quotas=URGENT).preempt == ()
    yielding = ledger(runs("v", gpus=32, priority=1, reserved=Reserved(gpus=32, nodes=4, market="spot", yields_to="u")))
    decision = decide(waits("u", priority=95), ledger=yielding, quotas=URGENT)
    assert decision.preempt == ()
    assert decision.because["u"].code is Code.MAKING_ROOM


@pytest.mark.parametrize(
    "changes", [{"team": "safe"}, {"running": False}, {"reserved": Reserved(gpus=8, nodes=1, market="on_demand")}],
    ids=["a team that is not preemptible", "held machines", "another market"],
)  # fmt: skip
def test_who_is_never_asked(changes: dict[str, Any]) -> None:
    full = ledger(runs("full", gpus=32, priority=95), runs("spared", priority=1, **changes))
    assert decide(waits("u", priority=95), ledger=full, quotas=URGENT).preempt == ()


def test_the_room_that_was_made_goes_to_the_one_it_was_made_for() -> None:
    quotas = Quotas(markets={"spot": Quota(gpus=8)}, teams={"research": Quota(preempt_from=90)})
    used = ledger(usage={account("research", "spot"): 9e9})
    jobs = (waits("u", priority=95), waits("victim", team="other", priority=10, age_s=9e5))
    assert decide(*jobs, ledger=used, quotas=quotas).starts == ("u",)


# -- properties, on lines drawn by a dice ------------------------------------------------------------------------------


def a_line(dice: random.Random, jobs: int) -> list[Waiter]:
    return [
        waits(
            f"j{n:03d}", gpus=dice.choice([1, 2, 4, 8, 16, 32]), team=f"team-{dice.randint(0, 4)}",
            priority=dice.randint(0, 100), age_s=dice.randint(0, 200_000), run_s=dice.randint(60, 20_000),
            market=dice.choice(["spot", "on_demand"]), not_before=b.NOW + dice.choice([-60, -60, -60, 60]),
        )
        for n in range(jobs)
    ]  # fmt: skip


def a_ledger(dice: random.Random) -> Ledger:
    places = [
        runs(
            f"r{n:02d}", gpus=dice.choice([1, 2, 4, 8, 16]), team=f"team-{dice.randint(0, 4)}",
            left_s=dice.randint(-100, 20_000), priority=dice.randint(0, 100),
        )
        for n in range(dice.randint(0, 12))
    ]  # fmt: skip
    usage = {account(f"team-{n}", "spot"): dice.random() * 1e8 for n in range(5)}
    return ledger(*places, usage=usage)


def some_quotas(dice: random.Random) -> Quotas:
    teams = {f"team-{n}": Quota(gpus=dice.choice([None, 16, 32, 64]), weight=dice.choice([1.0, 2.0])) for n in range(5)}
    if dice.random() < 0.5:
        teams["team-0"] = replace(teams["team-0"], preempt_from=80)
    return Quotas(
        teams=teams, markets={"spot": Quota(gpus=dice.choice([32, 64, 96]), vcpus=2304), "on_demand": Quota(nodes=4)}
    )


def drawn(seed: int, jobs: int = 40) -> tuple[random.Random, list[Waiter], Ledger, Quotas]:
    dice = random.Random(seed)
    return dice, a_line(dice, jobs), a_ledger(dice), some_quotas(dice)


@pytest.mark.parametrize("seed", range(60))
def test_every_job_is_started_or_told_why_not_whatever_order_they_come_in(seed: int) -> None:
    dice, jobs, book, quotas = drawn(seed)
    first = decide(*jobs, ledger=book, quotas=quotas)
    assert {*first.starts} | {*first.because} == {job.id for job in jobs}
    assert not {*first.starts} & {*first.because}
    assert all(because.sentence and because.unblock for because in first.because.values())
    places = list(book.in_flight)
    for _ in range(3):
        dice.shuffle(jobs)
        dice.shuffle(places)
        assert decide(*jobs, ledger=replace(book, in_flight=tuple(places)), quotas=quotas) == first


def in_use(places: list[Reserved | tuple[str, Reserved]], quotas: Quotas) -> list[str]:
    """Return the quotas that these places exceed."""
    used: Counter[tuple[str, str, str]] = Counter()
    for team, reserved in places:  # type: ignore[misc]
        for unit in UNITS:
            used["teams", team, unit] += getattr(reserved, unit)
            used["markets", reserved.market, unit] += getattr(reserved, unit)
    return [
        f"{kind} {name} {unit}"
        for (kind, name, unit), amount in used.items()
        if (limit := getattr(getattr(quotas, kind).get(name, Quota()), unit)) is not None and amount > limit
    ]


@pytest.mark.parametrize("seed", range(100))
def test_no_decision_exceeds_a_quota_that_was_kept(seed: int) -> None:
    _, jobs, book, quotas = drawn(seed)
    before = [(place.team, place.reserved) for place in book.in_flight]
    started = {*decide(*jobs, ledger=book, quotas=quotas).starts}
    after = before + [(job.team, job.wanted) for job in jobs if job.id in started]
    assert {*in_use(after, quotas)} <= {*in_use(before, quotas)}


@pytest.mark.parametrize("seed", range(100))
def test_no_start_behind_a_head_delays_its_promise(seed: int) -> None:
    """With everything in flight to its run limit, what passed a head included, the head still starts as promised."""
    _, jobs, book, quotas = drawn(seed)
    decision = decide(*jobs, ledger=book, quotas=quotas)
    by_id = {job.id: job for job in jobs}
    for head, at in decision.promised.items():
        if at == float("inf"):
            continue
        left = [(p.team, p.reserved) for p in book.in_flight if max(p.ends_at, b.NOW + 60) > at]
        left += [(by_id[n].team, by_id[n].wanted) for n in decision.starts if b.NOW + by_id[n].run_s + OVERHEAD_S > at]
        over_without = {*in_use(left, quotas)}
        mine = (by_id[head].team, by_id[head].wanted)
        assert {*in_use([*left, mine], quotas)} == over_without, head


# -- properties, over time ---------------------------------------------------------------------------------------------


@dataclass
class Simulation:
    """The queue at work: jobs come, start, and end at or before their run limits."""

    quotas: Quotas
    now: float = b.NOW
    ledger: Ledger = field(default_factory=lambda: Ledger(usage_at=b.NOW))
    line: dict[str, Waiter] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    started_at: dict[str, float] = field(default_factory=dict)
    served: Counter[str] = field(default_factory=Counter)
    promises: dict[str, float] = field(default_factory=dict)

    def step(self, until: float, trains_s: dict[str, float]) -> None:
        """Ends and looks alternate until the time is reached."""
        self.look(trains_s)
        while self.ends and min(self.ends.values()) <= until:
            self.now = min(self.ends.values())
            over = {name for name, at in self.ends.items() if at <= self.now}
            for name in over:
                del self.ends[name]
            self.ledger = self.ledger.without(over, self.now)
            self.look(trains_s)
        self.now = until

    def look(self, trains_s: dict[str, float]) -> None:
        decision = order(self.line.values(), ledger=self.ledger, quotas=self.quotas, now=self.now)
        for name in decision.starts:
            job = self.line.pop(name)
            place = InFlight(
                job=name, team=job.team, priority=job.priority, attempt=1, since_at=self.now,
                ends_at=self.now + job.run_s + OVERHEAD_S, running=True, reserved=job.wanted,
            )  # fmt: skip
            book = self.ledger.accrued(self.now)
            self.ledger = replace(book, in_flight=(*book.in_flight, place), version=book.version + 1)
            self.ends[name] = self.now + min(trains_s.get(name, job.run_s), job.run_s + OVERHEAD_S)
            self.started_at[name] = self.now
            self.served[job.team] += round(job.wanted.gpus * (self.ends[name] - self.now))
        assert not in_use([(place.team, place.reserved) for place in self.ledger.in_flight], self.quotas)
        for name, because in decision.because.items():
            self.line[name] = replace(self.line[name], waiting=because)
        for head, at in decision.promised.items():
            self.promises.setdefault(head, at)


@pytest.mark.parametrize("seed", range(2))
def test_no_job_starves_under_a_load_that_never_ends(seed: int) -> None:
    """Small jobs of three teams ask for more than there is, for ever; gangs of the whole quota start all the same."""
    dice = random.Random(seed)
    world = Simulation(Quotas(markets={"spot": Quota(gpus=32)}))
    gangs = []
    trains_s: dict[str, float] = {}
    for minute in range(0, 4000, 20):
        at = b.NOW + 60 * minute
        world.step(at, trains_s)
        for n in range(dice.randint(1, 3)):
            name = f"s{minute:05d}-{n}"
            job = waits(
                name, gpus=dice.choice([4, 8, 16]), team=f"small-{dice.randint(0, 2)}", run_s=dice.randint(600, 7200)
            )
            world.line[name] = replace(job, submitted_at=at, priority=dice.randint(0, 100))
            trains_s[name] = dice.uniform(0.2, 1.0) * job.run_s
        if minute % 1000 == 0:
            gangs.append(f"gang{minute:05d}")
            gang = waits(gangs[-1], gpus=32, team="small-0" if minute % 2000 else "gangs", run_s=3600)
            world.line[gangs[-1]] = replace(gang, submitted_at=at, priority=0)
            trains_s[gangs[-1]] = 3000.0
    waited = {name: world.started_at.get(name, world.now) - (b.NOW + 60 * int(name[4:])) for name in gangs[:-2]}
    assert all(name in world.started_at for name in gangs[:-2]), waited
    assert len(waited) == 2
    # At priority 0 against at most 100, ageing takes 100 x 600 s to be first in the own team.
    assert max(waited.values()) < 2 * 60_000, waited


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 3)])
def test_shares_of_teams_converge_to_their_weights(weights: tuple[int, ...]) -> None:
    """Teams with endless lines of unlike jobs, one of them with a past; served GPU time follows the weights."""
    dice = random.Random(11)
    teams = {f"team-{n}": Quota(weight=float(weight)) for n, weight in enumerate(weights)}
    world = Simulation(Quotas(markets={"spot": Quota(gpus=64)}, teams=teams))
    world.ledger = replace(world.ledger, usage={account("team-0", "spot"): 24 * 64 * 86_400.0})
    sizes, count = {"team-0": [8], "team-1": [2, 4, 16], "team-2": [1, 8, 32]}, 0
    for hour in range(24 * 10):
        while len(world.line) < 30:
            team = min(sizes, key=lambda name: sum(job.team == name for job in world.line.values()))
            count += 1
            job = waits(f"j{count:05d}", gpus=dice.choice(sizes[team]), team=team, run_s=dice.randint(1800, 14_400))
            world.line[job.id] = replace(job, submitted_at=world.now)
        if hour == 24 * 4:
            world.served.clear()
        world.step(b.NOW + 3600 * (hour + 1), {})
    total = sum(world.served.values())
    for n, weight in enumerate(weights):
        assert world.served[f"team-{n}"] / total == pytest.approx(weight / sum(weights), abs=0.06)


def test_a_head_starts_no_later_than_it_was_promised_whoever_passes_it() -> None:
    """Alone at the head and with jobs passing it: the promise is kept, also when jobs end earlier than they may."""
    for seed in range(40):
        dice = random.Random(seed)
        world = Simulation(Quotas(markets={"spot": Quota(gpus=32)}))
        for n in range(6):
            world.line[f"r{n}"] = waits(f"r{n}", gpus=dice.choice([2, 4, 8]), age_s=9e5, run_s=dice.randint(600, 9000))
        trains_s = {f"r{n}": dice.uniform(0.5, 1.0) * 9000 for n in range(6)}
        world.step(b.NOW, trains_s)
        world.line["head"] = waits("head", gpus=32, age_s=8e5)
        for n in range(30):
            world.line[f"s{n}"] = waits(f"s{n}", gpus=dice.choice([1, 2, 4]), run_s=dice.randint(60, 9000), age_s=n)
            trains_s[f"s{n}"] = dice.uniform(0.3, 1.5) * world.line[f"s{n}"].run_s
        world.step(b.NOW + 40_000, trains_s)
        assert world.started_at["head"] <= world.promises["head"]


def test_half_life_is_a_week() -> None:
    assert HALF_LIFE_S == 604_800
