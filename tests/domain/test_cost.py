"""What a job has cost is read off the intervals in which machines were its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.domain import recovery
from holdfast.domain.catalogue import InstanceType, Offers, prices_of
from holdfast.domain.cost import cost
from holdfast.domain.events import GaveUp, LimitPassed, LimitsExtended, RetryRequested, SurvivorsHeld
from holdfast.domain.job import Job
from holdfast.domain.keys import dedup_key
from holdfast.domain.phase import Intent, Phase
from holdfast.domain.placement import ANY, node_price
from job_contract.version import encode
from tests import builders as b

HOUR = 3600.0


def at(event: Any, later_s: float) -> Any:
    return replace(event, at=b.NOW + later_s)


def a_training_job(usd_h: float | None = 2.0, **changes: Any) -> Job:
    """Two nodes at this price an hour, bought at NOW."""
    fleet = replace(b.bought(), node_usd_h=usd_h)
    return b.after(b.a_job(**changes), b.started(), b.intended(), fleet, b.ready(), b.training())


def held(until_s: float) -> SurvivorsHeld:
    return SurvivorsHeld(at=b.NOW + HOUR, attempt=1, instances=(b.LEADER,), until=b.NOW + until_s, why="")


def test_a_running_job_costs_its_nodes_since_they_were_bought() -> None:
    assert cost(a_training_job(), b.NOW + HOUR / 2).usd == 2.0
    assert cost(b.a_job(), b.NOW + HOUR).usd == 0.0


def test_the_intervals_of_all_attempts_add_up_each_at_its_own_price() -> None:
    job = b.after(a_training_job(usd_h=2.0), b.lost(), at(b.closed(), HOUR))
    second = (at(b.started(2), 2 * HOUR), b.intended(2), replace(b.bought(2), at=b.NOW + 3 * HOUR, node_usd_h=5.0))
    job = b.after(job, *second)
    assert cost(job, b.NOW + 3 * HOUR).usd == 4.0
    assert cost(job, b.NOW + 4 * HOUR).usd == 14.0
    done = b.after(job, b.finished(2), at(b.closed(2), 4 * HOUR))
    assert (cost(done, b.NOW + 9 * HOUR).usd, done.node_seconds) == (14.0, 4 * HOUR)


def test_a_fact_that_is_told_again_costs_nothing_more() -> None:
    job = b.after(a_training_job(), b.lost(), at(b.closed(), HOUR))
    assert b.after(job, at(b.closed(), 2 * HOUR), b.bought(), b.lost()) == job


def test_held_machines_cost_until_they_are_taken_over_or_let_go() -> None:
    job = b.after(a_training_job(), b.lost(), held(HOUR + 600), at(b.closed(), HOUR))
    assert cost(job, b.NOW + HOUR + 360).usd == 4.2
    late = cost(job, b.NOW + 9 * HOUR).usd
    assert late == pytest.approx(4.0 + 2.0 / 6)
    taken = b.after(
        job, at(b.started(2), HOUR), b.intended(2), replace(b.bought(2), at=b.NOW + HOUR + 360, node_usd_h=2.0)
    )
    assert (taken.held, cost(taken, b.NOW + HOUR + 360).usd) == ((), 4.2)
    cancelled = b.after(job, at(b.cancelled(), HOUR + 360))
    assert (cancelled.phase, cost(cancelled, b.NOW + 9 * HOUR).usd) == (Phase.CANCELLED, 4.2)


def test_what_has_no_price_is_told_as_time_and_never_as_nothing() -> None:
    total = cost(b.after(a_training_job(usd_h=None), b.finished(), at(b.closed(), HOUR)), b.NOW + HOUR)
    assert (total.known_usd, total.unpriced_s) == (None, 2 * HOUR)
    assert cost(b.a_job(), b.NOW).known_usd == 0.0


def test_the_row_does_not_grow_with_interruptions() -> None:
    def after_losses(job: Job, first: int, times: int) -> Job:
        for number in range(first, first + times):
            events = (b.started(number), b.intended(number), b.bought(number), b.lost(attempt=number), b.closed(number))
            job = b.after(job, *events)
        return job

    few = after_losses(b.a_job(), 1, 10)
    many = after_losses(few, 11, 80)
    assert abs(len(str(encode(many))) - len(str(encode(few)))) < 40


def test_a_gang_costs_the_average_of_its_markets_and_half_a_price_is_none() -> None:
    prices = {("a.large", "z1", "spot"): 1.0, ("a.large", ANY, "on_demand"): 4.0}
    assert node_price(prices, "a.large", "z1", ["on_demand", "spot", "spot"]) == 2.0
    assert node_price(prices, "a.large", "z2", ["on_demand", "spot"]) is None
    assert node_price(prices, "a.large", "z2", []) is None


def test_on_demand_prices_hold_in_every_zone_and_spot_prices_in_their_own() -> None:
    kind = InstanceType(name="a.large", vcpus=2, memory_bytes=1, spot_usd={"z1": 1.0}, on_demand_usd=4.0)
    offers = Offers(types={"a.large": kind})
    assert prices_of(offers, "spot") == {("a.large", "z1", "spot"): 1.0}
    assert prices_of(offers, "on_demand") == {("a.large", ANY, "on_demand"): 4.0}


# -- the budget --------------------------------------------------------------------------------------------------------


def passed(job: Job, later_s: float) -> LimitPassed:
    limit = recovery.passed(job, b.NOW + later_s)
    assert limit is not None
    return LimitPassed(at=b.NOW + later_s, attempt=job.attempt, reason=limit.reason, failure=limit.failure)


def extended(usd: float, later_s: float = HOUR) -> LimitsExtended:
    return LimitsExtended(at=b.NOW + later_s, request=f"more-{usd}", budget_usd=usd)


def test_a_budget_is_passed_when_it_is_spent_and_without_a_price_never() -> None:
    job = a_training_job(budget_usd=4.0)
    assert recovery.passed(job, b.NOW + HOUR - 1) is None
    limit = recovery.passed(job, b.NOW + HOUR)
    assert limit is not None
    assert limit.failure == "budget_spent"
    told = ("4.00 USD", "limits.budget_usd = 4", f"extend {job.id} --budget-usd", f"retry {job.id}")
    assert [word for word in told if word not in limit.reason] == []
    assert recovery.passed(a_training_job(usd_h=None, budget_usd=4.0), b.NOW + 20 * HOUR) is None


def test_a_spent_budget_saves_first_and_ends_the_job_with_what_it_cost_in_the_end() -> None:
    job = a_training_job(budget_usd=4.0)
    stopping = b.after(job, passed(job, HOUR))
    assert (stopping.phase, stopping.intent) == (Phase.RUNNING, Intent.EXPIRE)
    lost_too = b.after(stopping, b.saved(40, final=True), b.lost(), at(b.closed(), 1.25 * HOUR))
    assert (lost_too.phase, lost_too.failure) == (Phase.FAILED, "budget_spent")
    assert "about 5.00 USD of limits.budget_usd = 4 are spent" in lost_too.reason


def test_a_budget_extended_while_the_job_stops_lets_it_go_on_after_the_save() -> None:
    job = a_training_job(budget_usd=4.0)
    stopping = b.after(job, passed(job, HOUR), extended(100.0))
    assert stopping.intent is Intent.EXPIRE
    assert "goes on after this save" in stopping.reason
    going_on = b.after(stopping, b.saved(40, final=True), at(b.closed(), 1.25 * HOUR))
    assert going_on.dispatchable
    assert (going_on.phase, going_on.intent, going_on.limit) == (Phase.RESUMING, Intent.RUN, None)


def test_a_budget_extended_by_too_little_ends_the_job_all_the_same() -> None:
    job = a_training_job(budget_usd=4.0)
    ended = b.after(job, passed(job, HOUR), extended(4.5), b.saved(40, final=True), at(b.closed(), 1.25 * HOUR))
    assert (ended.phase, ended.failure) == (Phase.FAILED, "budget_spent")
    assert "limits.budget_usd = 4.5" in ended.reason


def test_a_limit_that_is_passed_again_after_a_retry_stops_the_job_again() -> None:
    job = a_training_job(budget_usd=4.0)
    first = passed(job, HOUR)
    ended = b.after(job, first, b.saved(40, final=True), at(b.closed(), HOUR))
    again = b.after(ended, extended(8.0), RetryRequested(at=b.NOW + HOUR, request="retry"))
    assert (again.phase, again.limit) == (Phase.QUEUED, None)
    fleet = replace(b.bought(2), at=b.NOW + HOUR, node_usd_h=2.0)
    again = b.after(again, b.started(2), b.intended(2), fleet, b.ready(2), b.training(2, step=41))
    second = passed(again, 2 * HOUR)
    assert dedup_key(second) != dedup_key(first)
    assert b.after(again, second).intent is Intent.EXPIRE


def test_a_limit_of_an_attempt_that_is_over_changes_nothing() -> None:
    job = a_training_job(budget_usd=4.0)
    later = b.after(job, b.lost(), at(b.closed(), HOUR), b.started(2))
    assert b.after(later, passed(job, HOUR)) == later


def test_an_attempt_that_the_rest_of_the_budget_cannot_pay_for_is_not_worth_a_start() -> None:
    job = b.after(a_training_job(budget_usd=4.2), b.lost(), at(b.closed(), HOUR))
    # 0.20 USD are left; two nodes cost 4 USD an hour, so that is three minutes.
    why = recovery.unaffordable(job, b.NOW + HOUR)
    assert why is not None
    assert "0.20 USD pay for less than 300 s of training" in why.reason
    assert recovery.unaffordable(replace(job, budget_usd=4.4), b.NOW + HOUR) is None
    assert recovery.unaffordable(replace(job, budget_usd=4.4, boot_s=120.0), b.NOW + HOUR) is not None
    assert recovery.unaffordable(replace(job, budget_usd=None), b.NOW + HOUR) is None
    assert recovery.unaffordable(b.a_job(budget_usd=0.01), b.NOW) is None


def test_to_give_up_is_told_once_in_each_life_of_a_job_and_never_to_a_later_one() -> None:
    told = GaveUp(at=b.NOW, reason="spent", failure="budget_spent")
    ended = b.after(b.a_job(), told)
    assert (ended.phase, ended.failure) == (Phase.FAILED, "budget_spent")
    again = b.after(ended, RetryRequested(at=b.NOW + 1, request="retry"))
    assert b.after(again, told) == again
    second = replace(told, branch=again.branch)
    assert dedup_key(second) != dedup_key(told)
    assert b.after(again, second).phase is Phase.FAILED


def test_survivors_are_not_held_beyond_the_budget() -> None:
    job = b.after(a_training_job(budget_usd=4.1), b.lost())
    assert recovery.after_loss(replace(job, boot_s=600.0), [b.LEADER], b.NOW + HOUR).instances == ()
    rich = replace(job, boot_s=600.0, budget_usd=50.0)
    assert recovery.after_loss(rich, [b.LEADER], b.NOW + HOUR).instances == (b.LEADER,)
