"""The dispatcher and the operator's switches, on a store that races, conflicts and lags."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from holdfast.application import dispatch as dispatching
from holdfast.application.account import hold, repair_ledger, set_quota, unhold
from holdfast.application.control import obey
from holdfast.application.dispatch import dispatch
from holdfast.application.intake import accept
from holdfast.application.record import record
from holdfast.application.release import close_attempt
from holdfast.domain.because import Because, Code
from holdfast.domain.errors import Raced, Rejected, Unavailable
from holdfast.domain.job import Job
from holdfast.domain.ledger import Ledger, Quota, Quotas, Reserved
from holdfast.domain.obligations import action_for
from holdfast.domain.ownership import Ownership
from holdfast.domain.phase import Phase
from holdfast.domain.queueing import MOST_STARTS, Waiter
from holdfast.messages.acceptance import read_acceptance
from holdfast.messages.control_request import read_control
from job_contract.orders import Action
from tests import builders as b
from tests.application.fakes import FakePorts


@pytest.fixture
def ports() -> FakePorts:
    return FakePorts()


def waiting(ports: FakePorts, name: str, **changes: Any) -> Job:
    sized = {"vcpus_per_node": 192, "gpus_per_node": 8, "id": name, **changes}
    return ports.holding(b.a_job(**sized))


def quota(ports: FakePorts, **of_spot: Any) -> None:
    set_quota("market", "spot", lambda known: replace(known, **of_spot), ports)


def may_ask(ports: FakePorts) -> None:
    set_quota("team", "urgent", lambda known: replace(known, preempt_from=90), ports)


def in_flight(ports: FakePorts) -> dict[str, Reserved]:
    return {place.job: place.reserved for place in ports.store.ledger_row.in_flight}


GANG = Reserved(vcpus=384, gpus=16, nodes=2, market="spot")


# -- the ledger --------------------------------------------------------------------------------------------------------


def test_a_start_reserves_what_the_gang_takes_and_closing_gives_it_back(ports: FakePorts) -> None:
    job = waiting(ports, "a")
    assert dispatch(ports) == ["a"]
    assert ports.store.rows["a"].reserved == GANG
    assert in_flight(ports) == {"a": GANG}
    close_attempt(job.id, 1, ports)
    assert in_flight(ports) == {}
    assert ports.store.rows["a"].reserved is None


def test_what_a_node_takes_comes_from_the_plan_of_the_request(ports: FakePorts) -> None:
    order = read_acceptance((b.ROOT / "events" / "job-request.json").read_text(), now=b.NOW)
    request = {**order.request, "plan": {"vcpus_per_node": 96, "gpus_per_node": 4}}
    accept(order.job, request, order.spec, store=ports.store)
    [job] = ports.store.rows.values()
    assert (job.vcpus_per_node, job.gpus_per_node) == (96, 4)


def test_two_dispatchers_at_once_never_exceed_a_quota(ports: FakePorts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second decides on the same ledger as the first, and starts between the first one's decision and its write."""
    quota(ports, gpus=16)
    waiting(ports, "a", team="a")
    waiting(ports, "b", team="b")
    begin, nested = dispatching.begin, []

    def overtaken(job: Job, *rest: Any) -> Job:
        if not nested:
            nested.append(job.id)
            ports.store.stale = {job.id}
            nested.extend(dispatch(ports))
            ports.store.stale = set()
        return begin(job, *rest)

    monkeypatch.setattr(dispatching, "begin", overtaken)
    assert dispatch(ports) == []
    assert nested == ["a", "b"]
    assert list(in_flight(ports)) == ["b"]
    assert ports.store.rows["a"].attempt == 0


def test_a_start_that_loses_a_race_is_decided_anew(ports: FakePorts) -> None:
    waiting(ports, "a")
    ports.store.conflicts = 2
    assert dispatch(ports) == ["a"]


def test_a_dispatcher_that_loses_every_race_leaves_it_to_the_next(ports: FakePorts) -> None:
    waiting(ports, "a")
    ports.store.conflicts = 10**6
    assert dispatch(ports) == []
    ports.store.conflicts = 0
    assert dispatch(ports) == ["a"]


def test_a_closing_that_conflicts_on_the_ledger_is_repeated(ports: FakePorts) -> None:
    waiting(ports, "a")
    dispatch(ports)
    ports.store.conflicts = 3
    close_attempt("a", 1, ports)
    assert in_flight(ports) == {}


