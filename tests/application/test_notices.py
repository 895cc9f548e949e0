"""Warnings of every grade: what they order, whom they reach, and what they never cost."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from holdfast.application import notices
from holdfast.application.node_reports import NodeReports
from holdfast.application.notices import Fate
from holdfast.application.record import record
from holdfast.application.release import close_attempt, release_fleet
from holdfast.application.sweep import Sweep
from holdfast.domain import notices as rules
from holdfast.domain.errors import Unavailable
from holdfast.domain.events import CheckpointSaved
from holdfast.domain.job import Job, Pool
from holdfast.domain.notices import ScheduledEvent, Trouble
from holdfast.domain.obligations import action_for
from holdfast.domain.ownership import Instance, Ownership
from holdfast.domain.phase import Phase
from job_contract import reports
from job_contract.orders import Action
from tests import builders as b
from tests.application.fakes import FakeFleets, FakePorts

DEADLINE = b.NOW + 120
THIRD, FOURTH = "i-0aaaaaaaaaaaaaaa3", "i-0aaaaaaaaaaaaaaa4"
FOREIGN = "i-0fffffffffffffff9"


@pytest.fixture
def ports() -> FakePorts:
    return FakePorts()


def training(ports: FakePorts, name: str = "demo-0123456789", *instances: str, **changes: object) -> Job:
    """A job at work on these machines, that reports too rarely and may train too long to be ended for it here."""
    changes = {"report_s": 10**7, "run_s": 10**8, **changes}
    job = ports.holding(replace(b.a_running_job(**changes), id=name, fleet=f"{name}-1-0"))
    ports.owning(job, *(instances or (b.LEADER, b.OTHER)))
    ports.workflow.executions[f"{job.id}-1"] = "RUNNING"
    return job


def now(ports: FakePorts, job: Job) -> Job:
    return ports.store.rows[job.id]


def save(ports: FakePorts, job: Job, step: int, number: int) -> None:
    saved = b.saved(step, number=number)
    record(CheckpointSaved(at=ports.clock(), attempt=1, pointer=saved.pointer), job.id, ports)


# -- graded answers ----------------------------------------------------------------------------------------------------


def test_maintenance_weeks_away_is_remembered_and_moved_from_in_time(ports: FakePorts) -> None:
    job = training(ports, market="on_demand")
    starts_at = b.NOW + 14 * 86400
    [told] = notices.maintenance([b.OTHER], ports, starts_at=starts_at, cause="AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED")
    assert (told.fate, now(ports, job).phase) == (Fate.TAKEN, Phase.RUNNING)
    left_by = starts_at - rules.MAINTENANCE_MARGIN_S
    assert now(ports, job).move_by_at == left_by
    Sweep(ports).run()
    assert now(ports, job).phase is Phase.RUNNING
    ports.clock.now = left_by - rules.MOVE_LEAD_S
    assert [finding.what for finding in Sweep(ports).run()] == ["planned move is due"]
    orders = ports.store.orders[job.id]
    assert (orders.action, orders.deadline_at, orders.doomed) == (Action.CHECKPOINT_STOP, left_by, ())
    assert now(ports, job).phase is Phase.INTERRUPTED


@pytest.mark.parametrize("away_s", [-7200, 0, 1800, 2400])
def test_maintenance_that_is_near_or_begun_moves_the_job_at_once(ports: FakePorts, away_s: float) -> None:
    job = training(ports)
    notices.maintenance([b.OTHER], ports, starts_at=b.NOW + away_s, cause="reboot")
    deadline_at = now(ports, job).deadline_at
    assert now(ports, job).phase is Phase.INTERRUPTED
    assert deadline_at is not None
    assert b.NOW + rules.SOONEST_MOVE_S <= deadline_at <= b.NOW + rules.ORDERED_STOP_S


def test_maintenance_told_twice_by_pages_and_backup_copies_is_one(ports: FakePorts) -> None:
    job = training(ports)
    for instances in ([b.LEADER], [b.OTHER], [b.LEADER, b.OTHER]):
        notices.maintenance(instances, ports, starts_at=b.NOW + 90_000, cause="reboot")
    assert now(ports, job).version == job.version + 1


def test_a_failing_disk_means_a_save_now_and_a_move_when_it_is_committed(ports: FakePorts) -> None:
    job = training(ports)
    notices.degraded([b.OTHER], ports, cause="AWS_EC2_INSTANCE_STORE_DRIVE_PERFORMANCE_DEGRADED")
    assert (now(ports, job).phase, ports.store.orders[job.id].action) == (Phase.RUNNING, Action.CHECKPOINT)
    Sweep(ports).run()
    assert now(ports, job).phase is Phase.RUNNING
    ports.clock.step(20)
    save(ports, job, 25, 1)
    Sweep(ports).run()
    assert (now(ports, job).phase, ports.store.orders[job.id].action) == (Phase.INTERRUPTED, Action.CHECKPOINT_STOP)


def test_a_failing_disk_is_left_even_when_no_save_is_committed(ports: FakePorts) -> None:
    job = training(ports)
    notices.degraded([b.OTHER], ports, cause="degraded")
    ports.clock.step(rules.DEGRADED_MOVE_S - rules.MOVE_LEAD_S)
    Sweep(ports).run()
    assert now(ports, job).phase is Phase.INTERRUPTED


def test_a_block_is_left_before_its_terminations_start(ports: FakePorts) -> None:
    job = training(ports, market="on_demand")
    other = training(ports, "other-0123456789", THIRD, FOURTH)
    for instance in (b.LEADER, b.OTHER):
        ports.fleets.instances[instance] = replace(ports.fleets.instances[instance], reservation="cr-0abc1234def567890")
    ends_at = b.NOW + 40 * 60
    [told] = notices.block_ends("cr-0abc1234def567890", ports, ends_at=ends_at)
    assert told.fate is Fate.TAKEN
    orders = ports.store.orders[job.id]
    assert (orders.action, orders.deadline_at) == (Action.CHECKPOINT_STOP, ends_at - 30 * 60)
    assert now(ports, other).phase is Phase.RUNNING


def test_a_block_that_was_delivered_is_left_in_time_without_any_warning(ports: FakePorts) -> None:
    job = training(ports)
    ports.fleets.instances[b.LEADER] = replace(ports.fleets.instances[b.LEADER], reservation="cr-0abc1234def567890")
    ends_at = b.NOW + 86400
    notices.block_ends("cr-0abc1234def567890", ports, ends_at=ends_at)
    assert now(ports, job).phase is Phase.RUNNING
    ports.clock.now = ends_at - 40 * 60
    Sweep(ports).run()
    assert now(ports, job).deadline_at == ends_at - 30 * 60


def test_an_eviction_told_afterwards_loses_the_members_it_names(ports: FakePorts) -> None:
    job = training(ports)
    other = training(ports, "other-0123456789", THIRD, FOURTH)
    told = notices.evicted([b.OTHER, FOREIGN, THIRD], ports)
    assert [one.fate for one in told] == [Fate.TAKEN, Fate.FOREIGN, Fate.TAKEN]
    for lost in (job, other):
        assert (now(ports, lost).phase, now(ports, lost).failure) == (Phase.RESUMING, "preemption")


def test_an_eviction_of_a_machine_that_was_under_notice_leaves_the_save_to_the_others(ports: FakePorts) -> None:
    job = training(ports)
    notices.interrupted(b.OTHER, ports, deadline_at=DEADLINE)
    notices.evicted([b.OTHER], ports)
    assert now(ports, job).phase is Phase.INTERRUPTED


def seen(job: Job, action: str, deadline_at: float) -> reports.NoticeSeen:
    return reports.NoticeSeen(job=job.id, attempt=1, instance=b.OTHER, at=b.NOW, action=action, deadline_at=deadline_at)


def test_maintenance_and_advice_seen_in_metadata_are_answered_like_those_of_events(ports: FakePorts) -> None:
    job = training(ports)
    NodeReports(ports).take(seen(job, "rebalance", b.NOW))
    assert (now(ports, job).phase, action_for(now(ports, job))) == (Phase.RUNNING, Action.CHECKPOINT)
    NodeReports(ports).take(seen(job, "system-reboot", b.NOW + 90_000))
    assert (now(ports, job).phase, now(ports, job).move_by_at) == (Phase.RUNNING, b.NOW + 90_000 - 1800)
    NodeReports(ports).take(seen(job, "terminate", DEADLINE))
    assert now(ports, job).phase is Phase.INTERRUPTED


# -- what EC2's statuses say -------------------------------------------------------------------------------------------


def scheduled(instance: str, starts_at: float, code: str = "instance-retirement") -> Trouble:
    return Trouble(instance=instance, events=(ScheduledEvent(code=code, starts_at=starts_at),))


@pytest.mark.parametrize("code", sorted(rules.MAINTENANCE))
def test_a_scheduled_event_that_only_the_status_shows_moves_the_job_before_it(ports: FakePorts, code: str) -> None:
    job = training(ports, market="on_demand")
    starts_at = b.NOW + 86_400
    ports.fleets.troubles = [scheduled(b.OTHER, starts_at, code)]
    [finding] = Sweep(ports).run()
    assert (finding.what, finding.who) == (f"{b.OTHER}: {code} is scheduled", job.id)
    assert now(ports, job).move_by_at == starts_at - rules.MAINTENANCE_MARGIN_S
    planned = now(ports, job)
    assert Sweep(ports).run() == []
    assert now(ports, job) == planned
    ports.clock.now = starts_at - rules.MAINTENANCE_MARGIN_S - rules.MOVE_LEAD_S
    assert [found.what for found in Sweep(ports).run()] == ["planned move is due"]


@pytest.mark.parametrize("apart_s", [0.0, 0.4, 300.0, -300.0])
def test_aws_health_and_the_status_of_one_event_are_one_recovery(ports: FakePorts, apart_s: float) -> None:
    job = training(ports)
    starts_at = b.NOW + 90_000
    notices.maintenance([b.OTHER], ports, starts_at=starts_at, cause="AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED")
    ports.fleets.troubles = [scheduled(b.OTHER, starts_at + apart_s)]
    Sweep(ports).run()
    ports.clock.now = starts_at - 7200
    Sweep(ports).run()
    ports.clock.now = starts_at - rules.MAINTENANCE_MARGIN_S
    for _ in range(3):
        Sweep(ports).run()
    assert [type(event).__name__ for event in ports.store.events[job.id].values()].count("MoveDue") == 1
    assert now(ports, job).phase is Phase.INTERRUPTED


def test_a_failing_status_check_is_no_blip_after_two_minutes_and_the_job_leaves_after_a_save(ports: FakePorts) -> None:
    job = training(ports)
    ports.fleets.troubles = [Trouble(instance=b.OTHER, impaired_since=b.NOW)]
    ports.clock.step(rules.IMPAIRED_LEAVE_S - 1)
    assert Sweep(ports).run() == []
    ports.clock.step(1)
    [finding] = Sweep(ports).run()
    assert "status check fails for 120 s" in finding.what
    assert ports.store.orders[job.id].action is Action.CHECKPOINT
    ports.clock.step(20)
    save(ports, job, 25, 1)
    Sweep(ports).run()
    assert ports.store.orders[job.id].action is Action.CHECKPOINT_STOP


def test_a_machine_whose_check_fails_for_ten_minutes_is_lost_to_hardware(ports: FakePorts) -> None:
    job = training(ports)
    ports.fleets.troubles = [Trouble(instance=b.OTHER, impaired_since=b.NOW)]
    ports.clock.step(rules.IMPAIRED_LOST_S)
    [finding] = Sweep(ports).run()
    assert "status check fails for 600 s" in finding.what
    row = now(ports, job)
    assert (row.phase, row.failure) == (Phase.RESUMING, "hardware")
    release_fleet(job.id, 1, ports)
    assert ports.fleets.live == []


def test_statuses_of_strangers_and_of_machines_that_end_change_nothing(ports: FakePorts) -> None:
    job = training(ports)
    ports.fleets.add(FOREIGN, job=None, fleet=None)
    ports.store.mark_ending([b.LEADER], job.id, b.NOW)
    ports.fleets.troubles = [
        scheduled(FOREIGN, b.NOW), scheduled(b.LEADER, b.NOW), Trouble(instance=FOREIGN, impaired_since=0.0),
    ]  # fmt: skip
    assert Sweep(ports).run() == []
    assert now(ports, job) == job


def test_statuses_that_ec2_does_not_list_in_full_change_nothing(
    ports: FakePorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = training(ports)

    def breaks_off() -> list[Trouble]:
        raise Unavailable("page 2")

    monkeypatch.setattr(ports.fleets, "troubled", breaks_off)
    with pytest.raises(Unavailable):
        Sweep(ports).run()
    assert now(ports, job) == job


def test_a_stack_in_which_nothing_runs_asks_for_no_status(ports: FakePorts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports.fleets, "troubled", None)
    assert Sweep(ports).run() == []


def test_a_dry_run_finds_what_statuses_say_and_changes_nothing(ports: FakePorts) -> None:
    job = training(ports)
    ports.fleets.troubles = [scheduled(b.OTHER, b.NOW + 90_000)]
    found = [(finding.what, finding.who) for finding in Sweep(ports, dry_run=True).run()]
    assert now(ports, job) == job
    assert [(finding.what, finding.who) for finding in Sweep(ports).run()] == found
    assert found


# -- neighbours --------------------------------------------------------------------------------------------------------


def three_jobs(ports: FakePorts) -> tuple[Job, Job, Job]:
    """Two jobs on the same capacity, and one in another zone."""
    noticed = training(ports)
    near = training(ports, "near-0123456789", THIRD)
    far = training(ports, "far-01234567890", FOURTH)
    ports.store.rows[far.id] = replace(far, pool=Pool(instance_type="c7i.large", zone="us-east-1b", market="spot"))
    return noticed, near, far


def test_a_notice_warns_the_other_jobs_of_its_pool_and_they_go_on(ports: FakePorts) -> None:
    noticed, near, far = three_jobs(ports)
    notices.interrupted(b.OTHER, ports, deadline_at=DEADLINE)
    assert now(ports, noticed).phase is Phase.INTERRUPTED
    assert (now(ports, near).phase, action_for(now(ports, near))) == (Phase.RUNNING, Action.CHECKPOINT)
    assert action_for(now(ports, far)) is Action.RUN


def test_the_own_metadata_of_a_node_warns_its_pool_too(ports: FakePorts) -> None:
    noticed, near, _ = three_jobs(ports)
    NodeReports(ports).take(seen(noticed, "terminate", DEADLINE))
    assert action_for(now(ports, near)) is Action.CHECKPOINT


def test_many_notices_warn_a_pool_once_in_a_cool_down(ports: FakePorts, monkeypatch: pytest.MonkeyPatch) -> None:
    noticed, near, _ = three_jobs(ports)
    looks: list[list[str]] = []
    alive = ports.store.alive
    monkeypatch.setattr(ports.store, "alive", lambda: looks.append(alive()) or looks[-1])
    notices.interrupted(b.OTHER, ports, deadline_at=DEADLINE)
    save(ports, near, 25, 1)
    version = now(ports, near).version
    notices.interrupted(b.LEADER, ports, deadline_at=DEADLINE)
    notices.interrupted(b.LEADER, ports, deadline_at=DEADLINE)
    assert now(ports, near).version == version
    assert (now(ports, noticed).interruptions, len(looks)) == (2, 1)


def test_a_pool_warning_reaches_a_bounded_number_of_jobs_the_least_saved_first(
    ports: FakePorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    training(ports)
    others = [training(ports, f"job-{number:010d}", f"i-{number:017x}") for number in range(6)]
    for number, one in enumerate(others):
        ports.clock.now = b.NOW - 1000 + number
        save(ports, one, 25, 1)
    ports.clock.now = b.NOW
    monkeypatch.setattr(rules, "POOL_JOBS_WARNED", 2)
    notices.interrupted(b.OTHER, ports, deadline_at=DEADLINE)
    asked = [one.id for one in others if action_for(now(ports, one)) is Action.CHECKPOINT]
    assert asked == [others[0].id, others[1].id]


def test_advice_for_one_machine_warns_nobody_else(ports: FakePorts) -> None:
    _, near, _ = three_jobs(ports)
    notices.advised(b.OTHER, ports)
    assert action_for(now(ports, near)) is Action.RUN


# -- cases -------------------------------------------------------------------------------------------------------------


def every_notice(instance: str, ports: FakePorts) -> list[notices.Told]:
    return [
        notices.interrupted(instance, ports, deadline_at=DEADLINE),
        notices.lost(instance, ports),
        notices.advised(instance, ports),
        *notices.evicted([instance], ports),
        *notices.maintenance([instance], ports, starts_at=b.NOW, cause="reboot"),
        *notices.degraded([instance], ports, cause="disk"),
    ]


def test_o01_notices_for_machines_that_are_not_ours_touch_nothing_however_often(ports: FakePorts) -> None:
    job = training(ports)
    for _ in range(200):
        assert {told.fate for told in every_notice(FOREIGN, ports)} == {Fate.FOREIGN}
    assert (now(ports, job), ports.store.writes, ports.fleets.live) == (job, 0, [b.LEADER, b.OTHER])
    notices.interrupted(b.OTHER, ports, deadline_at=DEADLINE)
    assert now(ports, job).interruptions == 1


def test_o01_notices_for_an_older_attempt_or_an_ended_job_are_late_and_harmless(ports: FakePorts) -> None:
    job = training(ports)
    record(b.lost(b.OTHER), job.id, ports)
    release_fleet(job.id, 1, ports)
    close_attempt(job.id, 1, ports)
    record(b.started(2), job.id, ports)
    second = now(ports, job)
    assert {told.fate for told in every_notice(b.LEADER, ports)} == {Fate.LATE, Fate.EXPECTED}
    assert now(ports, job) == second
    record(b.cancelled(), job.id, ports)
    close_attempt(job.id, 2, ports)
    ended = now(ports, job)
    assert {told.fate for told in every_notice(b.LEADER, ports)} == {Fate.LATE, Fate.EXPECTED}
    assert now(ports, job) == ended


def test_o03_five_pieces_of_advice_in_a_minute_bring_one_save_and_cost_no_node(ports: FakePorts) -> None:
    job = training(ports)
    ports.clock.now = b.NOW - 240
    save(ports, job, 900, 1)
    # Near the end of a window of the dedup key, so that only the cool-down stands between the first and the last.
    ports.clock.now = b.NOW + rules.REBALANCE_COOL_DOWN_S - 30
    generations = set()
    for _ in range(5):
        notices.advised(b.OTHER, ports)
        generations.add(ports.store.orders[job.id].generation)
        ports.clock.step(12)
    assert (len(generations), ports.store.orders[job.id].action) == (1, Action.CHECKPOINT)
    assert (now(ports, job).phase, ports.fleets.calls, len(ports.fleets.live)) == (Phase.RUNNING, [], 2)


def test_o03_nine_quiet_hours_after_advice_leave_a_running_job_and_no_trace(ports: FakePorts) -> None:
    job = training(ports)
    notices.advised(b.OTHER, ports)
    ports.clock.step(5)
    save(ports, job, 1, 1)
    asks = 0
    for minute in range(9 * 60):
        ports.clock.step(60)
        asks += len(Sweep(ports).run())
        if now(ports, job).asked_generation is not None:
            save(ports, job, 2 + minute, 2 + minute)
        assert now(ports, job).phase is Phase.RUNNING
    assert asks <= rules.ADVICE_HOLDS_S / rules.REBALANCE_COOL_DOWN_S
    assert (action_for(now(ports, job)), len(ports.fleets.live)) == (Action.RUN, 2)


def test_o03_a_spot_warning_needs_no_advice_before_it(ports: FakePorts) -> None:
    job = training(ports)
    notices.interrupted(b.OTHER, ports, deadline_at=DEADLINE)
    assert ports.store.orders[job.id].action is Action.CHECKPOINT_STOP


@pytest.mark.parametrize("order", list(itertools.permutations([b.OTHER, THIRD])))
@pytest.mark.parametrize("case", ["together", "in parallel", "while checkpointing"])
def test_o04_two_interruptions_are_one_recovery_of_the_whole_gang(
    ports: FakePorts, order: tuple[str, str], case: str
) -> None:
    job = training(ports, "demo-0123456789", b.LEADER, b.OTHER, THIRD, FOURTH, nodes=4)
    first, second = order
    notices.interrupted(first, ports, deadline_at=DEADLINE)
    if case == "in parallel":
        ports.store.races = 3
    if case == "while checkpointing":
        record(b.heard(), job.id, ports)
        ports.clock.step(60)
    notices.interrupted(second, ports, deadline_at=DEADLINE + 60)
    assert (now(ports, job).doomed, now(ports, job).deadline_at) == ((first, second), DEADLINE)
    record(b.saved(30, final=True), job.id, ports)
    assert release_fleet(job.id, 1, ports) == 4
    close_attempt(job.id, 1, ports)
    after = now(ports, job)
    assert (after.dispatchable, after.attempt, after.nodes, after.charged) == (True, 1, 4, {})


def test_o04_a_second_interruption_of_the_old_fleet_does_not_disturb_its_relaunch(ports: FakePorts) -> None:
    job = training(ports, "demo-0123456789", b.LEADER, b.OTHER, THIRD, FOURTH, nodes=4)
    notices.interrupted(b.OTHER, ports, deadline_at=DEADLINE)
    record(b.saved(30, final=True), job.id, ports)
    release_fleet(job.id, 1, ports)
    close_attempt(job.id, 1, ports)
    record(b.started(2), job.id, ports)
    relaunching = now(ports, job)
    assert notices.interrupted(THIRD, ports, deadline_at=DEADLINE).fate is Fate.LATE
    assert now(ports, job) == relaunching


def test_a_machine_whose_job_was_forgotten_is_foreign(ports: FakePorts) -> None:
    job = training(ports)
    del ports.store.rows[job.id]
    assert [told.fate for told in notices.evicted([b.OTHER], ports)] == [Fate.FOREIGN]


@pytest.mark.parametrize("kind", ["evicted", "maintenance", "degraded", "block_ends"])
def test_a_job_that_cannot_be_told_keeps_no_other_job_from_being_told(ports: FakePorts, kind: str) -> None:
    mine = "i-0ccccccccccccccc1"
    deaf, other = training(ports), training(ports, "other", mine)
    for instance in (b.LEADER, mine):
        ports.fleets.instances[instance] = replace(ports.fleets.instances[instance], reservation="cr-1")
    ports.store.deaf.add(deaf.id)
    soon = ports.clock() + 60
    with pytest.raises(Unavailable, match=b.LEADER):
        if kind == "evicted":
            notices.evicted([b.LEADER, mine], ports)
        elif kind == "maintenance":
            notices.maintenance([b.LEADER, mine], ports, starts_at=soon, cause="AWS Health")
        elif kind == "degraded":
            notices.degraded([b.LEADER, mine], ports, cause="AWS Health")
        else:
            notices.block_ends("cr-1", ports, ends_at=soon)
    assert now(ports, deaf) == deaf
    assert now(ports, other) != other


class BlindFleets(FakeFleets):
    """EC2 that cannot be asked, as often as told."""

    blind = 0

    def described(self, instances: object) -> list[Instance]:  # type: ignore[override]
        if self.blind:
            self.blind -= 1
            raise Unavailable("ConnectTimeoutError")
        return super().described(instances)  # type: ignore[arg-type]


def test_o06_a_look_that_fails_is_no_loss_however_often_it_fails(ports: FakePorts) -> None:
    ports.fleets = fleets = BlindFleets(ports.clock)
    job = training(ports)
    fleets.blind = 10
    for _ in range(10):
        with pytest.raises(Unavailable):
            Sweep(ports).run()
        ports.clock.step(60)
    for _ in range(25):
        assert Sweep(ports).run() == []
        fleets.blind = 1
        with pytest.raises(Unavailable):
            Sweep(ports).run()
        ports.clock.step(60)
    assert now(ports, job) == job
    assert len(fleets.live) == 2


def test_o06_a_loss_that_was_seen_is_told_once_and_recovered_once(ports: FakePorts) -> None:
    ports.fleets = BlindFleets(ports.clock)
    job = training(ports)
    ports.fleets.kill(b.OTHER)
    Sweep(ports).run()
    lost = now(ports, job)
    assert lost.phase is Phase.RESUMING
    Sweep(ports).run()
    assert now(ports, job) == lost


# -- how an end is told ------------------------------------------------------------------------------------------------


def test_a_crash_is_refined_by_its_log_tail(ports: FakePorts) -> None:
    job = training(ports)
    report = reports.Failed(
        job=job.id,
        attempt=1,
        instance=b.LEADER,
        at=b.NOW,
        failure="crash",
        reason="rank 3 ended with exit code 1",
        exit_code=1,
        rank=3,
        log_tail=(b.ROOT / "events" / "tails" / "oom-cuda.txt").read_text(),
    )
    NodeReports(ports).take(report)
    after = now(ports, job)
    assert (after.phase, after.failure) == (Phase.FAILED, "out_of_memory")
    assert [event.reason for event in ports.store.events[job.id].values()] == [
        f"{b.LEADER}: rank 3 ended with exit code 1; a GPU ran out of memory: "
        + report.log_tail.strip().splitlines()[-1][:240]
        + "..."
    ]


# -- notices that come together ----------------------------------------------------------------------------------------


def seen_by(job: Job, *instances: str, deadline_at: float = DEADLINE) -> list[reports.NoticeSeen]:
    about = {"job": job.id, "attempt": job.attempt, "at": b.NOW, "action": "terminate"}
    return [reports.NoticeSeen(**about, instance=one, deadline_at=deadline_at) for one in instances]  # type: ignore[arg-type]


def take_all(ports: FakePorts, *batch: reports.Report) -> None:
    door = NodeReports(ports, batch)
    for report in batch:
        door.take(report)


def test_notices_of_one_batch_are_one_write_a_job(ports: FakePorts) -> None:
    job = training(ports, "first", b.LEADER, b.OTHER)
    other = ports.holding(replace(training(ports, "other", THIRD, FOURTH), pool=None))
    batch = [*seen_by(job, b.LEADER, b.OTHER), *seen_by(other, THIRD), *seen_by(job, b.OTHER)]
    writes = ports.store.writes
    take_all(ports, replace(batch[0], deadline_at=DEADLINE + 9), *batch[1:])
    assert ports.store.writes == writes + 2
    assert (now(ports, job).doomed, now(ports, job).interruptions) == ((b.LEADER, b.OTHER), 2)
    assert ports.store.orders[job.id].deadline_at == DEADLINE
    assert now(ports, other).doomed == (THIRD,)


def test_a_batch_that_begins_with_a_known_notice_tells_the_others_all_the_same(ports: FakePorts) -> None:
    job = training(ports)
    take_all(ports, *seen_by(job, b.LEADER))
    take_all(ports, *seen_by(job, b.LEADER, b.OTHER))
    assert now(ports, job).doomed == (b.LEADER, b.OTHER)


def test_a_notice_for_a_machine_that_is_held_is_not_taken_along(ports: FakePorts) -> None:
    job = training(ports)
    ports.store.hold([b.OTHER], until=b.NOW + 600)
    take_all(ports, *seen_by(job, b.LEADER, b.OTHER))
    assert now(ports, job).doomed == (b.LEADER, b.OTHER)
    assert ports.store.owners[b.OTHER].state is Ownership.ENDING


def test_a_report_after_another_of_its_node_goes_by_what_that_one_wrote(ports: FakePorts) -> None:
    job = training(ports)
    about = {"job": job.id, "attempt": 1, "instance": b.OTHER}
    first, again = (
        reports.Progress(**about, at=b.NOW + after_s, step=60, loss=1.0, tokens_per_s=1.0)  # type: ignore[arg-type]
        for after_s in (10, 20)
    )
    take_all(ports, first, again)
    node = ports.store.owners[b.OTHER]
    assert (node.step_at, node.reported_at) == (b.NOW + 10, b.NOW + 20)


def test_only_the_first_notice_of_an_attempt_looks_for_neighbours(ports: FakePorts) -> None:
    training(ports)
    neighbour = training(ports, "neighbour", THIRD, FOURTH)
    notices.interrupted(b.LEADER, ports, deadline_at=DEADLINE)
    claimed = dict(ports.store.claims)
    ports.store.claims.clear()
    notices.interrupted(b.OTHER, ports, deadline_at=DEADLINE)
    assert (len(claimed), ports.store.claims) == (1, {})
    assert now(ports, neighbour).save_asked_at == b.NOW


def test_a_save_told_by_node_rank_0_is_a_progress_report_at_once(ports: FakePorts) -> None:
    job = training(ports)
    ports.store.update_node(replace(ports.store.owners[b.LEADER], step=40, step_at=b.NOW))
    pointer = b.saved(step=30).pointer
    saved = reports.CheckpointSaved(
        job=job.id, attempt=1, instance=b.LEADER, at=b.NOW + 9, save=pointer.save,
        manifest_sha256=pointer.manifest_sha256, step=30, loss=float("nan"), tokens_per_s=5.0,
    )  # fmt: skip
    take_all(ports, saved)
    node = ports.store.owners[b.LEADER]
    assert (node.step, node.step_at, node.loss) == (40, b.NOW, None)
    assert (node.tokens_per_s, node.reported_at) == (5.0, b.NOW + 9)
    take_all(ports, replace(saved, tokens_per_s=None, instance=b.OTHER))
    assert ports.store.owners[b.OTHER].reported_at is None
