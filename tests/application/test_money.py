"""What machines cost follows the job, and a budget ends it after a save."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from holdfast.application.control import obey
from holdfast.application.dispatch import dispatch
from holdfast.application.launch import Launch
from holdfast.application.news import phase_change, publish
from holdfast.application.record import record
from holdfast.application.release import close_attempt, release_fleet
from holdfast.application.sweep import Sweep
from holdfast.application.terms import terms
from holdfast.domain.catalogue import InstanceType, Offers
from holdfast.domain.cost import cost
from holdfast.domain.events import BudgetNearlySpent, Event, FleetBought
from holdfast.domain.job import Job
from holdfast.domain.phase import Phase
from holdfast.domain.placement import Candidate, candidates
from holdfast.domain.purchase import Bought, Refusal, RefusalKind, Reservation, ReservationKind
from holdfast.messages.control_request import read_control
from job_contract.orders import Action
from tests import builders as b
from tests.application.fakes import FakePorts

JOB = "demo-0123456789"
CHEAP = InstanceType(name="c7i.large", vcpus=2, memory_bytes=1, spot_usd={"us-east-1a": 0.04}, on_demand_usd=0.10)


@pytest.fixture
def ports() -> FakePorts:
    ports = FakePorts()
    ports.catalogue.known = Offers(types={"c7i.large": CHEAP})
    return ports


def wanted(market: str = "spot", **more: Any) -> tuple[Candidate, ...]:
    return candidates(instance_types=["c7i.large"], market=market, zones=(), nodes=2, **more)


def launch(ports: FakePorts, asked: Sequence[Candidate] | None = None) -> Job:
    job = ports.store.rows[JOB]
    step = Launch(ports, terms=terms)
    step.run(JOB, job.attempt, candidates=asked or wanted(), prefix="p", time_left_s=120)
    return ports.store.rows[JOB]


def wish(action: str, **more: Any) -> Any:
    return read_control(json.dumps({"schema": "holdfast.control/1", "job": JOB, "action": action, **more}))


def dispatched(ports: FakePorts, **changes: Any) -> Job:
    ports.holding(b.a_job(**changes))
    assert dispatch(ports) == [JOB]
    return ports.store.rows[JOB]


def training(ports: FakePorts, usd_h: float, **changes: Any) -> Job:
    """A job that trains on two nodes at this price an hour, and whose machines are there."""
    bought = replace(b.bought(), node_usd_h=usd_h)
    changes = {"report_s": 10**6, **changes}
    job = ports.holding(b.after(b.a_job(**changes), b.started(), b.intended(), bought, b.ready(), b.training()))
    ports.owning(job, b.LEADER, b.OTHER)
    ports.workflow.start(job.id, 1)
    return job


@pytest.mark.parametrize(
    ("asked", "usd_h"),
    [
        (wanted("spot"), 0.04),
        (wanted("on_demand"), 0.10),
        (wanted("mixed", on_demand_floor=0.5), 0.07),
    ],
)
def test_a_fleet_carries_the_price_at_which_it_was_bought(
    ports: FakePorts, asked: tuple[Candidate, ...], usd_h: float
) -> None:
    dispatched(ports)
    if asked[0].market == "mixed":
        spot, on_demand = ports.fleets.part("c7i.large", 1), ports.fleets.part("c7i.large", 1, market="on_demand")
        ports.fleets.scripted = [Bought(parts=(spot, on_demand))]
    assert launch(ports, asked).node_usd_h == pytest.approx(usd_h)


def test_a_capacity_block_was_paid_for_when_it_was_reserved(ports: FakePorts) -> None:
    block = Reservation(
        id="cr-1",
        kind=ReservationKind.CAPACITY_BLOCK,
        instance_type="c7i.large",
        zone="us-east-1a",
        state="active",
        free=2,
    )
    ports.fleets.reservations = {"cr-1": block}
    dispatched(ports)
    assert launch(ports, wanted("on_demand", reservation="cr-1")).node_usd_h == 0.0


def test_a_catalogue_that_is_busy_holds_no_purchase_up(ports: FakePorts) -> None:
    dispatched(ports)
    ports.catalogue.busy = 9
    job = launch(ports)
    assert (job.gang, job.node_usd_h) == (2, None)


def test_a_launch_that_died_before_it_told_keeps_the_price_of_the_purchase(
    ports: FakePorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatched(ports)
    usual = ports.store.save

    def dies(before: Job, after: Job, event: Event, *more: Any) -> None:
        if type(event) is FleetBought:
            raise RuntimeError("killed")
        usual(before, after, event, *more)

    monkeypatch.setattr(ports.store, "save", dies)
    with pytest.raises(RuntimeError, match="killed"):
        launch(ports)
    monkeypatch.undo()
    ports.catalogue.known = Offers(types={"c7i.large": replace(CHEAP, spot_usd={"us-east-1a": 9.0})})
    job = launch(ports)
    assert (job.gang, job.node_usd_h, len(ports.fleets.purchases)) == (2, 0.04, 1)
    assert launch(ports) == job


def test_survivors_and_new_nodes_go_on_at_the_price_of_their_pool(ports: FakePorts) -> None:
    training(ports, 0.04)
    ports.clock.step(3600)
    ports.fleets.kill(b.OTHER)
    record(replace(b.lost(), at=ports.clock()), JOB, ports)
    release_fleet(JOB, 1, ports)
    close_attempt(JOB, 1, ports)
    ports.clock.step(30)
    assert dispatch(ports) == [JOB]
    ports.catalogue.known = Offers(types={"c7i.large": replace(CHEAP, spot_usd={"us-east-1a": 0.08})})
    job = launch(ports)
    assert (job.gang, job.node_usd_h) == (2, 0.08)
    assert cost(job, ports.clock()).usd == pytest.approx(0.08 + 30 / 3600 * 0.04, abs=1e-6)


def test_news_and_result_tell_the_cost(ports: FakePorts) -> None:
    job = training(ports, 1.0)
    assert phase_change(replace(job, phase_at=b.NOW + 1800))["cost_usd"] == 1.0
    ended = b.after(job, b.finished(), replace(b.closed(), at=b.NOW + 3600))
    publish(job, ended, bucket="saves", outbox=ports.outbox)
    (result,) = ports.outbox.results.values()
    assert (result["cost_usd"], "unpriced_node_seconds" in result) == (2.0, False)


def warnings(ports: FakePorts) -> list[BudgetNearlySpent]:
    return [one for one in ports.store.events[JOB].values() if isinstance(one, BudgetNearlySpent)]


def test_a_job_is_warned_once_at_80_percent_of_its_budget_and_goes_on(ports: FakePorts) -> None:
    job = training(ports, 1.0, budget_usd=5.0, run_s=10**8)
    ports.clock.step(2 * 3600 - 1)
    assert (Sweep(ports).run(), ports.store.rows[JOB]) == ([], job)
    ports.clock.step(1)
    sweep = Sweep(ports)
    [finding] = sweep.run()
    assert finding.what == "most of the budget is spent"
    for words in ("about 4.00 USD of limits.budget_usd = 5 are spent", f"holdfast extend {JOB} --budget-usd USD"):
        assert words in finding.done
    assert sweep.vitals.found["BudgetWarnings"] == 1.0
    warned = ports.store.rows[JOB]
    assert (warned.phase, warned.intent, warned.generation) == (Phase.RUNNING, job.intent, job.generation)
    ports.clock.step(600)
    again = Sweep(ports)
    assert (again.run(), "BudgetWarnings" in again.vitals.found, len(warnings(ports))) == ([], False, 1)


def test_a_budget_that_is_extended_warns_again_at_its_own_80_percent(ports: FakePorts) -> None:
    training(ports, 1.0, budget_usd=5.0, run_s=10**8)
    ports.clock.step(2 * 3600)
    Sweep(ports).run()
    obey(wish("extend", budget_usd=10), ports)
    assert Sweep(ports).run() == []
    ports.clock.step(2 * 3600)
    Sweep(ports).run()
    assert [(one.budget_usd, one.cost_usd) for one in warnings(ports)] == [(5.0, 4.0), (10.0, 8.0)]


def test_a_budget_that_is_spent_before_anybody_looked_ends_the_job_without_a_warning(ports: FakePorts) -> None:
    training(ports, 1.0, budget_usd=5.0, run_s=10**8)
    ports.clock.step(3 * 3600)
    Sweep(ports).run()
    assert (warnings(ports), ports.store.rows[JOB].limit) == ([], "budget_spent")


def test_the_warning_is_news_of_its_own_and_repeats_nothing_of_the_phase(ports: FakePorts) -> None:
    before = training(ports, 1.0, budget_usd=5.0, run_s=10**8)
    ports.clock.step(2 * 3600)
    Sweep(ports).run()
    after = ports.store.rows[JOB]
    for _ in range(2):
        assert publish(before, after, bucket="saves", outbox=ports.outbox)
    told = [news_id for news_id, _ in ports.outbox.published]
    assert told == [f"{JOB}#budget#5"] * 2
    later = replace(after, version=after.version + 1)
    assert not publish(after, later, bucket="saves", outbox=ports.outbox)


# -- vCPU quotas -------------------------------------------------------------------------------------------------------


def test_a_gang_that_the_accounts_quota_cannot_hold_waits_and_no_call_is_made(ports: FakePorts) -> None:
    ports.catalogue.known = Offers(types={"c7i.large": CHEAP}, quotas={"L-34B43A08": 3.0})
    dispatched(ports)
    refused = launch(ports)
    assert (ports.fleets.calls, refused.failure, refused.over_quota) == ([], "capacity", True)
    for word in ("2 c7i.large need 4 vCPUs", "may run 3 (spot)", "L-34B43A08"):
        assert word in refused.reason
    close_attempt(JOB, 1, ports)
    assert dispatch(ports) == []
    row = ports.store.rows[JOB]
    assert row.waiting is not None
    assert (row.waiting.code, row.waiting.until, row.charged) == ("account_quota", row.not_before, {"capacity": 1})
    assert "Service Quotas" in row.waiting.unblock


def test_what_our_own_machines_use_of_a_quota_is_not_there_for_others(ports: FakePorts) -> None:
    ports.catalogue.known = Offers(types={"c7i.large": CHEAP}, quotas={"L-34B43A08": 6.0, "L-1216C47A": 99.0})
    dispatched(ports)
    for number, market in enumerate(("spot", "spot", "on_demand")):
        instance = f"i-0bbbbbbbbbbbbbbb{number}"
        ports.fleets.add(instance, job="other", fleet="other-1-0")
        ports.fleets.instances[instance] = replace(ports.fleets.instances[instance], market=market)
    step = Launch(ports, terms=terms)
    step.run(JOB, 1, candidates=wanted(), prefix="p", time_left_s=120)
    assert "of which this stack uses 4" in ports.store.rows[JOB].reason
    # A job that ends frees it, so nobody is woken for it.
    assert (ports.fleets.calls, step.quotas_reached) == ([], 0)
    assert ports.store.rows[JOB].not_before < ports.clock() + 600


def test_a_quota_stops_its_own_market_only(ports: FakePorts) -> None:
    ports.catalogue.known = Offers(types={"c7i.large": CHEAP}, quotas={"L-34B43A08": 3.0})
    dispatched(ports)
    assert launch(ports, (*wanted("spot"), *wanted("on_demand"))).gang == 2
    assert [purchase.market for purchase in ports.fleets.purchases] == ["on_demand"]


def test_a_mixed_gang_needs_both_its_quotas_each_for_its_share(ports: FakePorts) -> None:
    ports.catalogue.known = Offers(types={"c7i.large": CHEAP}, quotas={"L-34B43A08": 2.0, "L-1216C47A": 1.0})
    dispatched(ports)
    refused = launch(ports, wanted("mixed", on_demand_floor=0.5))
    assert ports.fleets.calls == []
    assert "1 c7i.large need 2 vCPUs, the account may run 1 (on_demand)" in refused.reason


def test_a_quota_beside_another_reason_is_no_matter_of_quotas_alone(ports: FakePorts) -> None:
    ports.catalogue.known = Offers(types={"c7i.large": CHEAP}, quotas={"L-34B43A08": 3.0})
    ports.fleets.short = 0
    dispatched(ports)
    refused = launch(ports, (*wanted("spot"), *wanted("on_demand")))
    assert (refused.failure, refused.over_quota) == ("capacity", False)


def test_what_ec2_says_of_a_quota_is_told_as_one_also_while_the_family_is_left_alone(ports: FakePorts) -> None:
    told = Refusal(code="VcpuLimitExceeded", kind=RefusalKind.QUOTA, cool_s=1800)
    ports.fleets.scripted = [Bought(refusals=(told,))]
    dispatched(ports)
    assert launch(ports).over_quota
    close_attempt(JOB, 1, ports)
    ports.clock.now = ports.store.rows[JOB].not_before - 1000
    ports.store.rows[JOB] = replace(ports.store.rows[JOB], not_before=0.0)
    assert dispatch(ports) == [JOB]
    assert launch(ports).over_quota
    assert len(ports.fleets.calls) == 1


def test_what_this_stack_uses_is_left_out_where_ec2_does_not_say(ports: FakePorts) -> None:
    ports.catalogue.known = Offers(types={"c7i.large": CHEAP}, quotas={"L-34B43A08": 4.0})
    dispatched(ports)
    ports.fleets.add("i-0bbbbbbbbbbbbbbb1", job="other", fleet="other-1-0", instance_type="x9.large")
    ports.fleets.unknown_types = {"x9.large"}
    assert launch(ports).gang == 2


# -- the budget --------------------------------------------------------------------------------------------------------


def test_a_job_that_has_spent_its_budget_saves_first_and_fails_with_the_way_out(ports: FakePorts) -> None:
    training(ports, 2.0, budget_usd=4.0)
    ports.clock.step(3599)
    assert [finding.what for finding in Sweep(ports).run()] == ["most of the budget is spent"]
    ports.clock.step(1)
    [finding] = Sweep(ports).run()
    assert (finding.what, finding.who) == ("limit", JOB)
    assert ports.store.orders[JOB].action is Action.CHECKPOINT_STOP
    stopping = ports.store.rows[JOB]
    ports.clock.step(60)
    assert Sweep(ports).run() == []
    assert ports.store.rows[JOB] == stopping
    record(replace(b.saved(40, final=True), at=ports.clock()), JOB, ports)
    release_fleet(JOB, 1, ports)
    ended = close_attempt(JOB, 1, ports)
    assert (ended.phase, ended.failure, ended.durable_step) == (Phase.FAILED, "budget_spent", 40)
    assert ports.fleets.live == []
    assert "limits.budget_usd = 4" in ended.reason


def test_a_job_that_failed_on_its_budget_goes_on_after_extend_and_retry_and_not_after_a_retry_alone(
    ports: FakePorts,
) -> None:
    training(ports, 2.0, budget_usd=4.0)
    ports.clock.step(3600)
    Sweep(ports).run()
    record(b.saved(40, final=True), JOB, ports)
    close_attempt(JOB, 1, ports)
    for again in ("once", "twice"):
        obey(wish("retry", dedup_id=again), ports)
        assert dispatch(ports) == []
        row = ports.store.rows[JOB]
        assert (row.phase, row.failure, row.attempt) == (Phase.FAILED, "budget_spent", 1)
    obey(wish("extend", budget_usd=40), ports)
    obey(wish("retry", dedup_id="thrice"), ports)
    assert dispatch(ports) == [JOB]


def test_machines_held_for_a_job_that_cannot_pay_are_let_go(ports: FakePorts) -> None:
    training(ports, 2.0, budget_usd=4.05)
    ports.clock.step(3600)
    ports.fleets.kill(b.OTHER)
    record(replace(b.lost(), at=ports.clock()), JOB, ports)
    release_fleet(JOB, 1, ports)
    close_attempt(JOB, 1, ports)
    assert ports.store.rows[JOB].held == (b.LEADER,)
    assert dispatch(ports) == []
    assert ports.store.rows[JOB].failure == "budget_spent"
    assert ports.fleets.live == []