def test_an_index_that_lags_starts_nothing_that_has_moved_on(ports: FakePorts) -> None:
    job = waiting(ports, "a")
    ports.store.lag["a"] = Waiter.of(job)
    record(b.cancelled(), "a", ports)
    ports.store.waiting = lambda team: ["a"]  # type: ignore[method-assign]
    assert dispatch(ports) == []
    assert in_flight(ports) == {}


def test_more_than_one_look_starts_are_all_started(ports: FakePorts) -> None:
    for n in range(MOST_STARTS + 5):
        waiting(ports, f"j{n}")
    assert len(dispatch(ports)) == MOST_STARTS + 5


def test_places_that_no_row_holds_are_repaired(ports: FakePorts) -> None:
    waiting(ports, "a")
    waiting(ports, "b")
    dispatch(ports)
    ports.store.rows["b"] = replace(ports.store.rows["b"], reserved=None)
    assert repair_ledger(ports) == ["b"]
    assert list(in_flight(ports)) == ["a"]
    assert repair_ledger(ports) == []


# -- reasons -----------------------------------------------------------------------------------------------------------


def test_a_reason_is_written_when_it_changes_and_is_no_news(ports: FakePorts) -> None:
    quota(ports, gpus=16)
    waiting(ports, "a", submitted_at=b.NOW - 60)
    waiting(ports, "b")
    dispatch(ports)
    told = ports.store.rows["b"].waiting
    assert told is not None
    assert (told.code, told.until, told.head_since) == (Code.MARKET_QUOTA, b.NOW + 86_400 + 1_200, b.NOW)
    assert (ports.store.rows["b"].news, ports.store.rows["b"].version) == (1, 1)
    writes = ports.store.writes
    for _ in range(3):
        dispatch(ports)
    assert ports.store.writes == writes


def test_a_reason_is_gone_once_the_job_starts_or_ends(ports: FakePorts) -> None:
    hold("all", ports, by="ann")
    waiting(ports, "a")
    waiting(ports, "b")
    dispatch(ports)
    assert ports.store.rows["a"].waiting is not None
    record(b.cancelled(), "b", ports)
    unhold("all", ports)
    assert dispatch(ports) == ["a"]
    assert [ports.store.rows[name].waiting for name in "ab"] == [None, None]


def test_a_reason_never_overwrites_a_row_that_moved(ports: FakePorts) -> None:
    job = waiting(ports, "a")
    record(b.started(), "a", ports)
    because = Because(code=Code.HELD, sentence="s", unblock="u")
    assert ports.store.explain(Waiter.of(job), because) is False
    assert ports.store.rows["a"].waiting is None


def test_one_dispatch_writes_only_so_many_reasons(ports: FakePorts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatching, "MOST_REASONS", 3)
    hold("all", ports)
    for n in range(5):
        waiting(ports, f"j{n}")
    dispatch(ports)
    assert sum(job.waiting is not None for job in ports.store.rows.values()) == 3
    dispatch(ports)
    assert sum(job.waiting is not None for job in ports.store.rows.values()) == 5


# -- hold and unhold ---------------------------------------------------------------------------------------------------


def test_nothing_of_a_held_team_starts_and_what_runs_goes_on(ports: FakePorts) -> None:
    waiting(ports, "a")
    dispatch(ports)
    waiting(ports, "b")
    waiting(ports, "c", team="vision")
    assert hold("research", ports, by="ann")
    assert dispatch(ports) == ["c"]
    assert ports.store.rows["a"].phase is Phase.LAUNCHING
    assert ports.store.rows["b"].waiting.sentence == "dispatch is held for team research by ann"  # type: ignore[union-attr]
    assert unhold("research", ports)
    assert dispatch(ports) == ["b"]


def test_holding_twice_and_unholding_what_is_free_change_nothing(ports: FakePorts) -> None:
    assert [hold("all", ports), hold("all", ports)] == [True, False]
    assert [unhold("all", ports), unhold("all", ports), unhold("vision", ports)] == [True, False, False]


def test_a_hold_that_races_with_starts_is_held_in_the_end(ports: FakePorts) -> None:
    ports.store.conflicts = 2
    assert hold("all", ports)
    assert ports.store.ledger_row.hold_on("*") is not None
    ports.store.conflicts = 10**6
    with pytest.raises(Raced):
        unhold("all", ports)


