"""Why a fleet never became ready, and what the gate remembers of a bad one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.application.dispatch import dispatch
from holdfast.application.launch import READY_WAIT_S, Launch
from holdfast.application.node_reports import NodeReports
from holdfast.application.readiness import explain_unready
from holdfast.application.release import close_attempt, release_fleet
from holdfast.application.retire import TEMPLATE_KEEP_S, retire_launch_templates, retire_placement_groups
from holdfast.application.sweep import Sweep
from holdfast.domain.job import Job
from holdfast.domain.phase import Phase
from holdfast.domain.placement import Pool, candidates
from job_contract import reports
from tests import builders as b
from tests.application.fakes import FakePorts

JOB = "demo-0123456789"
GANG = candidates(instance_types=["p5.48xlarge"], market="spot", zones=(), nodes=2)


@pytest.fixture
def ports() -> FakePorts:
    """Two p5.48xlarge were bought for the job and boot."""
    ports = FakePorts()
    ports.fleets.efas, ports.fleets.gpus = {"p5.48xlarge": 32}, {"p5.48xlarge": 8}
    ports.holding(b.after(b.a_job(), b.started()))
    assert Launch(ports).run(JOB, 1, candidates=GANG, prefix="p", time_left_s=120)["outcome"] == "launched"
    return ports


def job(ports: FakePorts) -> Job:
    return ports.store.rows[JOB]


def ready(ports: FakePorts, number: int, **told: Any) -> None:
    facts = {
        "ip": "10.0.0.1", "port": 4000, "interface": "ens32", "instance_type": "p5.48xlarge", "zone": "us-east-1a",
        "gpus": 8, "efa_devices": 32, "host": f"gpu-{number}", **told,
    }  # fmt: skip
    instance = sorted(ports.store.owners)[number]
    NodeReports(ports).take(reports.Ready(job=JOB, attempt=job(ports).attempt, instance=instance, at=b.NOW, **facts))


def timed_out(ports: FakePorts) -> str:
    ports.clock.step(READY_WAIT_S + 1)
    release_fleet(JOB, 1, ports)
    return job(ports).reason


# -- readiness ---------------------------------------------------------------------------------------------------------


def test_machines_that_run_and_never_check_in_have_a_sentence_of_their_own(ports: FakePorts) -> None:
    ports.fleets.consoles = dict.fromkeys(ports.fleets.live, "\x1b[0mcloud-init: docker pull:\r\ntimeout")
    reason = timed_out(ports)
    assert "0 of 2 nodes checked in within 900 s; EC2 shows 2 running" in reason
    for word in ("NAT", "endpoints", "security group", "image"):
        assert word in reason
    assert "docker pull: timeout" in reason
    assert "\x1b" not in reason


def test_one_silent_node_is_named_with_its_console_and_without_advice_on_the_network(ports: FakePorts) -> None:
    silent = sorted(ports.fleets.live)[1]
    ports.fleets.consoles = {silent: "Kernel panic"}
    ready(ports, 0)
    reason = timed_out(ports)
    assert "1 of 2 nodes checked in" in reason
    assert f"console of {silent}: Kernel panic" in reason
    assert "NAT" not in reason


def test_machines_that_died_are_told_with_the_reason_that_ec2_gives(ports: FakePorts) -> None:
    for instance in list(ports.fleets.instances):
        gone = replace(ports.fleets.instances[instance], state="terminated", state_reason="Client.InternalError")
        ports.fleets.instances[instance] = gone
    reason = timed_out(ports)
    assert "2 terminated" in reason
    assert "ended by Client.InternalError" in reason


def test_a_fleet_that_never_checks_in_is_charged_so_that_it_does_not_boot_for_ever(ports: FakePorts) -> None:
    timed_out(ports)
    assert close_attempt(JOB, 1, ports).charged == {"lost": 1}
    assert ports.fleets.live == []


def test_the_sentence_is_bounded_whatever_the_console_holds(ports: FakePorts) -> None:
    ports.fleets.consoles = dict.fromkeys(ports.fleets.live, "ü" * 100_000)
    assert len(timed_out(ports).encode()) <= 1000


@pytest.mark.parametrize("events", [[b.cancelled()], [b.ready()], [b.lost()]], ids=["cancelled", "started", "lost"])
def test_an_attempt_that_ends_otherwise_is_not_explained_so(ports: FakePorts, events: list[Any]) -> None:
    ports.holding(b.after(job(ports), *events))
    ports.clock.step(READY_WAIT_S + 1)
    assert explain_unready(job(ports), ports) is None


def test_an_attempt_that_is_stopped_by_hand_while_it_boots_is_not_explained_so(ports: FakePorts) -> None:
    ports.clock.step(60)
    assert explain_unready(job(ports), ports) is None


# -- the gate ----------------------------------------------------------------------------------------------------------


def test_a_broken_node_is_refused_remembered_and_its_pool_left_alone(ports: FakePorts) -> None:
    ready(ports, 0, gpus=7)
    ready(ports, 1)
    assert job(ports).phase is Phase.RESUMING
    assert "i-00000000000000000 sees 7" in job(ports).reason
    assert list(ports.store.bad_hosts) == ["gpu-0"]
    pool = Pool(instance_type="p5.48xlarge", zone="us-east-1a", market="spot", group="cluster")
    assert ports.store.colds[pool].until >= b.NOW + 300
    assert job(ports).failure == "hardware"


def test_a_repeated_report_of_a_broken_node_writes_nothing_more(ports: FakePorts) -> None:
    ready(ports, 0, gpus=7)
    ready(ports, 1)
    colds = dict(ports.store.colds)
    ports.clock.step(5)
    ready(ports, 1)
    assert ports.store.colds == colds


def test_the_machine_is_known_again_in_the_next_fleet(ports: FakePorts) -> None:
    ready(ports, 0, gpus=7)
    ready(ports, 1)
    release_fleet(JOB, 1, ports)
    close_attempt(JOB, 1, ports)
    ports.clock.step(600)
    ports.workflow.executions = {}
    assert dispatch(ports) == [JOB]
    assert Launch(ports).run(JOB, 2, candidates=GANG, prefix="p", time_left_s=120)["outcome"] == "launched"
    ready(ports, 2, host="gpu-0")
    ready(ports, 3)
    assert "found bad before (gpus_missing)" in job(ports).reason


def test_an_image_without_a_driver_sends_no_machine_into_quarantine(ports: FakePorts) -> None:
    ready(ports, 0, gpus=0)
    ready(ports, 1, gpus=0)
    assert job(ports).phase is Phase.RESUMING
    assert (ports.store.bad_hosts, ports.store.colds) == ({}, {})


def test_a_gang_as_bought_starts(ports: FakePorts) -> None:
    ready(ports, 0)
    ready(ports, 1)
    assert job(ports).roster_id is not None


def test_a_preflight_over_tcp_ends_the_attempt_before_its_first_step(ports: FakePorts) -> None:
    ready(ports, 0)
    ready(ports, 1)
    report = reports.NetworkChecked(
        job=JOB, attempt=1, instance=ports.fleets.live[0], at=b.NOW, provider="tcp", seconds=2.0
    )
    NodeReports(ports).take(report)
    assert (job(ports).phase, "tcp, not EFA" in job(ports).reason) == (Phase.RESUMING, True)


def test_a_preflight_that_is_reported_late_ends_nothing(ports: FakePorts) -> None:
    ready(ports, 0)
    ready(ports, 1)
    ports.holding(b.after(job(ports), b.training()))
    report = reports.NetworkChecked(
        job=JOB, attempt=1, instance=ports.fleets.live[0], at=b.NOW, provider="tcp", seconds=2.0
    )
    NodeReports(ports).take(report)
    assert job(ports).phase is Phase.RUNNING


# -- what is given back later ------------------------------------------------------------------------------------------


def test_o18_a_group_in_use_never_holds_up_a_finished_job_and_is_never_forgotten(ports: FakePorts) -> None:
    """Instances stay shutting-down for 35 minutes; each sweep tries again, outside of any run of the job."""
    [name] = ports.fleets.made_groups
    ports.fleets.groups_in_use = {name}
    ports.holding(b.after(job(ports), b.ready(), b.training(), b.finished()))
    assert retire_placement_groups(ports).gone == ()
    release_fleet(JOB, 1, ports)
    assert close_attempt(JOB, 1, ports).phase is Phase.COMPLETED
    for _ in range(35):
        ports.clock.step(60)
        assert Sweep(ports).run() == []
        assert retire_placement_groups(ports).held == (name,)
    ports.fleets.groups_in_use = set()
    assert [(found.what, found.who) for found in Sweep(ports).run()] == [("leftover of a purchase", name)]
    assert (Sweep(ports).run(), ports.fleets.made_groups) == ([], {})


def test_o18_the_group_of_a_job_that_waits_is_kept_and_that_of_nobody_is_not(ports: FakePorts) -> None:
    ports.holding(b.after(job(ports), b.lost(), b.closed()))
    ports.fleets.made_groups["stray"] = "never-heard-of"
    assert retire_placement_groups(ports).gone == ("stray",)
    assert len(ports.fleets.made_groups) == 1


def test_a_template_is_given_back_after_a_week_unless_a_fleet_that_lives_was_bought_with_it(ports: FakePorts) -> None:
    ports.fleets.made_templates["lt-old"] = ports.clock()
    assert retire_launch_templates(ports).gone == ()
    ports.clock.step(TEMPLATE_KEEP_S + 1)
    retired = retire_launch_templates(ports)
    assert (retired.gone, retired.held) == (("lt-old",), ("lt-p5.48xlarge",))
    assert list(ports.fleets.made_templates) == ["lt-p5.48xlarge"]
