"""The life of a job, and what no order of events can do to it."""

from __future__ import annotations

import itertools
import random
from dataclasses import fields
from typing import Any

import pytest

from holdfast.domain import events, failure
from holdfast.domain.errors import IllegalTransition
from holdfast.domain.job import Job
from holdfast.domain.keys import dedup_key
from holdfast.domain.ledger import Reserved
from holdfast.domain.obligations import READ_BY_ORDERS, action_for, projection
from holdfast.domain.phase import ENDED, Intent, Phase
from holdfast.domain.transitions import RULES, TABLE, advance
from job_contract.orders import Action
from tests import builders as b


def test_the_story_of_one_interruption() -> None:
    job = b.a_job()
    phases = []
    story = [
        b.started(), b.intended(), b.bought(), b.ready(), b.training(), b.saved(25), b.noticed(), b.heard(),
        b.saved(37, number=2, final=True), b.closed(), b.started(2), b.intended(2), b.bought(2), b.ready(2),
        b.training(2, step=38), b.finished(2), b.closed(2),
    ]  # fmt: skip
    for event in story:
        job = advance(job, event)
        if not phases or phases[-1] != job.phase:
            phases.append(job.phase)
    assert [phase.value for phase in phases] == [
        "launching", "running", "interrupted", "checkpointing", "resuming", "launching", "running", "completed",
    ]  # fmt: skip
    assert (job.attempt, job.interruptions, job.forced_checkpoints, job.over) == (2, 1, 1, True)
    assert job.saved is not None
    assert job.saved.save == "step-00000037.a0001.s02"
    assert job.charged == {}


def test_every_event_has_a_rule_and_a_row_in_the_table() -> None:
    kinds = {kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, events.Event)}
    assert set(RULES) == set(TABLE) == kinds - {events.Event, events.AttemptEvent}


def test_nothing_is_dispatched_before_its_last_attempt_is_closed() -> None:
    job = b.after(b.a_running_job(), b.lost())
    assert job.phase is Phase.RESUMING
    assert not job.dispatchable
    assert advance(job, b.started(2)) is job
    assert advance(b.after(job, b.closed()), b.started(2)).attempt == 2


def test_a_late_notice_of_an_old_attempt_changes_nothing() -> None:
    job = b.after(b.a_running_job(), b.lost(), b.closed(), b.started(2))
    for event in (b.noticed(), b.lost(), b.failed(), b.finished(), b.ready(), b.training(), b.heard(), b.closed()):
        assert advance(job, event) is job


def test_a_late_save_of_an_old_attempt_is_remembered_and_moves_no_phase() -> None:
    job = b.after(b.a_running_job(), b.saved(25), b.lost(), b.closed(), b.started(2))
    later = advance(job, b.saved(50, number=2, final=True))
    assert later.phase is Phase.LAUNCHING
    assert later.saved is not None
    assert later.saved.save == "step-00000050.a0001.s02"
    assert advance(later, b.saved(25)) is later


def test_an_event_of_an_attempt_that_was_never_started_is_our_fault() -> None:
    with pytest.raises(IllegalTransition):
        advance(b.a_running_job(), b.lost(attempt=7))


def test_a_job_that_has_ended_is_moved_by_nothing() -> None:
    done = b.after(b.a_running_job(), b.finished(), b.closed())
    assert done.over
    for event in (b.noticed(), b.lost(), b.failed(), b.cancelled(), b.closed(), b.started(2), b.saved(120)):
        assert advance(done, event).phase is Phase.COMPLETED


def test_a_notice_before_the_start_order_gives_the_fleet_up() -> None:
    job = b.after(b.a_job(), b.started(), b.intended(), b.bought(), b.noticed())
    assert (job.phase, job.failure) == (Phase.RESUMING, "preemption")


def test_the_death_of_the_doomed_node_waits_for_the_save_of_the_others() -> None:
    job = b.after(b.a_running_job(), b.noticed())
    assert advance(job, b.lost(b.OTHER)) is job
    assert advance(job, b.lost(b.LEADER)).phase is Phase.RESUMING