def test_a_hold_stops_a_start_that_was_decided_before_it(ports: FakePorts, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting(ports, "a")
    begin = dispatching.begin

    def after_a_hold(*args: Any) -> Job:
        hold("all", ports)
        return begin(*args)

    monkeypatch.setattr(dispatching, "begin", after_a_hold)
    assert dispatch(ports) == []
    assert ports.store.rows["a"].attempt == 0


@pytest.mark.parametrize("scope", ["", "*", "No Such", "a" * 40])
def test_a_scope_that_is_no_team_is_refused(ports: FakePorts, scope: str) -> None:
    with pytest.raises(Rejected, match="neither"):
        hold(scope, ports)


def test_survivors_that_cannot_be_ended_now_keep_no_other_job_from_starting(ports: FakePorts) -> None:
    late = waiting(ports, "late", wait_s=10, held=("i-0ccccccccccccccc1",))
    ports.owning(late, "i-0ccccccccccccccc1")
    ports.clock.step(60)
    waiting(ports, "next", submitted_at=ports.clock())

    def unanswered(instances: object) -> None:
        raise Unavailable("EC2 did not answer")

    ports.fleets.terminate = unanswered  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match=r"1 jobs failed: late"):
        dispatch(ports)
    assert ports.store.rows["next"].phase is Phase.LAUNCHING
    assert ports.store.rows["late"].phase is Phase.FAILED
    assert ports.store.owners["i-0ccccccccccccccc1"].state is Ownership.ENDING


# -- quotas ------------------------------------------------------------------------------------------------------------


def asked(ports: FakePorts, **wish: Any) -> None:
    body = {"schema": "holdfast.control/1", "action": "quota", "requested_by": "ann", **wish}
    assert obey(read_control(json.dumps(body)), ports) is None


def told(ports: FakePorts) -> list[tuple[str, str, str, Quota, Quota]]:
    return [(one.kind, one.name, one.by, one.before, one.after) for one in ports.store.quota_told]


def test_a_quota_that_was_asked_for_holds_in_the_next_dispatch_and_stops_nothing_that_runs(ports: FakePorts) -> None:
    waiting(ports, "a")
    dispatch(ports)
    asked(ports, team="research", gpus=0)
    waiting(ports, "b")
    assert dispatch(ports) == []
    assert ports.store.rows["a"].phase is Phase.LAUNCHING
    assert ports.store.rows["b"].waiting.code is Code.OVER_TEAM_QUOTA  # type: ignore[union-attr]
    asked(ports, team="research", gpus="none")
    assert dispatch(ports) == ["b"]


def test_a_wish_changes_what_it_names_and_the_rest_stays(ports: FakePorts) -> None:
    asked(ports, team="research", gpus=64, weight=2)
    asked(ports, team="research", preempt_from=90, preemptible=False)
    asked(ports, team="research", gpus="none", nodes=4)
    assert ports.store.quota("team", "research") == Quota(nodes=4, weight=2.0, preempt_from=90, preemptible=False)
    assert ports.store.quota("team", "vision") == ports.store.quota("market", "spot") == Quota()


def test_a_cleared_quota_is_as_if_there_had_never_been_one(ports: FakePorts) -> None:
    asked(ports, market="spot", gpus=8)
    asked(ports, market="spot", clear=True)
    assert ports.store.quotas() == Quotas()
    waiting(ports, "a")
    assert dispatch(ports) == ["a"]


def test_who_set_what_from_what_to_what_is_written_down(ports: FakePorts) -> None:
    asked(ports, market="spot", gpus=64)
    asked(ports, market="spot", gpus=32, requested_by="bob")
    assert told(ports) == [
        ("market", "spot", "ann", Quota(), Quota(gpus=64)),
        ("market", "spot", "bob", Quota(gpus=64), Quota(gpus=32)),
    ]


def test_a_wish_that_comes_again_does_not_undo_a_newer_one(ports: FakePorts) -> None:
    asked(ports, team="research", gpus=64, dedup_id="first")
    asked(ports, team="research", gpus=32, dedup_id="second")
    asked(ports, team="research", gpus=64, dedup_id="first")
    assert ports.store.quota("team", "research") == Quota(gpus=32)
    assert len(told(ports)) == 2


def test_without_a_dedup_id_a_wish_that_changes_nothing_is_not_written_down(ports: FakePorts) -> None:
    asked(ports, team="research", gpus=64)
    asked(ports, team="research", gpus=64)
    asked(ports, team="vision", clear=True)
    assert len(told(ports)) == 1


