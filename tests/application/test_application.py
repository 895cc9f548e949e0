"""What the supervisor does with events, machines and silence; on fakes that race and lag."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast.application.control import obey, overtook_its_submit
from holdfast.application.dispatch import dispatch
from holdfast.application.launch import Launch
from holdfast.application.news import publish
from holdfast.application.node_reports import NodeReports
from holdfast.application.notices import Fate, interrupted, lost
from holdfast.application.record import record, settle
from holdfast.application.release import close_attempt, end_dead_attempt, release_fleet
from holdfast.application.sweep import START_GRACE_S, Sweep
from holdfast.application.waiting import leave_token
from holdfast.domain.errors import Raced, Rejected, Unavailable, UnknownJob
from holdfast.domain.job import Job
from holdfast.domain.obligations import answers_for
from holdfast.domain.ownership import ORPHAN_GRACE_S, SHOWN_WITHIN_S, FleetIntent, Node, Ownership
from holdfast.domain.phase import Intent, Phase
from holdfast.domain.placement import candidates
from holdfast.messages.control_request import read_control
from job_contract import reports
from job_contract.checkpoint_layout import SavePointer
from job_contract.orders import Action, Leader, Roster, RosterNode, Wait, WaitItem
from tests import builders as b
from tests.application.fakes import FakePorts

CANDIDATES = candidates(instance_types=["c7i.large", "c6i.large"], market="spot", zones=(), nodes=2)
PREFIX = "teams/research/jobs/demo-0123456789"


@pytest.fixture
def ports() -> FakePorts:
    return FakePorts()


def token(job: str, wait: Wait, attempt: int = 1, text: str = "t") -> WaitItem:
    return WaitItem(job=job, attempt=attempt, wait=wait, token=text)


def launch(ports: FakePorts, attempt: int = 1, time_left_s: float = 120) -> str:
    job = ports.store.rows["demo-0123456789"]
    asked = [replace(candidate, nodes=job.nodes) for candidate in CANDIDATES]
    answer = Launch(ports).run("demo-0123456789", attempt, candidates=asked, prefix=PREFIX, time_left_s=time_left_s)
    return str(answer["outcome"])


# -- record ------------------------------------------------------------------------------------------------------------


def test_a_repeated_event_writes_nothing(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    record(b.noticed(), job.id, ports)
    writes = ports.store.writes
    assert record(replace(b.noticed(), cause="metadata"), job.id, ports).interruptions == 1
    assert ports.store.writes == writes


def test_races_are_retried_inside_the_call(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    ports.store.races = 3
    assert record(b.noticed(), job.id, ports).phase is Phase.INTERRUPTED


def test_a_race_without_end_is_raised_for_the_queue_to_repeat(
    ports: FakePorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ports.holding(b.a_running_job())
    ports.store.races = 10**9
    monkeypatch.setattr("holdfast.application.record.RETRY_FOR_S", 0.0)
    with pytest.raises(Raced):
        record(b.noticed(), job.id, ports)


def test_a_notice_in_a_crowd_takes_along_those_that_were_left_beside_the_row(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job(nodes=4, gang=4))
    ports.store.leave_notice(job.id, 1, "i-third", b.NOW + 100)
    ports.store.races = 1
    noticed = record(b.noticed(), job.id, ports)
    assert (noticed.doomed, noticed.interruptions, noticed.deadline_at) == ((b.OTHER, "i-third"), 2, b.NOW + 100)
    writes = ports.store.writes
    assert record(b.noticed("i-third"), job.id, ports).version == noticed.version
    assert ports.store.writes == writes


def test_a_notice_that_nobody_races_leaves_nothing_beside_the_row(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    record(b.noticed(), job.id, ports)
    assert ports.store.left_notices(job.id, 1) == {}


def test_an_event_for_a_job_that_was_never_accepted_names_it(ports: FakePorts) -> None:
    with pytest.raises(UnknownJob, match="nobody"):
        record(b.noticed(), "nobody", ports)


def test_the_order_is_out_in_the_same_write_as_the_interruption(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    record(b.noticed(), job.id, ports)
    orders = ports.store.orders[job.id]
    assert (orders.action, orders.doomed, orders.deadline_at) == (Action.CHECKPOINT_STOP, (b.OTHER,), b.NOW + 120)
    assert orders.generation == ports.store.rows[job.id].version


def test_a_redelivery_heals_a_crash_before_the_token_was_settled(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    ports.store.put_wait(token(job.id, Wait.TRAINING))
    ports.store.save(job, b.after(job, b.noticed()), b.noticed(), "interruption_noticed#1#" + b.OTHER)
    record(b.noticed(), job.id, ports)
    assert ports.workflow.settled == [("t", "interrupted")]


def test_a_redelivery_starts_the_execution_that_a_crash_left_owed(ports: FakePorts) -> None:
    job = ports.holding(b.a_job())
    ports.store.save(job, b.after(job, b.started()), b.started(), "attempt_started#1")
    record(b.started(), job.id, ports)
    assert ports.workflow.executions == {f"{job.id}-1": "RUNNING"}


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(["put", "read", "save", "look"])))
def test_token_and_news_find_each_other_in_every_interleaving(ports: FakePorts, order: tuple[str, ...]) -> None:
    """put < read are the waiting step's, save < look are record's; nothing else orders them."""
    if order.index("put") > order.index("read") or order.index("save") > order.index("look"):
        return
    job = ports.holding(b.a_running_job())
    noticed = b.after(job, b.noticed())
    item = token(job.id, Wait.TRAINING)
    steps: dict[str, Callable[[], None]] = {
        "put": lambda: ports.store.put_wait(item),
        "read": lambda: settle(ports.store.rows[job.id], ports),
        "save": lambda: ports.store.save(job, noticed, b.noticed(), "k"),
        "look": lambda: settle(noticed, ports),
    }
    for step in order:
        steps[step]()
    assert ("t", "interrupted") in ports.workflow.settled


def test_a_token_left_after_the_news_is_answered_at_once(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_running_job(), b.noticed(), b.saved(30, final=True)))
    for wait in Wait:
        leave_token(token(job.id, wait, text=wait.value), ports)
    assert ports.workflow.settled == [(wait.value, "ended") for wait in Wait]


def test_a_token_of_an_older_attempt_ends_at_once_and_touches_no_other(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_running_job(), b.lost(), b.closed(), b.started(2)))
    leave_token(token(job.id, Wait.TRAINING, attempt=1), ports)
    assert ports.workflow.settled == [("t", "ended")]
    assert ports.store.rows[job.id] is job


def test_after_a_silence_a_lost_member_ends_the_wait_and_a_whole_fleet_does_not(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    ports.owning(job, b.LEADER, b.OTHER)
    leave_token(token(job.id, Wait.TRAINING), ports, after_silence=True)
    assert ports.workflow.settled == []
    ports.fleets.kill(b.OTHER)
    leave_token(token(job.id, Wait.TRAINING), ports, after_silence=True)
    assert ports.workflow.settled == [("t", "ended")]
    assert ports.store.rows[job.id].phase is Phase.RESUMING


# -- dispatch and launch -----------------------------------------------------------------------------------------------


def test_a_queued_job_is_started_once_however_often_it_is_dispatched(ports: FakePorts) -> None:
    job = ports.holding(b.a_job())
    for _ in range(3):
        dispatch(ports)
    assert ports.store.rows[job.id].attempt == 1
    assert list(ports.workflow.executions) == [f"{job.id}-1"]


def test_a_job_waits_until_its_pools_may_be_asked_again(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_running_job(), b.lost(), b.closed()))
    ports.holding(replace(job, not_before=ports.clock() + 60))
    assert dispatch(ports) == []
    ports.clock.step(61)
    assert dispatch(ports) == [job.id]


def test_a_job_that_waited_too_long_fails_and_says_why(ports: FakePorts) -> None:
    job = ports.holding(b.a_job(wait_s=10))
    ports.clock.step(11)
    dispatch(ports)
    assert ports.store.rows[job.id].phase is Phase.FAILED
    assert "limits.wait_s = 10" in ports.store.rows[job.id].reason


def test_an_execution_name_that_was_used_up_closes_the_attempt(ports: FakePorts) -> None:
    job = ports.holding(b.a_job())
    ports.workflow.executions[f"{job.id}-1"] = "ABORTED"
    dispatch(ports)
    assert ports.store.rows[job.id].dispatchable
    assert ports.store.rows[job.id].attempt == 1


def test_a_fleet_is_bought_whole_and_every_instance_has_an_owner(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_job(), b.started()))
    assert launch(ports) == "launched"
    assert len(ports.fleets.live) == 2
    assert {node.state for node in ports.store.owners.values()} == {Ownership.MEMBER}
    assert ports.store.rows[job.id].stage == "booting 2 x c7i.large in us-east-1a"


def test_a_launch_that_is_repeated_buys_nothing_more(ports: FakePorts) -> None:
    ports.holding(b.after(b.a_job(), b.started()))
    assert [launch(ports), launch(ports)] == ["launched", "launched"]
    assert len(ports.fleets.live) == 2
    assert len(ports.fleets.calls) == 1


def test_a_lost_answer_is_settled_by_tag_not_by_a_second_purchase(ports: FakePorts) -> None:
    ports.holding(b.after(b.a_job(), b.started()))
    buy = ports.fleets.buy

    def lose(*args: object) -> None:
        buy(*args)  # type: ignore[arg-type]
        raise TimeoutError

    ports.fleets.buy = lose  # type: ignore[method-assign, assignment]
    with pytest.raises(TimeoutError):
        launch(ports)
    ports.fleets.buy = buy  # type: ignore[method-assign]
    assert launch(ports) == "launched"
    assert len(ports.fleets.live) == len(ports.store.owners) == 2


def test_a_part_of_a_gang_is_given_back_and_the_next_candidate_asked(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_job(), b.started()))
    ports.fleets.short = 1
    assert launch(ports) == "refused"
    assert ports.fleets.live == []
    assert ports.fleets.calls == [f"{job.id}-1-0", f"{job.id}-1-1"]
    refused = ports.store.rows[job.id]
    assert refused.phase is Phase.RESUMING
    assert refused.not_before >= min(cold.until for cold in ports.store.colds.values()) >= b.NOW + 60
    assert "1 of 2 c7i.large (spot): InsufficientInstanceCapacity" in refused.reason


def test_a_cancelled_job_buys_nothing(ports: FakePorts) -> None:
    ports.holding(b.after(b.a_job(), b.started(), b.cancelled()))
    assert launch(ports) == "withdrawn"
    assert ports.fleets.calls == []


def test_no_call_is_begun_that_could_not_be_answered_in_time(ports: FakePorts) -> None:
    ports.holding(b.after(b.a_job(), b.started()))
    assert launch(ports, time_left_s=30) == "again"
    assert ports.fleets.calls == []


# -- node reports ------------------------------------------------------------------------------------------------------


def a_ready(instance: str, attempt: int = 1) -> reports.Ready:
    return reports.Ready(
        job="demo-0123456789", attempt=attempt, instance=instance, at=b.NOW, ip="127.0.0.1", port=4000,
        interface="lo", instance_type="c7i.large", zone="us-east-1a",
    )  # fmt: skip


def test_the_ranks_start_when_the_last_node_has_checked_in(ports: FakePorts) -> None:
    ports.holding(b.after(b.a_job(), b.started()))
    launch(ports)
    first, second = ports.fleets.live
    NodeReports(ports).take(a_ready(first))
    assert ports.store.rows["demo-0123456789"].roster_id is None
    NodeReports(ports).take(a_ready(second))
    orders = ports.store.orders["demo-0123456789"]
    assert orders.action is Action.RUN
    assert orders.roster_id in ports.store.rosters


def test_a_node_that_repeats_itself_is_written_once(ports: FakePorts) -> None:
    ports.holding(b.after(b.a_job(), b.started()))
    launch(ports)
    NodeReports(ports).take(a_ready(ports.fleets.live[0]))
    writes = ports.store.writes
    NodeReports(ports).take(a_ready(ports.fleets.live[0]))
    assert ports.store.writes == writes


def test_a_gang_in_two_zones_is_refused_before_its_ranks_start(ports: FakePorts) -> None:
    ports.holding(b.after(b.a_job(), b.started()))
    launch(ports)
    first, second = ports.fleets.live
    NodeReports(ports).take(a_ready(first))
    NodeReports(ports).take(replace(a_ready(second), zone="us-east-1b"))
    job = ports.store.rows["demo-0123456789"]
    assert job.phase is Phase.RESUMING
    assert "2 zones" in job.reason


def test_a_report_of_a_stranger_is_refused(ports: FakePorts) -> None:
    ports.holding(b.a_running_job())
    with pytest.raises(Rejected, match="not a node of"):
        NodeReports(ports).take(a_ready("i-0ffffffffffffffff"))


def test_the_save_after_the_last_step_does_not_end_the_attempt(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    ports.owning(job, b.LEADER, b.OTHER)
    saved = reports.CheckpointSaved(
        job=job.id, attempt=1, instance=b.LEADER, at=b.NOW, save="step-00000120.a0001.s05", manifest_sha256="a" * 64,
        step=120, final=True, answers_generation=0,
    )  # fmt: skip
    NodeReports(ports).take(saved)
    assert ports.store.rows[job.id].phase is Phase.RUNNING


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_o11_a_loss_that_is_no_number_is_left_out_and_its_report_is_taken(ports: FakePorts, bad: float) -> None:
    job = ports.holding(b.a_running_job())
    ports.owning(job, b.LEADER)
    for step, loss, speed in ((3, bad, 1.0), (4, 0.5, bad)):
        report = reports.Progress(
            job=job.id, attempt=1, instance=b.LEADER, at=b.NOW, step=step, loss=loss, tokens_per_s=speed
        )
        NodeReports(ports).take(report)
        node = ports.store.owners[b.LEADER]
        assert (node.step, node.loss, node.tokens_per_s) == (
            step, None if loss is bad else loss, None if speed is bad else speed,
        )  # fmt: skip


# -- notices, release, close -------------------------------------------------------------------------------------------


def test_a_notice_for_an_instance_of_nobody_touches_nothing(ports: FakePorts) -> None:
    assert interrupted("i-0ffffffffffffffff", ports, deadline_at=b.NOW + 120).fate is Fate.FOREIGN
    assert ports.store.writes == 0


def test_a_member_that_goes_is_lost_and_one_that_we_end_is_not(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    ports.owning(job, b.LEADER, b.OTHER)
    ports.store.mark_ending([b.OTHER], job.id, b.NOW)
    assert lost(b.OTHER, ports).fate is Fate.EXPECTED
    gone = lost(b.LEADER, ports)
    assert gone.job is not None
    assert (gone.fate, gone.job.phase) == (Fate.TAKEN, Phase.RESUMING)


def test_release_ends_what_ec2_does_not_list_yet_too(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_running_job(), b.lost()))
    ports.owning(job, b.LEADER, b.OTHER)
    ports.fleets.hidden = {b.OTHER}
    assert release_fleet(job.id, 1, ports) == 2
    assert ports.fleets.live == []


def test_release_is_not_done_before_ec2_shows_the_new_machines_ending(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_running_job(), b.lost()))
    ports.owning(job, b.LEADER, b.OTHER)
    ports.fleets.unseen, ports.fleets.refuses_to_die = {b.LEADER, b.OTHER}, {b.OTHER}
    with pytest.raises(Unavailable):
        release_fleet(job.id, 1, ports)
    assert ports.fleets.live == [b.OTHER]
    ports.fleets.unseen, ports.fleets.refuses_to_die = set(), set()
    assert release_fleet(job.id, 1, ports) == 1
    assert ports.fleets.live == []


def test_machines_that_ec2_has_forgotten_do_not_hold_up_a_release(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_running_job(), b.lost()))
    ports.owning(job, b.LEADER, b.OTHER)
    ports.fleets.unseen = {b.LEADER, b.OTHER}
    ports.clock.step(SHOWN_WITHIN_S)
    assert release_fleet(job.id, 1, ports) == 0


def test_release_waits_for_what_an_unanswered_purchase_may_have_brought(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_job(), b.started(), b.intended(), b.cancelled()))
    intent = FleetIntent(fleet=job.fleet or "", job=job.id, attempt=1, candidate=0, nodes=2, opened_at=b.NOW)
    ports.store.open_intent(intent)
    with pytest.raises(Unavailable, match="not answered"):
        release_fleet(job.id, 1, ports)
    for instance in (b.LEADER, b.OTHER):
        ports.fleets.add(instance, job=job.id, fleet=intent.fleet)
    assert release_fleet(job.id, 1, ports) == 2
    ports.clock.step(SHOWN_WITHIN_S)
    assert release_fleet(job.id, 1, ports) == 0


def test_release_is_not_done_while_a_machine_still_lives(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_running_job(), b.lost()))
    ports.owning(job, b.LEADER, b.OTHER)
    ports.fleets.refuses_to_die = {b.OTHER}
    with pytest.raises(Unavailable, match=b.OTHER):
        release_fleet(job.id, 1, ports)


def test_a_late_release_of_an_old_attempt_ends_nothing_of_the_new_one(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_running_job(), b.lost(), b.closed(), b.started(2)))
    ports.owning(job, b.LEADER, b.OTHER)
    assert release_fleet(job.id, 1, ports) == 0
    assert len(ports.fleets.live) == 2


def test_an_execution_that_was_stopped_leaves_no_machine_behind(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    ports.owning(job, b.LEADER, b.OTHER)
    end_dead_attempt(job.id, 1, ports, cause="execution aborted")
    assert ports.fleets.live == []
    assert ports.store.rows[job.id].dispatchable


def test_the_result_is_told_once_the_last_attempt_is_closed(ports: FakePorts) -> None:
    running = ports.holding(b.a_running_job())
    completed = record(b.finished(), running.id, ports)
    publish(running, completed, bucket="b", outbox=ports.outbox)
    assert ports.outbox.results == {}
    over = close_attempt(running.id, 1, ports)
    publish(completed, over, bucket="b", outbox=ports.outbox)
    publish(completed, over, bucket="b", outbox=ports.outbox)
    assert list(ports.outbox.results) == [f"{running.id}#result"]
    assert ports.outbox.results[f"{running.id}#result"]["phase"] == "completed"


# -- sweep -------------------------------------------------------------------------------------------------------------


def test_the_sweep_alone_finds_a_node_that_vanished(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    ports.workflow.start(job.id, 1)
    ports.owning(job, b.LEADER, b.OTHER)
    ports.store.put_wait(token(job.id, Wait.TRAINING))
    assert Sweep(ports).run() == []
    ports.fleets.kill(b.OTHER)
    assert [finding.what for finding in Sweep(ports).run()] == ["lost 1 of 2 nodes"]
    assert ports.workflow.settled == [("t", "ended")]


def test_an_instance_that_ec2_does_not_know_yet_is_not_lost(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    ports.workflow.start(job.id, 1)
    ports.owning(job, b.LEADER, b.OTHER)
    del ports.fleets.instances[b.OTHER]
    assert Sweep(ports).run() == []
    ports.clock.step(START_GRACE_S + 1)
    assert [finding.what for finding in Sweep(ports).run()] == ["lost 1 of 2 nodes"]


def test_an_attempt_whose_execution_never_started_is_started(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_job(), b.started()))
    assert Sweep(ports).run() == []
    ports.clock.step(START_GRACE_S + 1)
    Sweep(ports).run()
    assert ports.workflow.executions == {f"{job.id}-1": "RUNNING"}


def test_an_attempt_whose_execution_died_unheard_is_released_and_closed(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    ports.owning(job, b.LEADER, b.OTHER)
    ports.workflow.executions[f"{job.id}-1"] = "FAILED"
    Sweep(ports).run()
    assert ports.fleets.live == []
    assert ports.store.rows[job.id].dispatchable


def test_an_orphan_is_ended_in_the_second_sweep_that_sees_it(ports: FakePorts) -> None:
    ports.fleets.add("i-0dddddddddddddddd", job="gone", fleet="gone-1-0")
    ports.clock.step(ORPHAN_GRACE_S + 1)
    assert Sweep(ports).run() == []
    assert [finding.who for finding in Sweep(ports).run()] == ["i-0dddddddddddddddd"]
    assert ports.fleets.live == []


def test_members_of_a_live_attempt_are_never_orphans(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    ports.workflow.start(job.id, 1)
    ports.owning(job, b.LEADER, b.OTHER)
    ports.clock.step(10 * ORPHAN_GRACE_S)
    found = Sweep(ports).run() + Sweep(ports).run()
    assert [finding for finding in found if finding.what != "hang"] == []
    assert len(ports.fleets.live) == 2


def test_a_run_shorter_than_two_heartbeats_is_still_a_valid_state(ports: FakePorts) -> None:
    job = b.after(b.a_job(run_s=1), b.started(), b.ready())
    answer = answers_for(job, b.NOW).get(Wait.READY)
    assert answer is not None
    assert answer["heartbeat_s"] < answer["run_s"]


def test_a_job_at_its_run_limit_saves_first_and_fails_with_the_limit_named(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job(run_s=3600, report_s=3600))
    ports.workflow.start(job.id, 1)
    ports.owning(job, b.LEADER, b.OTHER)
    ports.clock.step(3601)
    assert "limit" in [finding.what for finding in Sweep(ports).run()]
    assert ports.store.orders[job.id].action is Action.CHECKPOINT_STOP
    record(b.saved(40, final=True), job.id, ports)
    ended = close_attempt(job.id, 1, ports)
    assert (ended.phase, ended.failure) == (Phase.FAILED, "limit")
    assert "limits.run_s = 3600" in ended.reason


def test_the_run_limit_counts_all_attempts_together(ports: FakePorts) -> None:
    job = b.after(b.a_running_job(run_s=100), b.lost(), b.closed())
    assert job.trained_s == 60
    answer = answers_for(b.after(job, b.started(2), b.ready(2)), b.NOW).get(Wait.READY)
    assert answer is not None
    assert answer["run_s"] == 40 + 3600


# -- survivors ---------------------------------------------------------------------------------------------------------


def a_lost_job(ports: FakePorts, **changes: Any) -> Job:
    """A job that trained on two nodes, one of which is gone."""
    job = b.after(b.a_running_job(**changes), b.lost(b.OTHER))
    ports.holding(job)
    ports.owning(job, b.LEADER, b.OTHER)
    ports.fleets.kill(b.OTHER)
    return job


def closed_and_dispatched(ports: FakePorts, job: Job) -> Job:
    close_attempt(job.id, job.attempt, ports)
    assert dispatch(ports) == [job.id]
    return ports.store.rows[job.id]


def test_a_survivor_is_held_and_the_gang_filled_up(ports: FakePorts) -> None:
    job = a_lost_job(ports)
    assert release_fleet(job.id, 1, ports) == 0
    assert ports.store.owners[b.LEADER].state is Ownership.HELD
    closed_and_dispatched(ports, job)
    assert launch(ports, attempt=2) == "launched"
    assert b.LEADER in ports.fleets.live
    assert len(ports.fleets.live) == 2
    again = ports.store.rows[job.id]
    assert (again.held, again.gang) == ((), 2)
    assert ports.store.owners[b.LEADER].attempt == 2
    assert len(ports.fleets.calls) == 1


def test_a_survivor_keeps_its_rank_and_its_old_check_in_does_not_count(ports: FakePorts) -> None:
    job = a_lost_job(ports)
    old = Roster(
        job=job.id,
        attempt=1,
        roster_id="1-roster",
        nodes=(
            RosterNode(node_rank=0, instance=b.OTHER, ip="127.0.0.1"),
            RosterNode(node_rank=1, instance=b.LEADER, ip="127.0.0.1"),
        ),
        leader=Leader(ip="127.0.0.1", port=1),
    )
    ports.store.put_roster(old)
    release_fleet(job.id, 1, ports)
    closed_and_dispatched(ports, job)
    launch(ports, attempt=2)
    for instance in ports.fleets.live:
        NodeReports(ports).take(a_ready(instance, attempt=1))
    assert ports.store.rows[job.id].roster_id is None
    for instance in ports.fleets.live:
        NodeReports(ports).take(a_ready(instance, attempt=2))
    roster = ports.store.rosters[str(ports.store.rows[job.id].roster_id)]
    assert roster.rank_of(b.LEADER) == 1


def a_notice_seen(instance: str, attempt: int = 1) -> reports.NoticeSeen:
    return reports.NoticeSeen(
        job="demo-0123456789",
        attempt=attempt,
        instance=instance,
        at=b.NOW,
        action="terminate",
        deadline_at=b.NOW + 120,
    )


def test_a_held_node_that_sees_its_own_notice_has_no_part_in_the_next_attempt(ports: FakePorts) -> None:
    job = a_lost_job(ports)
    release_fleet(job.id, 1, ports)
    NodeReports(ports).take(a_notice_seen(b.LEADER))
    closed_and_dispatched(ports, job)
    assert launch(ports, attempt=2) == "launched"
    members = ports.store.intents[str(ports.store.rows[job.id].fleet)].instances
    assert len(members) == 2
    assert b.LEADER not in members


def test_a_notice_that_was_told_under_the_old_attempt_dooms_the_node_in_its_new_one(ports: FakePorts) -> None:
    job = a_lost_job(ports)
    release_fleet(job.id, 1, ports)
    closed_and_dispatched(ports, job)
    launch(ports, attempt=2)
    NodeReports(ports).take(a_notice_seen(b.LEADER, attempt=1))
    assert ports.store.rows[job.id].doomed == (b.LEADER,)


def test_survivors_wait_for_the_missing_node_then_shrink_to_min_nodes(ports: FakePorts) -> None:
    job = a_lost_job(ports, min_nodes=1)
    release_fleet(job.id, 1, ports)
    ports.fleets.short = 0
    job = closed_and_dispatched(ports, job)
    assert launch(ports, attempt=2) == "refused"
    assert release_fleet(job.id, 2, ports) == 0
    assert ports.fleets.live == [b.LEADER]
    close_attempt(job.id, 2, ports)
    ports.clock.step(700)
    dispatch(ports)
    assert launch(ports, attempt=3) == "launched"
    assert ports.store.rows[job.id].gang == 1
    assert "(of 2 wanted)" in ports.store.rows[job.id].stage
    assert ports.store.rows[job.id].charged == {"preemption": 1, "capacity": 1}


def test_survivors_too_few_are_let_go_and_a_whole_gang_is_bought_elsewhere(ports: FakePorts) -> None:
    job = a_lost_job(ports, min_nodes=2)
    release_fleet(job.id, 1, ports)
    job = closed_and_dispatched(ports, job)
    ports.clock.step(700)
    ports.fleets.short = 0
    assert launch(ports, attempt=2) == "refused"
    assert ports.fleets.live == []


def test_a_repeated_launch_with_survivors_buys_nothing_more(ports: FakePorts) -> None:
    job = a_lost_job(ports)
    release_fleet(job.id, 1, ports)
    closed_and_dispatched(ports, job)
    assert [launch(ports, attempt=2), launch(ports, attempt=2)] == ["launched", "launched"]
    assert len(ports.fleets.live) == 2


def test_nodes_in_doubt_are_not_held(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_running_job(), b.failed("hang")))
    ports.owning(job, b.LEADER, b.OTHER)
    release_fleet(job.id, 1, ports)
    assert ports.fleets.live == []


def test_survivors_of_a_cancelled_job_are_let_go(ports: FakePorts) -> None:
    job = a_lost_job(ports)
    release_fleet(job.id, 1, ports)
    close_attempt(job.id, 1, ports)
    obey(wish("cancel"), ports)
    assert ports.fleets.live == []
    assert ports.store.rows[job.id].phase is Phase.CANCELLED


def test_a_held_node_past_its_time_is_an_orphan(ports: FakePorts) -> None:
    job = a_lost_job(ports)
    release_fleet(job.id, 1, ports)
    close_attempt(job.id, 1, ports)
    ports.clock.step(3 * ORPHAN_GRACE_S)
    Sweep(ports).run()
    Sweep(ports).run()
    assert ports.fleets.live == []


# -- control -----------------------------------------------------------------------------------------------------------


def wish(action: str, **more: Any) -> Any:
    body = {"schema": "holdfast.control/1", "job": "demo-0123456789", "action": action, **more}
    return read_control(json.dumps(body))


def test_pause_saves_first_and_resume_may_change_the_number_of_nodes(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    obey(wish("pause"), ports)
    assert ports.store.orders[job.id].action is Action.CHECKPOINT_STOP
    record(b.saved(40, final=True), job.id, ports)
    close_attempt(job.id, 1, ports)
    assert ports.store.rows[job.id].phase is Phase.PAUSED
    assert dispatch(ports) == []
    obey(wish("resume", nodes=4), ports)
    resumed = ports.store.rows[job.id]
    assert (resumed.phase, resumed.nodes, resumed.dispatchable) == (Phase.QUEUED, 4, True)


def test_a_job_resumed_on_fewer_nodes_buys_so_many(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    obey(wish("pause"), ports)
    record(b.saved(40, final=True), job.id, ports)
    close_attempt(job.id, 1, ports)
    obey(wish("resume", nodes=1), ports)
    dispatch(ports)
    assert launch(ports, attempt=2) == "launched"
    assert len(ports.fleets.live) == 1
    assert ports.store.rows[job.id].gang == 1


def test_a_resume_that_overtakes_its_pause_leaves_the_job_running(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job())
    obey(wish("pause"), ports)
    obey(wish("resume"), ports)
    assert ports.store.rows[job.id].intent is Intent.RUN
    assert ports.store.orders[job.id].action is Action.RUN


def test_priority_moves_a_waiting_job_and_extend_gives_it_more_time(ports: FakePorts) -> None:
    job = ports.holding(b.a_job())
    obey(wish("priority", priority=90), ports)
    obey(wish("extend", wait_s=500_000, attempts=9, budget_usd=12.5), ports)
    moved = ports.store.rows[job.id]
    assert moved.rank < job.rank
    assert (moved.wait_s, moved.attempts_limit, moved.budget_usd, moved.run_s) == (500_000, 9, 12.5, job.run_s)


def test_retry_goes_on_from_a_chosen_save_on_a_new_branch(ports: FakePorts) -> None:
    job = ports.holding(
        b.after(b.a_running_job(), b.saved(25), b.saved(50, number=2), b.failed("diverged"), b.closed())
    )
    assert job.phase is Phase.FAILED
    ports.store.rows[job.id] = job
    ports.checkpoints.pointers["step-00000025.a0001.s01"] = SavePointer(
        save="step-00000025.a0001.s01", manifest_sha256="a" * 64
    )
    obey(wish("retry", save="step-00000025.a0001.s01"), ports)
    again = ports.store.rows[job.id]
    assert (again.phase, again.branch, again.dispatchable, again.ended_at) == (Phase.QUEUED, 1, True, None)
    assert again.retry_from is not None
    with pytest.raises(Rejected, match="only a job that has ended"):
        obey(wish("retry", dedup_id="again"), ports)


def test_retry_from_a_save_that_is_not_there_names_it(ports: FakePorts) -> None:
    ports.holding(b.after(b.a_running_job(), b.failed("diverged"), b.closed()))
    with pytest.raises(Rejected, match="step-00000099"):
        obey(wish("retry", save="step-00000099.a0001.s01"), ports)


def test_a_wish_that_overtakes_its_submit_is_tried_again_before_it_is_answered(ports: FakePorts) -> None:
    with pytest.raises(UnknownJob) as caught:
        obey(wish("cancel"), ports)
    assert overtook_its_submit(caught.value, received=1)
    assert not overtook_its_submit(caught.value, received=3)


# -- hangs -------------------------------------------------------------------------------------------------------------


def test_a_hang_is_judged_from_step_progress_not_from_heartbeats(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job(report_s=10))
    ports.workflow.start(job.id, 1)
    ports.owning(job, b.LEADER, b.OTHER)

    def progress(step: int) -> None:
        report = reports.Progress(
            job=job.id, attempt=1, instance=b.LEADER, at=ports.clock(), step=step, loss=1.0, tokens_per_s=1.0
        )
        NodeReports(ports).take(report)

    for step in range(1, 4):
        progress(step)
        ports.clock.step(100)
        assert Sweep(ports).run() == []
    progress(3)
    ports.clock.step(100)
    assert [finding.what for finding in Sweep(ports).run()] == ["hang"]
    assert ports.store.rows[job.id].failure == "hang"


def test_ranks_that_wait_for_data_do_not_hang(ports: FakePorts) -> None:
    job = ports.holding(b.a_running_job(report_s=10))
    ports.workflow.start(job.id, 1)
    ports.owning(job, b.LEADER, b.OTHER)
    for state in ("running", *["waiting_for_data"] * 9):
        told = {"job": job.id, "attempt": 1, "instance": b.LEADER, "at": ports.clock(), "state": state}
        NodeReports(ports).take(reports.Progress(**told, step=3, loss=1.0, tokens_per_s=1.0))
        ports.clock.step(100)
        assert Sweep(ports).run() == []


@pytest.mark.parametrize("moment", ["open_intent", "save"])
def test_a_launch_that_its_release_has_overtaken_buys_nothing(ports: FakePorts, moment: str) -> None:
    """Somebody stops the execution while its launch is at work: the release comes between any two of its calls."""
    job = ports.holding(b.after(b.a_job(), b.started()))
    call = getattr(ports.store, moment)

    def overtaken(*args: Any) -> Any:
        setattr(ports.store, moment, call)
        with contextlib.suppress(Unavailable):
            end_dead_attempt(job.id, 1, ports, cause="execution aborted")
        return call(*args)

    setattr(ports.store, moment, overtaken)
    launch(ports)
    assert ports.store.rows[job.id].attempt_open == bool(ports.fleets.live)


def test_a_fleet_intended_while_a_stopped_execution_is_cleared_away_is_waited_for(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_job(), b.started()))
    of_job = ports.fleets.of_job

    def listed_before_the_purchase(job_id: str) -> Any:
        ports.fleets.of_job = of_job  # type: ignore[method-assign]
        before = of_job(job_id)
        launch(ports)
        return before

    ports.fleets.of_job = listed_before_the_purchase  # type: ignore[method-assign]
    end_dead_attempt(job.id, 1, ports, cause="execution aborted")
    assert ports.fleets.live == []


def test_survivors_are_not_joined_by_a_launch_that_its_release_has_overtaken(ports: FakePorts) -> None:
    job = a_lost_job(ports)
    release_fleet(job.id, 1, ports)
    closed_and_dispatched(ports, job)
    open_intent = ports.store.open_intent

    def overtaken(intent: FleetIntent) -> FleetIntent:
        end_dead_attempt(job.id, 2, ports, cause="execution aborted")
        return open_intent(intent)

    ports.store.open_intent = overtaken  # type: ignore[method-assign]
    assert launch(ports, attempt=2) == "withdrawn"
    assert ports.fleets.calls == []
    assert ports.store.intents[f"{job.id}-2-s"].closed_at is not None


def test_a_fleet_that_is_owned_while_the_sweep_looks_is_not_suspected(ports: FakePorts) -> None:
    """The owners are written before the intent is closed: a sweep that read them in that order would see neither."""
    job = ports.holding(b.after(b.a_job(), b.started()))
    fleet = f"{job.id}-1-0"
    intent = FleetIntent(fleet=fleet, job=job.id, attempt=1, candidate=0, nodes=1, opened_at=b.NOW)
    ports.store.open_intent(intent)
    ports.fleets.add(b.LEADER, job=job.id, fleet=fleet)
    ports.clock.step(ORPHAN_GRACE_S + 1)
    read = ports.store.node

    def read_then_own(instance: str) -> Node | None:
        found = read(instance)
        ports.store.own([Node(instance=instance, job=job.id, fleet=fleet, attempt=1, since_at=b.NOW)])
        ports.store.close_intent(replace(intent, closed_at=ports.clock(), instances=(instance,), outcome="bought"))
        return found

    ports.store.node = read_then_own  # type: ignore[method-assign]
    Sweep(ports).run()
    assert ports.store.suspects == {}


def test_a_survivor_under_notice_is_ended_before_a_whole_gang_is_bought(ports: FakePorts) -> None:
    job = a_lost_job(ports)
    release_fleet(job.id, 1, ports)
    interrupted(b.LEADER, ports, deadline_at=b.NOW + 120)
    closed_and_dispatched(ports, job)
    assert launch(ports, attempt=2) == "launched"
    assert b.LEADER not in ports.fleets.live
    assert len(ports.fleets.live) == 2


def test_survivors_of_a_job_that_turns_out_to_have_finished_are_let_go(ports: FakePorts) -> None:
    job = a_lost_job(ports)
    release_fleet(job.id, 1, ports)
    record(b.finished(), job.id, ports)
    assert close_attempt(job.id, 1, ports).phase is Phase.COMPLETED
    assert ports.fleets.live == []


def test_a_job_that_has_trained_waits_for_machines_as_long_as_it_takes(ports: FakePorts) -> None:
    job = a_lost_job(ports, wait_s=10)
    release_fleet(job.id, 1, ports)
    close_attempt(job.id, 1, ports)
    ports.clock.step(11)
    assert dispatch(ports) == [job.id]


def test_a_write_that_keeps_racing_is_given_up_after_ten_seconds_of_the_ports_clock(ports: FakePorts) -> None:
    ports.holding(b.a_job(id="demo"))
    ports.store.races, began = 10**6, ports.clock()
    with pytest.raises(Raced):
        record(b.started(), "demo", ports)
    assert 10 < ports.clock() - began < 12
    assert max(ports.pauses) <= 1