def test_two_notices_are_one_recovery() -> None:
    job = b.after(b.a_running_job(), b.noticed(b.OTHER), b.noticed(b.LEADER))
    assert job.doomed == (b.OTHER, b.LEADER)
    job = b.after(job, b.saved(30, final=True), b.closed())
    assert job.dispatchable
    assert job.forced_checkpoints == 1


@pytest.mark.parametrize(
    "phase_events", [(), (b.noticed(),), (b.noticed(), b.heard())], ids=["running", "noticed", "heard"]
)
def test_cancel_while_training_saves_first(phase_events: tuple[events.Event, ...]) -> None:
    job = b.after(b.a_running_job(), *phase_events, b.cancelled())
    assert job.intent is Intent.CANCEL
    assert action_for(job) is Action.CHECKPOINT_STOP
    assert b.after(job, b.saved(30, final=True), b.closed()).phase is Phase.CANCELLED


def test_cancel_before_the_start_order_releases() -> None:
    job = b.after(b.a_job(), b.started(), b.intended(), b.bought(), b.cancelled())
    assert action_for(job) is Action.RELEASE
    assert b.after(job, b.closed()).phase is Phase.CANCELLED


def test_cancel_of_a_waiting_job_is_at_once() -> None:
    job = advance(b.a_job(), b.cancelled())
    assert job.over
    assert job.phase is Phase.CANCELLED


def test_refused_capacity_charges_nothing_and_waits_for_its_time() -> None:
    job = b.after(b.a_job(), b.started(), b.intended())
    refused = events.CapacityRefused(at=b.NOW, attempt=1, reason="0 of 2", not_before=b.NOW + 60)
    job = b.after(job, refused, b.closed())
    assert (job.phase, job.dispatchable, job.not_before) == (Phase.RESUMING, True, b.NOW + 60)
    assert failure.spent(job.charged, "capacity", 1) is None


@pytest.mark.parametrize("kind", ["out_of_memory", "user_error", "diverged"])
def test_a_fault_that_would_come_again_fails_the_job_at_once(kind: str) -> None:
    job = b.after(b.a_running_job(), b.failed(kind), b.closed())
    assert job.phase is Phase.FAILED
    assert failure.CLASSES[kind].advice in job.reason


def test_budgets_do_not_cross_charge() -> None:
    job = b.a_job(attempts_limit=100)
    for attempt in range(1, 12):
        kind = "crash" if attempt % 4 == 0 else "preemption"
        job = b.after(job, b.started(attempt), b.failed(kind, attempt), b.closed(attempt))
    assert job.phase is Phase.RESUMING
    assert job.charged == {"preemption": 9, "crash": 2}


def test_peers_that_die_of_a_preemption_are_charged_to_it() -> None:
    job = b.after(b.a_running_job(), b.noticed(), b.failed("peer_lost"), b.closed())
    assert job.charged == {"preemption": 1}


def test_a_node_under_notice_that_takes_its_job_with_it_is_a_preemption() -> None:
    job = b.after(b.a_running_job(nodes=1), b.noticed(b.LEADER), b.closed())
    assert job.charged == {"preemption": 1}
    job = b.after(b.a_running_job(), b.noticed(), b.failed("lost"), b.closed())
    assert job.charged == {"preemption": 1}


def test_a_save_is_waited_for_while_somebody_is_left_to_commit_it_and_no_longer() -> None:
    job = b.after(b.a_running_job(), b.noticed(), b.noticed(b.LEADER))
    assert b.after(job, b.lost(b.OTHER)) is job
    assert b.after(job, b.lost(b.OTHER, b.LEADER)).phase is Phase.RESUMING


def test_limits_attempts_ends_a_job_that_keeps_failing() -> None:
    job = b.a_job(attempts_limit=2)
    for attempt in (1, 2):
        job = b.after(job, b.started(attempt), b.failed("hardware", attempt), b.closed(attempt))
    assert job.phase is Phase.FAILED
    assert "limits.attempts = 2" in job.reason


def test_an_attempt_that_closes_without_news_was_lost() -> None:
    job = b.after(b.a_running_job(), b.closed())
    assert (job.phase, job.charged, job.dispatchable) == (Phase.RESUMING, {"lost": 1}, True)


