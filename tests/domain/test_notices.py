"""Hints, dates and loops: what they order, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.domain import events, failure, notices
from holdfast.domain.job import Job
from holdfast.domain.keys import dedup_key
from holdfast.domain.obligations import action_for, answers_for, orders_for
from holdfast.domain.phase import Phase
from holdfast.domain.transitions import advance
from job_contract.orders import Action, Wait
from tests import builders as b

COOL = notices.REBALANCE_COOL_DOWN_S


def hint(at: float = b.NOW, attempt: int = 1, until_at: float | None = None) -> events.EarlySaveAdvised:
    return events.EarlySaveAdvised(at=at, attempt=attempt, until_at=until_at, cause="rebalance")


def planned(by_at: float, *, after_save: bool = False) -> events.MovePlanned:
    return events.MovePlanned(at=b.NOW, attempt=1, instance=b.OTHER, by_at=by_at, after_save=after_save)


def due(by_at: float = b.NOW + 600) -> events.MoveDue:
    return events.MoveDue(at=b.NOW, attempt=1, by_at=by_at, cause="planned move")


def saved_at(at: float, step: int = 25, number: int = 1) -> events.CheckpointSaved:
    return replace(b.saved(step, number=number), at=at)


# -- hints -------------------------------------------------------------------------------------------------------------


def test_a_hint_orders_one_save_and_a_save_ends_the_order() -> None:
    asked = advance(b.a_running_job(), hint())
    assert (asked.phase, action_for(asked)) == (Phase.RUNNING, Action.CHECKPOINT)
    assert orders_for(asked, b.NOW).generation == asked.version == asked.asked_generation
    answered = advance(asked, saved_at(b.NOW + 5))
    assert (answered.phase, action_for(answered)) == (Phase.RUNNING, Action.RUN)
    assert answered.generation == answered.version


def test_a_save_made_before_the_ask_does_not_answer_it() -> None:
    asked = advance(b.a_running_job(), hint(at=b.NOW + 10))
    assert action_for(advance(asked, saved_at(b.NOW + 9))) is Action.CHECKPOINT


def test_hints_within_a_cool_down_are_one() -> None:
    asked = advance(b.a_running_job(), hint())
    assert advance(asked, hint(at=b.NOW + COOL - 1)) is asked
    again = advance(asked, hint(at=b.NOW + COOL))
    assert again.generation > asked.generation
    assert dedup_key(hint()) != dedup_key(hint(at=b.NOW + COOL))


@pytest.mark.parametrize(
    "happened",
    [(b.noticed(),), (b.noticed(), b.heard()), (b.lost(),), (b.cancelled(),), (b.finished(),)],
    ids=["interrupted", "checkpointing", "resuming", "cancelled", "completed"],
)
def test_a_hint_weakens_no_stronger_order(happened: tuple[events.Event, ...]) -> None:
    job = b.after(b.a_running_job(), *happened)
    assert advance(job, hint()) is job


def test_a_hint_before_the_ranks_train_is_nothing() -> None:
    """A node that joins reads `checkpoint` as an order not to start."""
    for job in (b.after(b.a_job(), b.started(), b.intended()), b.after(b.a_job(), b.started(), b.bought(), b.ready())):
        assert advance(job, hint()) is job


def test_an_interruption_overrules_the_ask() -> None:
    job = b.after(b.a_running_job(), hint(), b.noticed())
    assert action_for(job) is Action.CHECKPOINT_STOP


def test_an_ask_tells_no_waiting_state() -> None:
    job = advance(b.a_running_job(), hint())
    assert answers_for(job, b.NOW).get(Wait.TRAINING) is None


def test_a_new_attempt_has_new_machines_and_no_hints() -> None:
    job = b.after(b.a_running_job(), hint(until_at=b.NOW + 9), planned(b.NOW + 9), b.lost(), b.closed(), b.started(2))
    assert (job.save_asked_at, job.asked_generation, job.advised_until_at, job.move_by_at) == (None,) * 4


def test_while_advice_holds_saves_are_asked_for_more_often() -> None:
    job = b.after(b.a_running_job(), hint(until_at=b.NOW + 3600), saved_at(b.NOW + 5))
    assert not notices.early_save_due(job, b.NOW + COOL - 1)
    assert notices.early_save_due(job, b.NOW + COOL + 5)
    fresh = advance(job, saved_at(b.NOW + COOL, 50, 2))
    assert not notices.early_save_due(fresh, b.NOW + COOL + 5)
    assert not notices.early_save_due(job, b.NOW + 3600)


# -- dates -------------------------------------------------------------------------------------------------------------


def test_a_date_is_remembered_and_changes_no_order() -> None:
    job = b.a_running_job()
    noted = b.after(job, planned(b.NOW + 90_000), planned(b.NOW + 80_000), planned(b.NOW + 95_000))
    assert (noted.move_by_at, noted.phase, noted.generation) == (b.NOW + 80_000, Phase.RUNNING, job.generation)


def test_the_order_to_move_is_due_when_the_date_is_near() -> None:
    job = advance(b.a_running_job(), planned(b.NOW + 5_000))
    assert not notices.move_due(job, b.NOW + 5_000 - notices.MOVE_LEAD_S - 1)
    assert notices.move_due(job, b.NOW + 5_000 - notices.MOVE_LEAD_S)


def test_a_move_after_the_next_save_is_due_with_it() -> None:
    job = b.after(b.a_running_job(), saved_at(b.NOW - 60), planned(b.NOW + 90_000, after_save=True))
    assert not notices.move_due(job, b.NOW)
    assert notices.move_due(advance(job, saved_at(b.NOW + 60, 50, 2)), b.NOW + 60)


def test_a_move_saves_stops_and_is_charged_to_nobody() -> None:
    job = advance(b.a_running_job(market="on-demand"), due())
    assert (job.phase, action_for(job), job.deadline_at, job.doomed) == (
        Phase.INTERRUPTED, Action.CHECKPOINT_STOP, b.NOW + 600, (),
    )  # fmt: skip
    moved = b.after(job, b.heard(), b.saved(30, final=True), b.closed())
    assert (moved.dispatchable, moved.charged, moved.interruptions) == (True, {}, 0)


def test_machines_that_go_before_the_move_is_done_were_announced() -> None:
    job = b.after(b.a_running_job(market="on-demand"), due(), b.lost(), b.closed())
    assert job.charged == {"preemption": 1}


def test_a_move_only_brings_the_deadline_of_an_interruption_forward() -> None:
    job = advance(b.a_running_job(), b.noticed())
    assert advance(job, due(b.NOW + 600)) is job
    assert advance(job, due(b.NOW + 60)).deadline_at == b.NOW + 60


def test_a_move_before_the_ranks_run_gives_the_machines_back_uncharged() -> None:
    job = b.after(b.a_job(), b.started(), b.intended(), b.bought(), due(), b.closed())
    assert (job.phase, job.dispatchable, job.charged) == (Phase.RESUMING, True, {})


def test_a_move_has_the_time_of_an_ordered_stop_at_most_and_two_minutes_at_least() -> None:
    assert notices.move_deadline_at(b.NOW + 90_000, b.NOW) == b.NOW + notices.ORDERED_STOP_S
    assert notices.move_deadline_at(b.NOW + 300, b.NOW) == b.NOW + 300
    assert notices.move_deadline_at(b.NOW - 5_000, b.NOW) == b.NOW + notices.SOONEST_MOVE_S


def test_a_pool_whose_zone_is_not_known_has_no_name() -> None:
    known = b.after(b.a_job(), b.started(), b.intended(), b.bought())
    assert str(known.pool) == "c7i.large in us-east-1a (spot)"
    unknown = b.after(b.a_job(), b.started(), b.intended(), replace(b.bought(), zone=""))
    assert unknown.pool is None


# -- loops -------------------------------------------------------------------------------------------------------------


def attempt(job: Job, *happened: events.Event) -> Job:
    """The job after one more attempt in which these things happened."""
    number = job.attempt + 1
    told = [replace(event, attempt=number) if isinstance(event, events.AttemptEvent) else event for event in happened]
    return b.after(job, b.started(number), b.intended(number), b.training(number), *told, b.closed(number))


def test_three_attempts_in_a_row_that_end_alike_without_a_new_save_are_a_loop() -> None:
    job = b.a_job(attempts_limit=9)
    for _ in range(2):
        job = attempt(job, b.failed("crash"))
        assert job.dispatchable
    job = attempt(job, b.failed("crash"))
    assert job.phase is Phase.FAILED
    assert job.reason.startswith("crash: 3 attempts in a row ended so without one new checkpointed step; look at")


def test_one_new_durable_step_breaks_the_loop() -> None:
    job = b.a_job(attempts_limit=9)
    for number, step in enumerate((None, None, 25), start=1):
        saves = [b.saved(step, attempt=number)] if step else []
        job = attempt(job, *saves, b.failed("hardware"))
    assert (job.dispatchable, job.fruitless) == (True, 0)


def test_the_same_step_saved_again_is_not_progress() -> None:
    job = b.a_job(attempts_limit=9)
    for number in (1, 2, 3, 4):
        job = attempt(job, b.saved(25, attempt=number), b.failed("hardware"))
    assert job.phase is Phase.FAILED


def test_steps_caught_up_after_a_fall_back_are_progress() -> None:
    job = b.a_job(attempts_limit=9)
    job = attempt(job, b.saved(100), b.failed("hardware"))
    for number in (2, 3, 4):
        fell_back = replace(b.training(number, step=50), fell_back=("step-00000100.a0001.s01",))
        job = attempt(job, fell_back, b.saved(60 + number, attempt=number), b.failed("hardware"))
    assert job.dispatchable


def test_ends_without_a_part_of_the_job_neither_count_nor_break_a_loop() -> None:
    job = b.a_job(attempts_limit=9)
    for _ in range(30):
        job = attempt(job, b.lost())
    assert (job.dispatchable, job.fruitless) == (True, 0)
    for told in (b.failed("crash"), b.lost(), b.failed("crash"), b.failed("peer_lost"), b.failed("crash")):
        assert job.dispatchable
        job = attempt(job, told)
    assert job.phase is Phase.FAILED


def test_different_ends_are_no_loop() -> None:
    job = b.a_job(attempts_limit=9)
    for kind in ("crash", "hang", "crash", "network", "hang"):
        job = attempt(job, b.failed(kind))
    assert job.dispatchable


@pytest.mark.parametrize("name", failure.CLASSES)
def test_budgets_never_cross_charge(name: str) -> None:
    """However often another class has ended attempts, this class still has its whole budget."""
    rule = failure.CLASSES[name]
    others = {other: 99 for other in failure.CLASSES if other != name}
    spent = failure.spent({**others, name: (rule.budget or 0) - 1}, name, attempts_limit=10**6) if rule.budget else None
    assert spent is None
    if rule.budget is not None:
        assert failure.spent({name: rule.budget}, name, attempts_limit=10**6) is not None


def test_ends_that_do_not_count_spend_no_attempts() -> None:
    assert failure.spent({"preemption": 500, "capacity": 500, "peer_lost": 15}, "crash", attempts_limit=2) is None
