"""What the sweep measures, what its dry run leaves alone, what is told at the end, and how long a job is remembered."""

from __future__ import annotations

import inspect
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from holdfast.application import dry_run
from holdfast.application import ports as promises
from holdfast.application.dispatch import dispatch
from holdfast.application.launch import Launch
from holdfast.application.news import remember
from holdfast.application.node_reports import NodeReports
from holdfast.application.notices import interrupted
from holdfast.application.record import record
from holdfast.application.release import close_attempt, release_fleet
from holdfast.application.retention import LOOK_AFTER_S, retire_saves
from holdfast.application.sweep import START_GRACE_S, Sweep
from holdfast.application.vitals import interval_s
from holdfast.domain.errors import IllegalTransition, Raced, Unavailable
from holdfast.domain.events import LimitsExtended, RetryRequested, SaveLost
from holdfast.domain.job import Job
from holdfast.domain.keys import KEEP_S
from holdfast.domain.obligations import answers_for
from holdfast.domain.ownership import ORPHAN_GRACE_S, FleetIntent, Node, Ready
from holdfast.domain.phase import Phase
from holdfast.domain.placement import Candidate
from job_contract import reports
from job_contract.checkpoint_layout import Head, Manifest, save_name
from job_contract.orders import Wait
from tests import builders as b
from tests.application.fakes import FakePorts

MINUTE = 60


@pytest.fixture
def ports() -> FakePorts:
    return FakePorts()


def training(ports: FakePorts, **changes: Any) -> Job:
    """A job whose two nodes train, its execution running."""
    job = ports.holding(b.a_running_job(**changes))
    ports.owning(job, b.LEADER, b.OTHER)
    ports.workflow.executions[f"{job.id}-1"] = "RUNNING"
    return job


def hears(ports: FakePorts, step: int, **changes: Any) -> None:
    """The leader reports this step now."""
    node = ports.store.owners[b.LEADER]
    ports.store.update_node(replace(node, step=step, step_at=ports.clock(), reported_at=ports.clock(), **changes))


def vitals(ports: FakePorts) -> dict[str, float]:
    sweep = Sweep(ports, dry_run=True)
    sweep.run()
    return sweep.vitals.found


# -- dry run -----------------------------------------------------------------------------------------------------------