def test_two_who_set_one_quota_at_once_both_stand(ports: FakePorts) -> None:
    asked(ports, team="research", gpus=64)
    ports.store.conflicts = 2
    asked(ports, team="research", weight=3)
    assert ports.store.quota("team", "research") == Quota(gpus=64, weight=3.0)
    assert len(ports.pauses) == 2


def test_preemption_is_switched_on_and_off_by_message(ports: FakePorts) -> None:
    asked(ports, market="spot", gpus=16)
    waiting(ports, "victim", priority=10)
    dispatch(ports)
    for event in (b.intended(), b.bought(), b.ready(), b.training(), b.saved(25)):
        record(event, "victim", ports)
    waiting(ports, "urgent", team="urgent", priority=95)
    dispatch(ports)
    assert not ports.store.rows["victim"].yields
    asked(ports, team="urgent", preempt_from=90)
    asked(ports, team="research", preemptible=False)
    dispatch(ports)
    assert not ports.store.rows["victim"].yields
    asked(ports, team="research", preemptible=True)
    dispatch(ports)
    assert ports.store.rows["victim"].yields


# -- making room -------------------------------------------------------------------------------------------------------


def an_urgent_job_against_a_running_one(ports: FakePorts) -> None:
    quota(ports, gpus=16)
    may_ask(ports)
    waiting(ports, "victim", priority=10)
    dispatch(ports)
    for event in (b.intended(), b.bought(), b.ready(), b.training(), b.saved(25)):
        record(event, "victim", ports)
    waiting(ports, "urgent", team="urgent", priority=95)
    dispatch(ports)


def test_room_is_made_by_a_committed_save_and_never_by_a_kill(ports: FakePorts) -> None:
    an_urgent_job_against_a_running_one(ports)
    victim = ports.store.rows["victim"]
    assert (victim.phase, action_for(victim)) == (Phase.RUNNING, Action.CHECKPOINT)
    assert ports.store.orders["victim"].generation == victim.version
    assert ports.store.rows["urgent"].waiting.code is Code.MAKING_ROOM  # type: ignore[union-attr]
    writes = ports.store.writes
    ports.clock.step(60)
    dispatch(ports)
    assert ports.store.writes == writes, "asked once"
    assert ports.store.rows["victim"].phase is Phase.RUNNING, "no deadline ends it without a save"
    released = record(b.saved(40, number=2), "victim", ports)
    assert (released.phase, action_for(released)) == (Phase.RESUMING, Action.WAIT)
    assert released.reason == "gave its place to urgent, which is urgent"
    assert dispatch(ports) == [], "its machines count until they are gone"
    close_attempt("victim", 1, ports)
    assert dispatch(ports) == ["urgent"]
    victim = ports.store.rows["victim"]
    assert (victim.dispatchable, victim.charged) == (True, {})
    assert victim.waiting is not None


def test_a_save_that_is_told_again_makes_no_room(ports: FakePorts) -> None:
    an_urgent_job_against_a_running_one(ports)
    assert record(b.saved(25), "victim", ports).phase is Phase.RUNNING


def test_a_job_whose_ranks_have_not_started_makes_room_at_once(ports: FakePorts) -> None:
    quota(ports, gpus=16)
    may_ask(ports)
    waiting(ports, "victim", priority=10)
    dispatch(ports)
    waiting(ports, "urgent", team="urgent", priority=95)
    dispatch(ports)
    assert ports.store.rows["victim"].phase is Phase.RESUMING


# -- cost --------------------------------------------------------------------------------------------------------------


def test_a_dispatch_reads_a_page_a_team_and_four_times_more(ports: FakePorts) -> None:
    for n in range(200):
        waiting(ports, f"j{n:03d}", team=f"team-{n % 50:02d}", submitted_at=b.NOW - n)
    quota(ports, gpus=64)
    calls: Counter[str] = Counter()
    for name in ("teams", "quotas", "ledger", "line", "load_all", "load", "load_for", "waits", "request", "waiting"):
        counted(ports.store, name, calls)
    assert len(dispatch(ports)) == 4
    del calls["waiting"]  # how the fake makes its pages
    assert calls == {"teams": 1, "quotas": 1, "ledger": 1, "load_all": 1, "line": 50}


def counted(store: Any, name: str, calls: Counter[str]) -> None:
    real = getattr(store, name)

    def call(*args: Any) -> Any:
        calls[name] += 1
        return real(*args)

    setattr(store, name, call)


def test_a_ledger_that_never_moved_is_version_0() -> None:
    assert FakePorts().store.ledger() == Ledger()