def test_orders_change_their_generation_only_when_they_change() -> None:
    job = b.a_running_job()
    saved = advance(job, b.saved(25))
    assert saved.version == job.version + 1
    assert saved.generation == job.generation
    noticed = advance(saved, b.noticed())
    assert noticed.generation == noticed.version > job.generation


NODE_FACTS = [
    b.ready(), b.training(), b.saved(25), b.noticed(), b.noticed(b.LEADER), b.heard(),
    b.saved(37, number=2, final=True), b.lost(), b.lost(b.LEADER), b.failed("peer_lost"), b.failed("crash"),
    b.finished(),
]  # fmt: skip


def _tell(job: Job, told: list[events.Event]) -> Job:
    seen: set[str] = set()
    for event in told:
        if dedup_key(event) in seen:
            continue
        moved = advance(job, event)
        if moved is not job:
            seen.add(dedup_key(event))
            assert moved.version == job.version + 1
            assert moved.attempt >= job.attempt
            assert moved.generation >= job.generation
        job = moved
    return job


def test_no_order_of_node_facts_raises_or_loses_a_save() -> None:
    """20,000 random orders, with repeats and gaps, from the moment the fleet is bought."""
    rng = random.Random(7)
    launched = b.after(b.a_job(), b.started(), b.intended(), b.bought())
    for _ in range(20_000):
        told = rng.choices(NODE_FACTS, k=rng.randint(1, 14))
        job = _tell(launched, told)
        saves = [event.pointer.step for event in told if isinstance(event, events.CheckpointSaved)]
        if saves:
            assert job.saved is not None
            assert job.saved.save.startswith(f"step-{max(saves):08d}")
        ended = _tell(job, [b.closed()])
        assert ended.over or ended.dispatchable, (told, ended)


def test_every_delivery_order_of_one_interruption_ends_the_same() -> None:
    told = [b.noticed(), b.heard(), b.saved(37, number=2, final=True), b.lost(), b.failed("peer_lost"), b.saved(25)]
    ends = set()
    for order in itertools.permutations(told):
        job = _tell(b.a_running_job(), [*order, b.closed()])
        assert job.dispatchable
        assert job.saved is not None
        ends.add((job.phase, job.saved.save, job.attempt, tuple(job.charged.items()) in ((), (("preemption", 1),))))
    assert ends == {(Phase.RESUMING, "step-00000037.a0001.s02", 1, True)}


def test_a_cancel_at_any_point_of_the_story_ends_in_cancelled_or_completed() -> None:
    story = [
        b.started(), b.intended(), b.bought(), b.ready(), b.training(), b.noticed(), b.heard(),
        b.saved(37, final=True), b.closed(), b.started(2), b.intended(2), b.finished(2), b.closed(2),
    ]  # fmt: skip
    for at in range(len(story) + 1):
        job = b.a_job()
        for event in [*story[:at], b.cancelled(), *story[at:]]:
            if (
                isinstance(event, events.AttemptEvent)
                and event.attempt > job.attempt
                and not isinstance(event, events.AttemptStarted)
            ):
                continue
            job = advance(job, event)
        assert job.over, at
        assert job.phase in ENDED
        assert job.phase is not Phase.FAILED


def test_every_phase_has_a_sentence_for_its_user() -> None:
    job = b.a_job()
    for event in [b.started(), b.intended(), b.bought(), b.ready(), b.training(), b.noticed(), b.heard()]:
        assert job.stage
        job = advance(job, event)


def test_a_completed_job_has_a_sentence_too() -> None:
    done = b.after(b.a_running_job(), b.finished(), b.closed())
    assert done.reason == "all 120 steps are trained"


def test_the_orders_read_the_fields_that_they_are_said_to_read_and_no_other() -> None:
    read: set[str] = set()

    class Watched(Job):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    told = Reserved(vcpus=1, gpus=1, nodes=1, market="spot", yields_to="other")
    for phase, intent, roster, asked in itertools.product(Phase, Intent, (None, "1-roster"), (None, 7)):
        job = b.a_job(phase=phase, intent=intent, roster_id=roster, attempt_open=True, asked_generation=asked)
        for reserved in (None, told):
            watched = object.__new__(Watched)
            watched.__dict__.update(job.__dict__, reserved=reserved)
            projection(watched)
    assert read & {field.name for field in fields(Job)} == set(READ_BY_ORDERS)
