"""A slow or doubtful machine leaves its gang alone: after the next save, with the others kept."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.application.node_reports import NodeReports
from holdfast.application.release import close_attempt, release_fleet
from holdfast.domain.events import MovePlanned
from holdfast.domain.job import Job
from holdfast.domain.notices import MOST_SWAPS
from holdfast.domain.obligations import action_for
from holdfast.domain.ownership import Ownership
from holdfast.domain.phase import Phase
from holdfast.domain.straggler import SLOW_REPORTS
from job_contract import reports
from job_contract.checkpoint_layout import save_name
from job_contract.orders import Action, Leader, Roster, RosterNode
from tests import builders as b
from tests.application.fakes import FakePorts

JOB = "demo-0123456789"
HOST = "gpu-5e1f0c"


@pytest.fixture
def ports() -> FakePorts:
    """The job trains on two machines."""
    ports = FakePorts()
    job = ports.holding(b.a_running_job())
    ports.owning(job, b.LEADER, b.OTHER)
    nodes = tuple(RosterNode(node_rank=n, instance=one, ip="10.0.0.1") for n, one in enumerate((b.LEADER, b.OTHER)))
    assert job.roster_id
    leader = Leader(ip="10.0.0.1", port=4)
    ports.store.put_roster(Roster(job=JOB, attempt=1, roster_id=job.roster_id, nodes=nodes, leader=leader))
    return ports


def job(ports: FakePorts) -> Job:
    return ports.store.rows[JOB]


def tell(ports: FakePorts, kind: type[reports.Report], instance: str = b.LEADER, **fields: Any) -> None:
    NodeReports(ports).take(kind(job=JOB, attempt=job(ports).attempt, instance=instance, at=ports.clock(), **fields))


def progress(ports: FakePorts, *node_ms: float, times: int = 1, stuck: bool = False) -> None:
    for _ in range(times):
        ports.clock.step(300)
        step = 9 if stuck else round(ports.clock() - b.NOW)
        tell(ports, reports.Progress, step=step, loss=2.0, tokens_per_s=1.0, node_ms=node_ms or None)


def saved(ports: FakePorts, step: int, number: int, *, final: bool = False) -> None:
    ports.clock.step(10)
    name = save_name(step, job(ports).attempt, number)
    answers = {"final": True, "answers_generation": 9} if final else {}
    tell(ports, reports.CheckpointSaved, save=name, manifest_sha256=f"{step:064x}", step=step, **answers)


def test_a_straggler_is_left_after_the_next_save_and_the_others_are_held(ports: FakePorts) -> None:
    progress(ports, 100.0, 200.0, times=SLOW_REPORTS)
    assert (job(ports).phase, job(ports).leaving) == (Phase.RUNNING, (b.OTHER,))
    assert action_for(job(ports)) is Action.RUN
    saved(ports, 10, 1)
    assert (action_for(job(ports)), job(ports).doomed) == (Action.CHECKPOINT_STOP, (b.OTHER,))
    saved(ports, 12, 2, final=True)
    release_fleet(JOB, 1, ports)
    after = close_attempt(JOB, 1, ports)
    assert (after.held, after.charged, ports.fleets.live) == ((b.LEADER,), {}, [b.LEADER])
    assert after.pool is not None


def test_the_decision_stands_in_the_history_with_its_figures(ports: FakePorts) -> None:
    progress(ports, 100.0, 200.0, times=SLOW_REPORTS)
    [planned] = [one for one in ports.store.events[JOB].values() if isinstance(one, MovePlanned)]
    assert f"{b.OTHER} needs 200 ms a step where the others need 100" in planned.cause


def test_the_machine_of_a_straggler_is_set_aside(ports: FakePorts) -> None:
    ready = reports.Ready(
        job=JOB, attempt=1, instance=b.OTHER, at=b.NOW, ip="10.0.0.2", port=4, interface="e", instance_type="t",
        zone="z", host=HOST,
    )  # fmt: skip
    NodeReports(ports).take(ready)
    progress(ports, 100.0, 200.0, times=SLOW_REPORTS)
    assert list(ports.store.bad_hosts) == [HOST]


def test_a_gang_of_one_speed_is_left_alone_and_so_is_one_that_does_not_tell(ports: FakePorts) -> None:
    progress(ports, 100.0, 110.0, times=2 * SLOW_REPORTS)
    progress(ports, times=SLOW_REPORTS)
    assert (job(ports).leaving, job(ports).move_by_at) == ((), None)


def test_reports_without_a_new_step_say_nothing_new_of_a_node(ports: FakePorts) -> None:
    progress(ports, 100.0, 200.0, times=4 * SLOW_REPORTS, stuck=True)
    assert job(ports).leaving == ()


def test_a_saves_report_counts_as_one_of_progress_and_one_of_a_known_step_takes_nothing_back(ports: FakePorts) -> None:
    """With saves closer than `report_s` nothing else is told."""
    for number in range(1, SLOW_REPORTS + 1):
        ports.clock.step(300)
        for node_ms in ((100.0, 200.0), (100.0, 100.0), None):
            tell(
                ports,
                reports.CheckpointSaved,
                save=save_name(10 * number, 1, number),
                manifest_sha256=f"{number:064x}",
                step=10 * number,
                loss=2.0,
                tokens_per_s=1.0,
                node_ms=node_ms,
            )
    assert job(ports).leaving == (b.OTHER,)


def test_a_job_swaps_so_often_and_no_more(ports: FakePorts) -> None:
    ports.holding(b.a_running_job(swaps=MOST_SWAPS))
    progress(ports, 100.0, 200.0, times=SLOW_REPORTS)
    assert job(ports).leaving == ()


def test_more_reports_of_a_straggler_plan_nothing_more(ports: FakePorts) -> None:
    progress(ports, 100.0, 200.0, times=3 * SLOW_REPORTS)
    assert job(ports).swaps == 1


def test_an_unfit_machine_that_is_held_is_no_part_of_the_next_gang(ports: FakePorts) -> None:
    ports.holding(b.after(job(ports), b.lost(b.LEADER)))
    ports.fleets.kill(b.LEADER)
    release_fleet(JOB, 1, ports)
    close_attempt(JOB, 1, ports)
    assert job(ports).held == (b.OTHER,)
    tell(ports, reports.Unfit, b.OTHER, reason="GPU 3: Xid 79 (GPU has fallen off the bus)", host=HOST)
    assert ports.store.owners[b.OTHER].state is Ownership.ENDING
    assert ports.store.bad_hosts[HOST].reason.startswith("GPU 3: Xid 79")


def test_an_unfit_machine_of_an_attempt_that_ends_is_not_held(ports: FakePorts) -> None:
    ports.holding(b.after(job(ports), b.failed("peer_lost")))
    tell(ports, reports.Unfit, b.OTHER, reason="2 processes of the last attempt cannot be ended")
    release_fleet(JOB, 1, ports)
    assert close_attempt(JOB, 1, ports).held == (b.LEADER,)


def test_an_unfit_survivor_ends_the_launch_and_the_others_are_held(ports: FakePorts) -> None:
    launching = b.after(b.a_job(), b.started(), b.intended(), b.bought())
    ports.holding(launching)
    tell(ports, reports.Unfit, b.OTHER, reason="the clock is 7 s off")
    assert (job(ports).phase, "is unfit: the clock is 7 s off" in job(ports).reason) == (Phase.RESUMING, True)
    release_fleet(JOB, 1, ports)
    after = close_attempt(JOB, 1, ports)
    assert (after.held, after.charged) == ((b.LEADER,), {})


def test_a_machine_that_turns_unfit_at_work_is_left_after_the_next_save(ports: FakePorts) -> None:
    tell(ports, reports.Unfit, b.OTHER, reason="Xid 63")
    assert (job(ports).phase, job(ports).leaving) == (Phase.RUNNING, (b.OTHER,))


def test_a_date_for_all_machines_outweighs_the_swap_of_one(ports: FakePorts) -> None:
    progress(ports, 100.0, 200.0, times=SLOW_REPORTS)
    tell(ports, reports.NoticeSeen, action="system-reboot", deadline_at=b.NOW + 90_000)
    assert (job(ports).leaving, job(ports).move_by_at is not None) == ((), True)
