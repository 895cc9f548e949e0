"""How a gang is bought: cold pools left alone, every instance owned, nothing bought twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from holdfast.application.dispatch import dispatch
from holdfast.application.launch import AMBIGUOUS_S, CALL_RESERVE_S, Launch
from holdfast.application.record import record
from holdfast.application.release import close_attempt, end_dead_attempt, release_fleet
from holdfast.application.sweep import Sweep
from holdfast.application.terms import Terms
from holdfast.domain.catalogue import Room
from holdfast.domain.errors import Unavailable
from holdfast.domain.job import Job
from holdfast.domain.ownership import ORPHAN_GRACE_S, SHOWN_WITHIN_S, FleetIntent, Ownership
from holdfast.domain.phase import Phase
from holdfast.domain.placement import (
    CALLS_AN_HOUR,
    EVERY_POOL,
    HOUR_S,
    WHOLE_GANG_FIRST_S,
    Candidate,
    Cold,
    Patience,
    Pool,
    candidates,
    quota_pool,
)
from holdfast.domain.purchase import (
    SOON_TRIES,
    UNKNOWN_TRIES,
    Bought,
    Purchase,
    Refusal,
    RefusalKind,
    Reservation,
    ReservationKind,
)
from tests import builders as b
from tests.application.fakes import FakePorts

JOB = "demo-0123456789"
PREFIX = f"teams/research/jobs/{JOB}"
ICE = Refusal(code="InsufficientInstanceCapacity", kind=RefusalKind.POOL_COLD)


def wanted(*types: str, nodes: int = 2, market: str = "spot", **more: Any) -> tuple[Candidate, ...]:
    return candidates(instance_types=types or ("c7i.large",), market=market, zones=(), nodes=nodes, **more)


@pytest.fixture
def ports() -> FakePorts:
    ports = FakePorts()
    ports.holding(b.after(b.a_job(), b.started()))
    ports.workflow.start(JOB, 1)
    return ports


def job(ports: FakePorts) -> Job:
    return ports.store.rows[JOB]


def launch(ports: FakePorts, asked: Sequence[Candidate] = (), **how: Any) -> str:
    time_left_s = how.pop("time_left_s", 120)
    answer = Launch(ports, **how).run(
        JOB, job(ports).attempt, candidates=asked or wanted(), prefix=PREFIX, time_left_s=time_left_s
    )
    return str(answer["outcome"])


def next_attempt(ports: FakePorts) -> None:
    """What the run machine and the dispatcher do between a refusal and the next launch."""
    attempt = job(ports).attempt
    release_fleet(JOB, attempt, ports)
    close_attempt(JOB, attempt, ports)
    ports.clock.now = max(ports.clock.now, job(ports).not_before)
    assert dispatch(ports) == [JOB]


def refusing(*refusals: Refusal, parts: tuple[Any, ...] = ()) -> Bought:
    return Bought(parts=parts, refusals=refusals or (ICE,))


def crashing(ports: FakePorts, port: Any, method: str) -> Callable[[], None]:
    """The next call of this method is the last thing this process does; returns what heals it."""
    usual = getattr(port, method)

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    setattr(port, method, crash)
    return lambda: setattr(port, method, usual)


# -- one candidate after the other -------------------------------------------------------------------------------------


def test_pools_that_are_full_are_passed_over_and_the_next_is_bought(ports: FakePorts) -> None:
    ports.fleets.scripted = [refusing(), refusing(), refusing()]
    assert launch(ports, wanted("a.large", "b.large", "c.large", "d.large")) == "launched"
    assert [one.instance_type for one in ports.fleets.purchases] == ["a.large", "b.large", "c.large", "d.large"]
    assert {cold.pool.instance_type for cold in ports.store.colds.values() if cold.misses} == {
        "a.large", "b.large", "c.large",
    }  # fmt: skip


def test_a_pool_that_is_cold_is_asked_by_no_job(ports: FakePorts) -> None:
    ports.fleets.short = 0
    launch(ports)
    ports.fleets.short = None
    other = ports.holding(replace(b.after(b.a_job(), b.started()), id="other-1"))
    answer = Launch(ports).run(other.id, 1, candidates=wanted(), prefix=PREFIX, time_left_s=120)
    assert answer["outcome"] == "refused"
    assert len(ports.fleets.calls) == 1
    waiting = ports.store.rows[other.id]
    assert "left alone (InsufficientInstanceCapacity)" in waiting.reason
    assert waiting.not_before >= min(cold.until for cold in ports.store.colds.values())


def test_only_the_zones_that_are_not_cold_are_asked(ports: FakePorts) -> None:
    ports.fleets.zones = ("us-east-1a", "us-east-1b")
    pool = Pool(instance_type="c7i.large", zone="us-east-1a", market="spot")
    ports.store.cool(Cold(pool=pool, until=b.NOW + 60, misses=1, code="x"))
    assert launch(ports) == "launched"
    assert [place.zone for place in ports.fleets.purchases[0].places] == ["us-east-1b"]


def test_a_pool_that_gave_machines_starts_anew(ports: FakePorts) -> None:
    pool = Pool(instance_type="c7i.large", zone="us-east-1a", market="spot")
    ports.store.cool(Cold(pool=pool, until=b.NOW - 1, misses=5, code="x"))
    assert launch(ports) == "launched"
    assert ports.store.colds[pool].misses == 0


def test_o09_capacity_is_awaited_for_days_without_burning_attempts(ports: FakePorts) -> None:
    """No capacity for the first forty attempts; the wait lies in the table and the dispatcher, in no message."""
    ports.holding(replace(job(ports), wait_s=10**9))
    ports.fleets.scripted = [refusing() for _ in range(40)]
    called_at = []
    for _ in range(40):
        called_at.append(ports.clock.now)
        assert launch(ports) == "refused"
        next_attempt(ports)
    assert launch(ports) == "launched"
    assert job(ports).attempt == 41
    assert job(ports).charged == {"capacity": 40}
    waits = [after - before for before, after in pairwise(called_at)]
    assert waits[0] < waits[3] <= max(waits) <= 1.5 * 900 + 60
    assert ports.outbox.published == []


def test_o09_many_candidates_make_no_more_calls_than_stated(ports: FakePorts) -> None:
    ports.holding(replace(job(ports), wait_s=10**9))
    ports.fleets.short = 0
    types = [f"t{number}.large" for number in range(20)]
    called_at: list[float] = []
    while ports.clock.now < b.NOW + 6 * HOUR_S:
        before = len(ports.fleets.calls)
        launch(ports, wanted(*types))
        called_at += [ports.clock.now] * (len(ports.fleets.calls) - before)
        next_attempt(ports)
    assert max(sum(at - HOUR_S < call <= at for call in called_at) for at in called_at) <= CALLS_AN_HOUR
    assert len(ports.store.patiences[JOB].asked_at) <= CALLS_AN_HOUR


def test_a_call_is_counted_before_it_is_made(ports: FakePorts) -> None:
    crashing(ports, ports.fleets, "buy")
    with pytest.raises(KeyboardInterrupt):
        launch(ports)
    assert len(ports.store.patiences[JOB].asked_at) == 1


def test_time_that_runs_out_is_asked_for_again_and_nothing_is_asked_twice(ports: FakePorts) -> None:
    ports.fleets.short = 0
    usual = ports.fleets.buy

    def slow(purchase: Purchase) -> Bought:
        ports.clock.step(50)
        return usual(purchase)

    ports.fleets.buy = slow  # type: ignore[method-assign]
    asked = wanted("a.large", "b.large", "c.large")
    assert launch(ports, asked, time_left_s=CALL_RESERVE_S + 60) == "again"
    assert launch(ports, asked, time_left_s=CALL_RESERVE_S + 60) == "refused"
    assert ports.fleets.calls == [f"{JOB}-1-0", f"{JOB}-1-1", f"{JOB}-1-2"]


def test_o14_a_launch_whose_time_runs_out_makes_a_call_each_turn_and_then_waits_elsewhere(
    ports: FakePorts,
) -> None:
    """The run machine goes round only so often: a job makes so many calls an hour, then the attempt ends."""
    ports.holding(replace(job(ports), wait_s=10**9))
    ports.fleets.short = 0
    usual = ports.fleets.buy

    def slow(purchase: Purchase) -> Bought:
        ports.clock.step(55)
        return usual(purchase)

    ports.fleets.buy = slow  # type: ignore[method-assign]
    asked = wanted(*(f"t{number}.large" for number in range(100)))
    turns = 1
    while launch(ports, asked, time_left_s=120) == "again":
        assert len(ports.fleets.calls) >= turns
        turns += 1
    assert 1 < turns <= CALLS_AN_HOUR
    assert (job(ports).phase, job(ports).failure) == (Phase.RESUMING, "capacity")


# -- what EC2 refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (RefusalKind.CONFIGURATION, "correct it"),
        (RefusalKind.PERMISSION, "decode-authorization-message"),
        (RefusalKind.SERVICE_LINKED_ROLE, "CreateSpotServiceLinkedRole=true"),
    ],
)
def test_what_no_wait_can_cure_fails_the_job_with_a_sentence(ports: FakePorts, kind: RefusalKind, words: str) -> None:
    ports.fleets.scripted = [refusing(Refusal(code="SomeCode", kind=kind))]
    assert launch(ports, wanted("a.large", "b.large")) == "refused"
    assert job(ports).phase is Phase.FAILED
    assert "SomeCode" in job(ports).reason
    assert words in job(ports).reason
    assert len(ports.fleets.calls) == 1


@pytest.mark.parametrize(
    ("kind", "tries"), [(RefusalKind.UNKNOWN, UNKNOWN_TRIES), (RefusalKind.RETRY_SOON, SOON_TRIES)]
)
def test_a_code_that_may_pass_is_bounded_and_then_fails_with_its_name(
    ports: FakePorts, kind: RefusalKind, tries: int
) -> None:
    for _ in range(tries):
        ports.fleets.scripted = [refusing(Refusal(code="NewCode", kind=kind))]
        assert launch(ports) == "refused"
        assert job(ports).phase is Phase.RESUMING
        next_attempt(ports)
    ports.fleets.scripted = [refusing(Refusal(code="NewCode", kind=kind))]
    launch(ports)
    assert job(ports).phase is Phase.FAILED
    assert "NewCode" in job(ports).reason


def test_a_quota_parks_every_type_of_the_family_and_is_counted(ports: FakePorts) -> None:
    ports.fleets.scripted = [refusing(Refusal(code="VcpuLimitExceeded", kind=RefusalKind.QUOTA, cool_s=1800))]
    step = Launch(ports)
    step.run(JOB, 1, candidates=wanted("p5.48xlarge", "p4d.24xlarge"), prefix=PREFIX, time_left_s=120)
    assert step.quotas_reached == 1
    assert len(ports.fleets.calls) == 1
    assert job(ports).not_before >= b.NOW + 1800
    assert quota_pool("p5.48xlarge", "spot") in ports.store.colds


def test_a_quota_that_is_known_is_not_asked_about(ports: FakePorts) -> None:
    def read(*_: object) -> Terms:
        return Terms(quotas={("p5.48xlarge", "spot"): Room(code="L-C4BD4855", vcpus=15)})

    assert launch(ports, wanted("p5.48xlarge", nodes=8), terms=read) == "refused"
    assert ports.fleets.calls == []
    assert "need 16 vCPUs, the account may run 15" in job(ports).reason


def test_throttling_keeps_every_job_quiet(ports: FakePorts) -> None:
    ports.fleets.scripted = [refusing(Refusal(code="RequestLimitExceeded", kind=RefusalKind.THROTTLED, cool_s=20))]
    assert launch(ports, wanted("a.large", "b.large")) == "refused"
    assert len(ports.fleets.calls) == 1
    assert EVERY_POOL in ports.store.colds
    assert job(ports).phase is Phase.RESUMING


def test_throttling_before_the_call_waits_too(ports: FakePorts) -> None:
    ports.fleets.refused_first = Refusal(code="RequestLimitExceeded", kind=RefusalKind.THROTTLED, cool_s=20)
    assert launch(ports) == "refused"
    assert (job(ports).phase, ports.fleets.calls) == (Phase.RESUMING, [])


def test_an_ec2_that_is_silent_before_the_call_burns_no_attempt(ports: FakePorts) -> None:
    def silent() -> None:
        raise Unavailable("EC2 did not answer: InternalError")

    ports.fleets.subnets = silent  # type: ignore[method-assign, assignment]
    assert launch(ports) == "refused"
    assert job(ports).failure == "capacity"
    assert "did not answer" in job(ports).reason


def test_a_subnet_without_room_for_the_gang_is_not_asked(ports: FakePorts) -> None:
    ports.fleets.zones, ports.fleets.free = ("us-east-1a", "us-east-1b"), {"us-east-1a": 1}
    assert launch(ports) == "launched"
    assert [place.zone for place in ports.fleets.purchases[0].places] == ["us-east-1b"]


def test_efa_interfaces_need_one_address_a_node(ports: FakePorts) -> None:
    ports.fleets.efas, ports.fleets.free = {"p5.48xlarge": 32}, {"us-east-1a": 8}
    assert launch(ports, wanted("p5.48xlarge", nodes=8)) == "launched"


def test_too_few_addresses_everywhere_is_waited_for_with_the_numbers(ports: FakePorts) -> None:
    ports.fleets.free = {"us-east-1a": 1}
    assert launch(ports) == "refused"
    assert "subnet-a in us-east-1a has 1 free addresses, 2 are needed" in job(ports).reason
    assert job(ports).phase is Phase.RESUMING


@pytest.mark.parametrize("market", ["spot", "mixed"])
def test_a_zone_without_a_subnet_fails_the_job_and_is_named(ports: FakePorts, market: str) -> None:
    asked = candidates(instance_types=["c7i.large"], market=market, zones=["us-east-1f"], nodes=2)
    assert launch(ports, asked) == "refused"
    assert job(ports).phase is Phase.FAILED
    assert "us-east-1f" in job(ports).reason or "zones that are allowed" in job(ports).reason


def test_a_type_that_ec2_does_not_know_is_passed_over_and_alone_fails_the_job(ports: FakePorts) -> None:
    ports.fleets.unknown_types = {"p9.large"}
    assert launch(ports, wanted("p9.large", "c7i.large")) == "launched"
    ports.holding(b.after(b.a_job(), b.started()))
    assert launch(ports, wanted("p9.large")) == "refused"
    assert "p9.large" in job(ports).reason


# -- nothing without an owner, nothing twice ---------------------------------------------------------------------------


def test_o12_a_launch_that_died_after_the_purchase_adopts_what_it_bought(ports: FakePorts) -> None:
    heal = crashing(ports, ports.store, "own")
    with pytest.raises(KeyboardInterrupt):
        launch(ports)
    heal()
    ports.clock.step(1)
    assert launch(ports) == "launched"
    assert len(ports.fleets.live) == len(ports.store.owners) == 2
    assert len(ports.fleets.calls) == 1


def test_o12_where_the_tag_is_not_seen_yet_the_same_token_brings_the_same_machines(ports: FakePorts) -> None:
    heal = crashing(ports, ports.store, "own")
    with pytest.raises(KeyboardInterrupt):
        launch(ports)
    heal()
    ports.fleets.hidden = set(ports.fleets.instances)
    assert launch(ports) == "launched"
    first, second = ports.fleets.purchases
    assert first == second
    assert len(ports.fleets.live) == 2


def test_o12_the_retry_repeats_the_purchase_to_the_letter_whatever_is_cold_by_then(ports: FakePorts) -> None:
    ports.fleets.zones = ("us-east-1a", "us-east-1b")
    heal = crashing(ports, ports.store, "own")
    with pytest.raises(KeyboardInterrupt):
        launch(ports)
    heal()
    ports.fleets.hidden = set(ports.fleets.instances)
    pool = Pool(instance_type="c7i.large", zone="us-east-1a", market="spot")
    ports.store.cool(Cold(pool=pool, until=b.NOW + 60, misses=1, code="x"))
    assert launch(ports) == "launched"
    assert ports.fleets.purchases[0] == ports.fleets.purchases[1]


def test_what_an_earlier_run_left_open_is_settled_before_anything_else_is_asked(ports: FakePorts) -> None:
    """The first candidate thawed meanwhile: asking it now would make two fleets."""
    ports.fleets.scripted = [refusing()]
    usual = ports.store.own
    ports.store.own = lambda nodes: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        launch(ports, wanted("a.large", "b.large"))
    ports.store.own = usual  # type: ignore[method-assign]
    ports.clock.step(3600)
    assert launch(ports, wanted("a.large", "b.large")) == "launched"
    assert {one.instance_type for one in ports.fleets.instances.values() if one.live} == {"b.large"}


@pytest.mark.parametrize("method", ["mark_ending", "close_intent"])
def test_o16_a_part_of_a_gang_is_written_down_then_ended_and_a_crash_between_is_repaired(
    ports: FakePorts, method: str
) -> None:
    three, more = ports.fleets.part("p5.48xlarge", 3), ports.fleets.part("p5e.48xlarge", 3)
    ports.fleets.scripted = [refusing(parts=(three, more))]
    heal = crashing(ports, ports.store, method)
    asked = wanted("p5.48xlarge", nodes=8)
    with pytest.raises(KeyboardInterrupt):
        launch(ports, asked)
    heal()
    assert len(ports.fleets.live) == 6
    assert launch(ports, asked) == "refused"
    assert ports.fleets.live == []
    assert {node.state for node in ports.store.owners.values()} == {Ownership.ENDING}
    assert len(ports.store.owners) == 6


def test_o16_where_no_run_comes_back_the_release_ends_what_the_intent_lists(ports: FakePorts) -> None:
    ports.fleets.scripted = [refusing(parts=(ports.fleets.part("c7i.large", 1),))]
    heal = crashing(ports, ports.fleets, "terminate")
    with pytest.raises(KeyboardInterrupt):
        launch(ports)
    heal()
    ports.fleets.hidden = set(ports.fleets.instances)
    release_fleet(JOB, 1, ports)
    assert ports.fleets.live == []
    assert all(intent.closed_at is not None for intent in ports.store.intents.values())


def test_o16_no_other_call_is_made_while_a_part_still_lives(ports: FakePorts) -> None:
    part = ports.fleets.part("c7i.large", 1)
    ports.fleets.scripted = [refusing(parts=(part,))]
    ports.fleets.refuses_to_die = set(part.instances)
    assert launch(ports, wanted("c7i.large", "b.large")) == "refused"
    assert len(ports.fleets.calls) == 1
    with pytest.raises(Unavailable):
        release_fleet(JOB, 1, ports)
    ports.fleets.refuses_to_die = set()
    next_attempt(ports)
    assert ports.fleets.live == []
    assert launch(ports, wanted("c7i.large", "b.large")) == "launched"


def test_o16_a_part_that_ec2_does_not_show_yet_is_ended_by_the_release(ports: FakePorts) -> None:
    part = ports.fleets.part("c7i.large", 1)
    ports.fleets.scripted = [refusing(parts=(part,))]
    ports.fleets.unseen = set(part.instances)
    assert launch(ports) == "refused"
    with pytest.raises(Unavailable):
        release_fleet(JOB, 1, ports)
    ports.fleets.unseen = set()
    release_fleet(JOB, 1, ports)
    assert ports.fleets.live == []


def test_o16_a_job_that_goes_on_with_fewer_starts_with_them_after_every_whole_gang_was_refused(
    ports: FakePorts,
) -> None:
    asked = wanted("p5.48xlarge", nodes=8, fewest=4)
    ports.store.patiences[JOB] = Patience(refused_since=b.NOW - WHOLE_GANG_FIRST_S)
    six = ports.fleets.part("p5.48xlarge", 6)
    ports.fleets.scripted = [refusing(), refusing(parts=(six, ports.fleets.part("p5e.48xlarge", 1)))]
    assert launch(ports, asked) == "launched"
    intent = ports.store.intents[f"{JOB}-1-1"]
    assert (intent.nodes, intent.instances) == (6, six.instances)
    assert set(ports.fleets.live) == set(six.instances)
    assert [one.minimum for one in ports.fleets.purchases] == [8, 4]


def test_fewer_nodes_are_not_asked_for_before_the_whole_gang_was_awaited(ports: FakePorts) -> None:
    asked = wanted(nodes=8, fewest=4)
    ports.fleets.scripted = [refusing() for _ in range(100)]
    while all(one.minimum == 8 for one in ports.fleets.purchases):
        launch(ports, asked)
        next_attempt(ports)
    assert ports.clock.now >= b.NOW + WHOLE_GANG_FIRST_S


def test_a_mismatch_is_settled_by_tag_and_mints_no_new_token(ports: FakePorts) -> None:
    mismatch = Refusal(code="IdempotentParameterMismatch", kind=RefusalKind.MISMATCH)
    for instance in ("i-1", "i-2"):
        ports.fleets.add(instance, job=JOB, fleet=f"{JOB}-1-0")
    ports.fleets.scripted = [refusing(mismatch)]
    assert launch(ports, wanted("c7i.large", "b.large")) == "launched"
    assert set(ports.store.owners) == {"i-1", "i-2"}
    assert len(ports.fleets.calls) == 1


def test_a_mismatch_without_machines_waits(ports: FakePorts) -> None:
    ports.fleets.scripted = [refusing(Refusal(code="IdempotentParameterMismatch", kind=RefusalKind.MISMATCH))]
    assert launch(ports, wanted("c7i.large", "b.large")) == "refused"
    assert (job(ports).phase, len(ports.fleets.calls)) == (Phase.RESUMING, 1)


def test_an_unanswered_call_is_repeated_and_then_waited_for_and_what_comes_late_is_ended(ports: FakePorts) -> None:
    def unanswered(purchase: Purchase) -> Bought:
        ports.fleets.calls.append(purchase.fleet)
        raise Unavailable("no answer")

    ports.fleets.buy = unanswered  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        launch(ports)
    ports.clock.step(AMBIGUOUS_S)
    assert launch(ports) == "refused"
    assert set(ports.fleets.calls) == {f"{JOB}-1-0"}
    assert job(ports).failure == "capacity"
    with pytest.raises(Unavailable, match="may still show"):
        release_fleet(JOB, 1, ports)
    ports.fleets.add("i-late", job=JOB, fleet=f"{JOB}-1-0")
    ports.clock.step(SHOWN_WITHIN_S)
    release_fleet(JOB, 1, ports)
    assert ports.fleets.live == []


def test_machines_that_show_up_after_the_release_are_nobodys_and_swept(ports: FakePorts) -> None:
    crashing(ports, ports.fleets, "buy")
    with pytest.raises(KeyboardInterrupt):
        launch(ports)
    ports.clock.step(SHOWN_WITHIN_S)
    release_fleet(JOB, 1, ports)
    close_attempt(JOB, 1, ports)
    ports.fleets.add("i-late", job=JOB, fleet=f"{JOB}-1-0")
    ports.clock.step(ORPHAN_GRACE_S + 1)
    Sweep(ports).run()
    Sweep(ports).run()
    assert ports.fleets.live == []


def test_a_fleet_that_arrives_after_its_attempt_was_closed_is_ended_at_once(ports: FakePorts) -> None:
    usual = ports.fleets.buy

    def overtaken(purchase: Purchase) -> Bought:
        bought = usual(purchase)
        ports.fleets.hidden = set(bought.instances)
        ports.clock.step(SHOWN_WITHIN_S)
        release_fleet(JOB, 1, ports)
        close_attempt(JOB, 1, ports)
        return bought

    ports.fleets.buy = overtaken  # type: ignore[method-assign]
    assert launch(ports) == "withdrawn"
    assert ports.fleets.live == []


def test_a_purchase_that_was_withdrawn_before_it_was_asked_for_stays_no_open_intent(ports: FakePorts) -> None:
    open_intent = ports.store.open_intent

    def overtaken(intent: FleetIntent) -> FleetIntent:
        end_dead_attempt(JOB, 1, ports, cause="execution aborted")
        return open_intent(intent)

    ports.store.open_intent = overtaken  # type: ignore[method-assign]
    assert launch(ports) == "withdrawn"
    [intent] = ports.store.intents.values()
    assert (intent.closed_at, intent.outcome) == (ports.clock(), "withdrawn before it was asked for")
    assert ports.fleets.calls == []


def test_a_purchase_that_the_row_names_is_left_open_for_its_release(ports: FakePorts) -> None:
    open_intent = ports.store.open_intent

    def overtaken(intent: FleetIntent) -> FleetIntent:
        record(b.cancelled(), JOB, ports)
        return open_intent(intent)

    ports.store.open_intent = overtaken  # type: ignore[method-assign]
    assert launch(ports) == "withdrawn"
    [intent] = ports.store.intents.values()
    assert (intent.closed_at, intent.fleet) == (None, job(ports).fleet)
    ports.clock.step(SHOWN_WITHIN_S)
    release_fleet(JOB, 1, ports)
    assert [intent.closed_at for intent in ports.store.intents.values()] == [ports.clock()]


def test_an_intent_that_a_crash_left_open_protects_no_machine_once_its_attempt_is_over(ports: FakePorts) -> None:
    heal = crashing(ports, ports.store, "load_for")
    with pytest.raises(KeyboardInterrupt):
        launch(ports)
    heal()
    fleet = f"{JOB}-1-0"
    ports.fleets.add("i-late", job=JOB, fleet=fleet)
    ports.clock.step(ORPHAN_GRACE_S + 1)
    for _ in range(2):
        ports.workflow.executions[f"{JOB}-1"] = "RUNNING"
        Sweep(ports).run()
    assert ports.fleets.live == ["i-late"]  # the step's retry may still own it
    ports.store.rows[JOB] = b.after(job(ports), b.failed("lost"), b.closed())
    for _ in range(2):
        Sweep(ports).run()
    assert ports.fleets.live == []


def test_a_step_repeated_late_leaves_a_fleet_at_work_alone(ports: FakePorts) -> None:
    assert launch(ports) == "launched"
    ports.holding(b.after(job(ports), b.ready(), b.training()))
    assert launch(ports) == "launched"
    assert len(ports.fleets.live) == 2


# -- EFA, groups, templates, markets, reservations ---------------------------------------------------------------------


def test_a_gang_over_efa_gets_a_template_of_its_own_and_a_cluster_group_a_zone(ports: FakePorts) -> None:
    ports.fleets.efas, ports.fleets.zones = {"p5.48xlarge": 32}, ("us-east-1a", "us-east-1b")
    assert launch(ports, wanted("p5.48xlarge")) == "launched"
    [purchase] = ports.fleets.purchases
    assert purchase.template.id == "lt-p5.48xlarge"
    assert [place.group for place in purchase.places] == [f"{JOB}-us-east-1a", f"{JOB}-us-east-1b"]
    assert purchase.expected is not None
    assert (purchase.expected.efas, purchase.expected.instance_type) == (32, "p5.48xlarge")


def test_the_group_is_the_same_at_every_attempt_of_the_job(ports: FakePorts) -> None:
    ports.fleets.efas, ports.fleets.scripted = {"p5.48xlarge": 32}, [refusing()]
    launch(ports, wanted("p5.48xlarge"))
    next_attempt(ports)
    launch(ports, wanted("p5.48xlarge"))
    assert len(ports.fleets.calls) == 2
    assert list(ports.fleets.made_groups) == [f"{JOB}-us-east-1a"]


@pytest.mark.parametrize(("kind", "nodes"), [("p5.48xlarge", 1), ("c7i.large", 2)])
def test_a_single_node_and_a_gang_without_efa_get_no_group_and_the_base_template(
    ports: FakePorts, kind: str, nodes: int
) -> None:
    ports.fleets.efas = {"p5.48xlarge": 32}
    assert launch(ports, wanted(kind, nodes=nodes)) == "launched"
    [purchase] = ports.fleets.purchases
    assert (purchase.template.id, ports.fleets.made_groups) == ("lt-base", {})


def test_the_image_of_an_attempt_is_pinned_in_its_purchase(ports: FakePorts) -> None:
    launch(ports)
    assert ports.fleets.purchases[0].template.image == "ami-1"


def test_each_machine_of_a_mixed_gang_is_owned_with_its_market(ports: FakePorts) -> None:
    parts = (ports.fleets.part("c7i.large", 1, market="on_demand"), ports.fleets.part("c7i.large", 3))
    ports.fleets.scripted = [Bought(parts=parts)]
    assert launch(ports, wanted(nodes=4, market="mixed")) == "launched"
    assert sorted(node.market for node in ports.store.owners.values()) == ["on_demand", "spot", "spot", "spot"]


def a_reservation(ports: FakePorts, **changes: Any) -> Reservation:
    found = Reservation(
        id="cr-1", kind=ReservationKind.CAPACITY_BLOCK, instance_type="p5.48xlarge", zone="us-east-1b",
        state="active", free=8,
    )  # fmt: skip
    ports.fleets.zones = ("us-east-1a", "us-east-1b")
    ports.fleets.efas = {"p5.48xlarge": 32}
    ports.fleets.reservations["cr-1"] = replace(found, **changes)
    return ports.fleets.reservations["cr-1"]


BOOKED = wanted("p5.48xlarge", "p4d.24xlarge", nodes=8, reservation="cr-1")


def test_a_capacity_block_is_bought_in_its_zone_and_without_a_placement_group(ports: FakePorts) -> None:
    a_reservation(ports)
    assert launch(ports, BOOKED) == "launched"
    [purchase] = ports.fleets.purchases
    assert (purchase.reservation, purchase.reservation_kind) == ("cr-1", "capacity_block")
    assert [(place.zone, place.group) for place in purchase.places] == [("us-east-1b", "")]
    assert ports.fleets.made_groups == {}


def test_nothing_is_bought_in_the_stead_of_a_block_and_its_start_is_waited_for(ports: FakePorts) -> None:
    a_reservation(ports, state="scheduled", starts_at=b.NOW + 7200)
    assert launch(ports, BOOKED) == "refused"
    assert ports.fleets.calls == []
    assert job(ports).not_before >= b.NOW + 7200
    assert "cr-1 is scheduled" in job(ports).reason


def test_a_reservation_without_room_is_passed_over_for_the_market_that_was_asked_for(ports: FakePorts) -> None:
    a_reservation(ports, kind=ReservationKind.ON_DEMAND, free=3)
    assert launch(ports, BOOKED) == "launched"
    [purchase] = ports.fleets.purchases
    assert (purchase.reservation, purchase.market) == ("", "spot")


def test_a_reservation_made_in_a_group_is_bought_in_that_group(ports: FakePorts) -> None:
    a_reservation(ports, kind=ReservationKind.ON_DEMAND, group="theirs")
    assert launch(ports, BOOKED) == "launched"
    assert [place.group for place in ports.fleets.purchases[0].places] == ["theirs"]


def test_a_part_of_a_block_is_given_back(ports: FakePorts) -> None:
    a_reservation(ports)
    ports.fleets.short = 5
    assert launch(ports, BOOKED) == "refused"
    assert ports.fleets.live == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "expired"}, "is expired; name another"),
        ({"instance_type": "p4de.24xlarge"}, "is for p4de.24xlarge, the job wants p4d.24xlarge, p5.48xlarge"),
        ({"zone": "us-east-1f"}, "lies in us-east-1f, where the stack has no subnet"),
    ],
)
def test_a_block_that_can_never_be_used_fails_the_job_and_says_why(
    ports: FakePorts, changes: dict[str, Any], words: str
) -> None:
    a_reservation(ports, **changes)
    assert launch(ports, BOOKED) == "refused"
    assert job(ports).phase is Phase.FAILED
    assert words in job(ports).reason


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_o10_what_the_step_returns_and_writes_does_not_grow_with_the_fleet(ports: FakePorts) -> None:
    answer = Launch(ports).run(JOB, 1, candidates=wanted(nodes=256), prefix=PREFIX, time_left_s=120)
    assert len(json.dumps(dict(answer)).encode()) < 200
    assert len(repr(job(ports)).encode()) < 2048
    assert len(ports.store.intents[f"{JOB}-1-0"].instances) == 256


def test_o10_reasons_are_cut_however_many_candidates_were_refused(ports: FakePorts) -> None:
    ports.fleets.short = 0
    launch(ports, wanted(*(f"typé{number}.large" for number in range(20))))
    assert len(job(ports).reason.encode()) <= 1000