def test_a_dry_run_knows_every_promise_of_the_ports() -> None:
    kinds = (promises.JobStore, promises.Workflow, promises.Fleets, promises.Checkpoints, promises.Outbox)
    named = {name for kind in kinds for name, _ in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"}
    assert named == dry_run.READS | dry_run.LEFT_OUT
    assert not dry_run.READS & dry_run.LEFT_OUT


def test_a_dry_run_lists_an_orphan_at_first_sight_with_its_age_and_ends_nothing(ports: FakePorts) -> None:
    ports.fleets.add("i-0aaaaaaaaaaaaaaa9", job="gone", fleet="gone-1-0")
    ports.clock.step(ORPHAN_GRACE_S + 60)
    [finding] = Sweep(ports, dry_run=True).run()
    assert finding.orphan is not None
    assert (finding.who, finding.orphan.instance_type) == ("i-0aaaaaaaaaaaaaaa9", "c7i.large")
    assert (ports.fleets.live, ports.store.suspects) == (["i-0aaaaaaaaaaaaaaa9"], {})


@pytest.mark.parametrize("trouble", ["execution died", "execution never started", "node gone", "run limit"])
def test_a_dry_run_finds_what_a_sweep_finds_and_changes_nothing(ports: FakePorts, trouble: str) -> None:
    job = training(ports, run_s=300)
    hears(ports, 1)
    ports.clock.step(100)
    if trouble == "execution died":
        ports.workflow.executions[f"{job.id}-1"] = "FAILED"
    elif trouble == "execution never started":
        ports.workflow.executions.clear()
    elif trouble == "node gone":
        ports.fleets.kill(b.OTHER)
    else:
        ports.clock.step(250)
        hears(ports, 9)
    before = (dict(ports.store.rows), ports.store.writes, dict(ports.workflow.executions), ports.fleets.live)
    dry = [(finding.what, finding.who) for finding in Sweep(ports, dry_run=True).run()]
    assert (ports.store.rows, ports.store.writes, ports.workflow.executions, ports.fleets.live) == before
    assert dry
    assert [(finding.what, finding.who) for finding in Sweep(ports).run()] == dry


# -- one job's failure is no other's -----------------------------------------------------------------------------------


def two_in_trouble(ports: FakePorts) -> tuple[Job, Job]:
    """One whose execution died and whose machine will not end, and one that has lost a machine."""
    stubborn, bereft = training(ports), ports.holding(b.a_running_job(id="bereft"))
    ports.workflow.executions[f"{stubborn.id}-1"] = "FAILED"
    ports.fleets.refuses_to_die.add(b.LEADER)
    bereft = ports.holding(replace(bereft, fleet="bereft-1-0"))
    ports.owning(bereft, "i-0ccccccccccccccc1", "i-0ccccccccccccccc2")
    ports.workflow.executions["bereft-1"] = "RUNNING"
    ports.clock.step(100)
    ports.fleets.kill("i-0ccccccccccccccc2")
    return stubborn, bereft


def test_a_job_whose_machines_will_not_end_keeps_no_other_job_from_being_swept(ports: FakePorts) -> None:
    stubborn, bereft = two_in_trouble(ports)
    sweep = Sweep(ports)
    with pytest.raises(Unavailable, match=rf"1 of 2 jobs.*{stubborn.id}.*not seen ending"):
        sweep.run()
    assert [(finding.what, finding.who) for finding in sweep.found] == [("lost 1 of 2 nodes", bereft.id)]
    assert ports.store.rows[bereft.id].phase is Phase.RESUMING


STRAY = "i-0aaaaaaaaaaaaaaa9"


def swept_in_vain(ports: FakePorts, times: int = 3) -> None:
    ports.clock.step(ORPHAN_GRACE_S + 60)
    for _ in range(times):
        with pytest.raises(Unavailable, match="not seen ending"):
            Sweep(ports).run()


def test_a_machine_of_another_job_is_no_less_an_orphan_while_one_job_cannot_be_swept(ports: FakePorts) -> None:
    two_in_trouble(ports)
    ports.fleets.add(STRAY, job="gone", fleet="gone-1-0")
    swept_in_vain(ports, 1)
    assert STRAY in ports.fleets.live
    swept_in_vain(ports, 1)
    assert STRAY not in ports.fleets.live


@pytest.mark.parametrize("link", ["fleet", "owner", "intent", "nothing"])
def test_what_may_belong_to_a_job_that_cannot_be_swept_waits_for_it(ports: FakePorts, link: str) -> None:
    stubborn, _ = two_in_trouble(ports)
    fleet = {"fleet": f"{stubborn.id}-7-0", "nothing": None}.get(link, "gone-1-0")
    ports.fleets.add(STRAY, job=None if link == "nothing" else "gone", fleet=fleet)
    if link == "owner":
        ports.store.mark_ending([STRAY], stubborn.id, ports.clock())
    elif link == "intent":
        theirs = FleetIntent(fleet="gone-1-0", job=stubborn.id, attempt=1, candidate=0, nodes=1, opened_at=b.NOW)
        ports.store.close_intent(theirs.withdrawn(b.NOW))
    swept_in_vain(ports)
    assert (STRAY in ports.fleets.live, STRAY in ports.store.suspects) == (True, False)
    ports.fleets.refuses_to_die.clear()
    for _ in range(2):
        Sweep(ports).run()
    assert STRAY not in ports.fleets.live


def test_a_read_that_fails_while_orphans_are_judged_ends_none_of_them(
    ports: FakePorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_in_trouble(ports)
    ports.fleets.add(STRAY, job="gone", fleet="gone-1-0")
    ports.fleets.add("i-0ddddddddddddddd9", job="gone", fleet="gone-1-0")
    usual = ports.store.node

    def broken(instance: str) -> Node | None:
        if instance == "i-0ddddddddddddddd9":
            raise Unavailable("throttled")
        return usual(instance)

    monkeypatch.setattr(ports.store, "node", broken)
    swept_in_vain(ports)
    assert STRAY in ports.fleets.live


@pytest.mark.parametrize("fault", [Raced("lost every race"), IllegalTransition("ours"), KeyError("a bug")])
def test_whatever_goes_wrong_with_one_job_is_told_after_the_others_had_their_turn(
    ports: FakePorts, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    stubborn, bereft = two_in_trouble(ports)

    def failing(job_id: str, attempt: int, ports: Any, *, cause: str) -> None:
        raise fault

    monkeypatch.setattr("holdfast.application.sweep.end_dead_attempt", failing)
    with pytest.raises(Unavailable if isinstance(fault, Raced) else type(fault)) as caught:
        Sweep(ports).run()
    assert stubborn.id in f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert ports.store.rows[bereft.id].phase is Phase.RESUMING


# -- what the sweep measures -------------------------------------------------------------------------------------------


def test_while_all_is_well_there_is_nothing_to_measure(ports: FakePorts) -> None:
    job = training(ports)
    ports.store.requests[job.id] = {"body": json.dumps({"checkpoint": {"interval_s": 900}})}
    ports.clock.step(20 * MINUTE)
    hears(ports, 40)
    ports.store.rows[job.id] = b.after(job, b.saved(25))
    assert vitals(ports) == {}


def test_a_newest_save_older_than_two_intervals_is_measured(ports: FakePorts) -> None:
    job = training(ports)
    ports.store.requests[job.id] = {"body": json.dumps({"checkpoint": {"interval_s": 1200}})}
    ports.clock.step(39 * MINUTE)
    hears(ports, 40)
    assert vitals(ports) == {}
    ports.clock.step(2 * MINUTE)
    assert vitals(ports) == {"LastCommitAgeSeconds": 41 * MINUTE}


def test_a_short_interval_wakes_nobody_before_half_an_hour(ports: FakePorts) -> None:
    job = training(ports)
    ports.store.requests[job.id] = {"body": json.dumps({"checkpoint": {"interval_s": 60}})}
    ports.clock.step(29 * MINUTE)
    hears(ports, 40)
    assert vitals(ports) == {}
    ports.clock.step(2 * MINUTE)
    assert "LastCommitAgeSeconds" in vitals(ports)


def test_an_interval_in_steps_is_judged_by_the_speed_that_the_nodes_told(ports: FakePorts) -> None:
    job = training(ports)
    hears(ports, 1, tokens_per_s=1_000.0)
    nodes = ports.store.nodes([b.LEADER])
    asked = {"checkpoint": {"interval_steps": 25}, "training": {"global_batch": 16, "sequence_length": 2_500}}
    assert interval_s(asked, nodes) == 25 * 16 * 2_500 / 1_000
    assert interval_s({}, []) == 1_800
    assert job.phase is Phase.RUNNING


def test_an_order_that_no_node_has_heard_for_a_minute_is_measured(ports: FakePorts) -> None:
    job = training(ports)
    ports.store.rows[job.id] = b.after(job, b.noticed())
    ports.clock.step(50)
    assert "OrdersNotHeard" not in vitals(ports)
    ports.clock.step(20)
    assert vitals(ports)["OrdersNotHeard"] == 1
    ports.store.rows[job.id] = b.after(job, b.noticed(), b.heard())
    assert "OrdersNotHeard" not in vitals(ports)


def test_o15_a_fleet_of_which_no_node_checks_in_is_measured_as_silent(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_job(), b.started(), b.intended(), b.bought()))
    ports.owning(job, b.LEADER, b.OTHER)
    ports.workflow.executions[f"{job.id}-1"] = "RUNNING"
    ports.clock.step(11 * MINUTE)
    assert vitals(ports) == {"SilentFleets": 1}
    facts = Ready(ip="10.0.0.1", port=4, instance_type="c7i.large", zone="us-east-1a")
    ports.store.update_node(replace(ports.store.owners[b.LEADER], ready=facts))
    assert vitals(ports) == {}


def test_o15_a_training_fleet_that_stops_reporting_is_measured_as_silent(ports: FakePorts) -> None:
    training(ports, report_s=300)
    hears(ports, 5)
    ports.clock.step(14 * MINUTE)
    assert vitals(ports) == {}
    ports.clock.step(2 * MINUTE)
    assert vitals(ports) == {"SilentFleets": 1}


def test_orphans_are_counted(ports: FakePorts) -> None:
    ports.fleets.add("i-0aaaaaaaaaaaaaaa9", job="gone", fleet="gone-1-0")
    ports.clock.step(ORPHAN_GRACE_S + 60)
    assert vitals(ports) == {"Orphans": 1}


# -- what is told and kept ---------------------------------------------------------------------------------------------


def test_steps_that_no_save_held_are_lost_steps_of_the_job(ports: FakePorts) -> None:
    job = training(ports)
    ports.store.rows[job.id] = b.after(job, b.saved(25), b.lost())
    hears(ports, 41)
    assert close_attempt(job.id, 1, ports).lost_steps == 16


def test_a_step_that_a_survivor_told_in_an_attempt_before_is_not_lost_twice(ports: FakePorts) -> None:
    job = training(ports)
    hears(ports, 41)
    ports.clock.step(10)
    ports.store.rows[job.id] = replace(b.after(job, b.saved(25), b.lost()), roster_at=ports.clock())
    assert close_attempt(job.id, 1, ports).lost_steps == 0


def test_the_end_of_a_dead_ranks_log_stands_in_the_history(ports: FakePorts) -> None:
    job = training(ports)
    report = reports.Failed(
        job=job.id, attempt=1, instance=b.LEADER, at=b.NOW, failure="crash", reason="exit 1", log_tail="x" * 3_000 + "!"
    )
    NodeReports(ports).take(report)
    [event] = [event for event in ports.store.events[job.id].values() if type(event).__name__ == "Failed"]
    assert (len(event.log_tail), event.log_tail[-1]) == (2_000, "!")  # type: ignore[attr-defined]


def test_a_job_of_a_reused_identity_fails_with_the_way_out_instead_of_never_starting(ports: FakePorts) -> None:
    job = ports.holding(b.after(b.a_job(), b.started()))
    ports.checkpoints.heads["prefix"] = Head(job=job.id, attempt=7)
    candidate = Candidate(instance_type="c7i.large", market="spot", nodes=2)
    answer = Launch(ports).run(job.id, 1, candidates=[candidate], prefix="prefix", time_left_s=120)
    failed = close_attempt(job.id, 1, ports)
    assert (answer["outcome"], failed.phase, failed.over) == ("refused", Phase.FAILED, True)
    assert failed.reason.startswith("identity_reused: ")
    assert "dedup_id" in failed.reason
    assert ports.fleets.calls == []


def test_an_ended_job_is_kept_for_35_days_and_one_that_is_tried_again_until_its_next_end(ports: FakePorts) -> None:
    running = training(ports)
    ended = b.after(running, b.finished(), b.closed())
    assert ended.ended_at is not None
    ports.holding(ended)
    remember(running, ended, ports.store)
    assert ports.store.expiries == {ended.id: ended.ended_at + KEEP_S}
    again = b.after(ended, RetryRequested(at=b.NOW + 99, request="retry"))
    ports.holding(again)
    remember(ended, again, ports.store)
    assert ports.store.expiries == {ended.id: None}
    # The end is told once more, late: the job runs again, and is not forgotten while it does.
    remember(running, ended, ports.store)
    assert ports.store.expiries == {ended.id: None}


def test_o10_what_a_state_of_the_run_machine_gets_and_gives_is_under_1_kb_whatever_the_gang(ports: FakePorts) -> None:
    gang = tuple(f"i-{number:017x}" for number in range(256))
    job = replace(b.a_running_job(nodes=256), doomed=gang, held=gang, reason="x" * 1_000, deadline_at=b.NOW + 120)
    for state in (job, replace(job, phase=Phase.INTERRUPTED), replace(job, phase=Phase.RESUMING)):
        answers = [answers_for(state, b.NOW).get(wait) for wait in Wait]
        assert all(len(json.dumps(answer)) < 1_024 for answer in answers)
    ports.holding(b.after(b.a_job(nodes=256), b.started()))
    candidate = Candidate(instance_type="p5.48xlarge", market="spot", nodes=256)
    answer = Launch(ports).run(job.id, 1, candidates=[candidate], prefix="prefix", time_left_s=120)
    assert answer["outcome"] == "launched"
    assert len(json.dumps(answer)) < 1_024
    machine = json.loads((b.ROOT / "statemachines" / "run_attempt.asl.json").read_text())
    steps = [state["Parameters"]["Payload"] for state in machine["States"].values() if "Parameters" in state]
    assert {name.removesuffix(".$") for step in steps for name in step} == {"job", "attempt", "wait", "again", "token"}


def test_o14_a_job_of_14_days_with_40_interruptions_is_41_executions_and_loses_nothing(ports: FakePorts) -> None:
    """Every recovery hands the job to a new execution; every third start dies before it, and the sweep repeats it."""
    days, interruptions = 14, 40
    job = ports.holding(b.a_job(run_s=days * 2 * 86_400, wait_s=60, report_s=10**7))
    asked = [Candidate(instance_type="c7i.large", market="spot", nodes=2)]
    usual = ports.workflow.start

    def dies(job_id: str, attempt: int) -> None:
        if attempt % 3 == 0 and ports.clock() == started_at:
            raise Unavailable("injected")
        usual(job_id, attempt)

    ports.workflow.start = dies  # type: ignore[method-assign]
    for attempt in range(1, interruptions + 2):
        started_at = ports.clock()
        with suppress(Unavailable):
            dispatch(ports)
        ports.clock.step(START_GRACE_S)
        Sweep(ports).run()
        assert ports.workflow.status(job.id, attempt) == "RUNNING"
        answer = Launch(ports).run(job.id, attempt, candidates=asked, prefix="p", time_left_s=120)
        row, head = ports.store.rows[job.id], ports.checkpoints.heads["p"]
        assert (answer["outcome"], row.attempt) == ("launched", attempt)
        assert (row.resume_from and row.resume_from.save) == head.save
        at = {"at": ports.clock()}
        record(replace(b.ready(attempt), **at), job.id, ports)
        record(replace(b.training(attempt, attempt), **at), job.id, ports)
        ports.clock.step(days * 86_400 / (interruptions + 1))
        if attempt <= interruptions:
            interrupted(ports.fleets.live[-1], ports, deadline_at=ports.clock() + 120)
            save = b.saved(100 * attempt, attempt, final=True)
            ports.checkpoints.heads["p"] = replace(head, save=save.pointer.save, manifest_sha256="0" * 64)
            record(replace(save, at=ports.clock()), job.id, ports)
        else:
            record(replace(b.finished(attempt, 5_000), at=ports.clock()), job.id, ports)
        release_fleet(job.id, attempt, ports)
        after = close_attempt(job.id, attempt, ports)
        ports.workflow.executions[f"{job.id}-{attempt}"] = "SUCCEEDED"
    assert (after.phase, after.attempt, after.interruptions, after.lost_steps) == (Phase.COMPLETED, 41, 40, 0)
    assert (after.charged, after.durable_step) == ({}, 100 * interruptions)
    assert len(ports.workflow.executions) == interruptions + 1


def test_the_limits_of_an_ended_job_can_be_extended_for_its_next_try(ports: FakePorts) -> None:
    failed = b.after(b.a_running_job(), b.failed("user_error"), b.closed())
    extended = b.after(failed, LimitsExtended(at=b.NOW + 99, request="more", run_s=999_999))
    assert (extended.run_s, extended.over, extended.ended_at, extended.news) == (
        999_999,
        True,
        failed.ended_at,
        failed.news,
    )


def test_a_change_of_phase_in_a_jobs_life_touches_no_date(ports: FakePorts) -> None:
    remember(b.a_job(), training(ports), ports.store)
    assert ports.store.expiries == {}


def test_a_sweep_deletes_the_saves_that_keep_does_not_cover_and_a_dry_run_only_names_them(ports: FakePorts) -> None:
    job = training(ports)
    hears(ports, 1)
    names = [save_name(10 * number, 1, number) for number in (1, 2, 3, 4)]
    ports.checkpoints.stored = {*names}
    ports.checkpoints.line = [
        Manifest(
            job=job.id, attempt=1, step=10 * number, save=names[number - 1], world_size=1, mesh=(1,), config_hash="c",
            corpus_digest="d", versions={}, facts={}, files=(),
        )
        for number in (4, 3, 2, 1)
    ]  # fmt: skip
    assert Sweep(ports).run() == [], "nothing is reported committed yet"
    record(b.saved(40, 1, 4), job.id, ports)
    [told] = Sweep(ports, dry_run=True).run()
    assert (told.who, len(ports.checkpoints.stored)) == (names[0], 4)
    [done] = Sweep(ports).run()
    assert (done.who, sorted(ports.checkpoints.stored)) == (names[0], names[1:])
    assert Sweep(ports).run() == []
    ports.checkpoints.stored.add(names[0])
    ports.clock.step(LOOK_AFTER_S + 1)
    assert retire_saves(ports.store.load(job.id), ports) == [], "the bucket is not listed for ever"


def test_o21_a_save_that_was_lost_stands_in_the_jobs_history_once_with_node_and_error_code(ports: FakePorts) -> None:
    job = training(ports)
    reason = "part of node 1 failed: SlowDown at __1_0.distcp"
    for instance in (b.LEADER, b.OTHER):
        report = reports.SaveLost(
            job=job.id, attempt=1, instance=instance, at=b.NOW, save=save_name(10, 1, 1), reason=reason
        )
        NodeReports(ports).take(report)
    after = ports.store.load(job.id)
    assert after is not None
    assert (after.phase, after.lost_saves, after.saved) == (Phase.RUNNING, 1, None)
    assert [event.reason for event in ports.store.events[job.id].values() if isinstance(event, SaveLost)] == [reason]
