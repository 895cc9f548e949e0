"""A job whose steps become slow gives one signal, and goes on as it did."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from holdfast.application.node_reports import NodeReports
from holdfast.domain.baseline import OFF_REPORTS, Baseline, BaselineKey
from holdfast.domain.events import StepsSlowed
from holdfast.domain.job import Job
from holdfast.domain.obligations import action_for
from holdfast.domain.phase import Phase
from holdfast.messages.acceptance import read_acceptance
from job_contract import reports
from job_contract.checkpoint_layout import save_name
from job_contract.orders import Action, Leader, Roster, RosterNode
from tests import builders as b
from tests.application.fakes import FakePorts

JOB = "demo-0123456789"
THIRD = "i-0aaaaaaaaaaaaaaa3"
BODY = read_acceptance((b.ROOT / "events" / "job-request.json").read_text(), now=b.NOW).request
USUAL = reports.Steady(steps=100, world_size=3, step_ms=1000.0, tokens_per_s=9000.0, data_wait_ms=10.0, comm_ms=200.0)
NODE_MS = (800.0, 800.0, 800.0)


@pytest.fixture
def ports() -> FakePorts:
    """The job trains on three machines."""
    ports = FakePorts()
    trains_on(ports, b.a_running_job(), b.LEADER, b.OTHER, THIRD)
    ports.store.requests[JOB] = BODY
    return ports


def trains_on(ports: FakePorts, job: Job, *machines: str) -> None:
    ports.holding(job)
    ports.owning(job, *machines)
    assert job.roster_id
    nodes = tuple(RosterNode(node_rank=n, instance=one, ip="10.0.0.1") for n, one in enumerate(machines))
    leader = Leader(ip="10.0.0.1", port=4)
    ports.store.put_roster(Roster(job=JOB, attempt=job.attempt, roster_id=job.roster_id, nodes=nodes, leader=leader))


def job(ports: FakePorts) -> Job:
    return ports.store.rows[JOB]


def tell(ports: FakePorts, kind: type[reports.Report], **fields: Any) -> dict[str, float]:
    taker = NodeReports(ports)
    taker.take(kind(job=JOB, attempt=job(ports).attempt, instance=b.LEADER, at=ports.clock(), **fields))
    return taker.found


def progress(ports: FakePorts, *, times: int = 1, node_ms: Any = NODE_MS, **changes: Any) -> float:
    """The leader tells of so many steps more, each time five minutes later; returns how often that was measured."""
    found = 0.0
    for _ in range(times):
        ports.clock.step(300)
        step = round(ports.clock() - b.NOW)
        told = {"step": step, "loss": 2.0, "tokens_per_s": 9000.0, "node_ms": node_ms}
        found += tell(ports, reports.Progress, **told, steady=replace(USUAL, **changes)).get("StepsSlowed", 0.0)
    return found


def signals(ports: FakePorts) -> list[StepsSlowed]:
    return [one for one in ports.store.events[JOB].values() if isinstance(one, StepsSlowed)]


def key(world_size: int = 3) -> BaselineKey:
    return BaselineKey.of(json.loads(BODY["body"]), "c7i.large", world_size)


def test_a_quarter_more_all_reduce_time_gives_one_signal_that_names_the_node(ports: FakePorts) -> None:
    progress(ports)
    before = job(ports)
    measured = progress(ports, times=20, comm_ms=250.0, step_ms=1050.0, node_ms=(800.0, 800.0, 850.0))
    [signal] = signals(ports)
    assert (measured, signal.instance) == (1.0, THIRD)
    assert f"250 ms where 200 is usual (+25%), node 2 ({THIRD}) needs 850 ms" in signal.cause
    watch = ports.store.owners[b.LEADER].watch
    assert watch is not None and watch.told == signal.cause
    after = job(ports)
    assert (after.slowdowns, after.phase, action_for(after)) == (1, Phase.RUNNING, Action.RUN)
    assert (after.generation, after.leaving, after.move_by_at) == (before.generation, (), None)


def test_fifteen_percent_more_gives_none(ports: FakePorts) -> None:
    progress(ports)
    measured = progress(ports, times=20, comm_ms=230.0, step_ms=1150.0, node_ms=(800.0, 800.0, 830.0))
    assert (measured, signals(ports), job(ports).slowdowns) == (0.0, [], 0)


def test_where_no_node_stands_out_the_signal_names_who_measured_it(ports: FakePorts) -> None:
    progress(ports)
    progress(ports, times=OFF_REPORTS, comm_ms=300.0, node_ms=None)
    [signal] = signals(ports)
    assert (signal.instance, f"measured on rank 0 on {b.LEADER}" in signal.cause) == ("", True)
    assert "look at the network" in signal.cause


def test_the_first_steady_window_is_the_baseline_and_is_kept_with_one_write(ports: FakePorts) -> None:
    progress(ports)
    [kept] = ports.store.usual.items()
    assert kept == (key(), Baseline.of(USUAL, job=JOB, at=ports.clock(), nodes=2))
    writes = ports.store.writes
    progress(ports, times=4)
    assert ports.store.writes - writes == 4, "the leader's item, once a report"


def test_a_job_is_held_against_what_another_has_left_from_its_first_report_on(ports: FakePorts) -> None:
    left = Baseline.of(replace(USUAL, step_ms=700.0), job="before", at=b.NOW, nodes=3)
    ports.store.usual[key()] = left
    assert progress(ports, times=OFF_REPORTS) == 1
    [signal] = signals(ports)
    assert "a step takes 1,000 ms where 700 is usual (+43%)" in signal.cause
    assert ports.store.usual[key()] == left, "what is slow is not taken for usual"


def test_a_baseline_of_another_world_size_says_nothing(ports: FakePorts) -> None:
    ports.store.usual[key(16)] = Baseline.of(replace(USUAL, step_ms=100.0), job="before", at=b.NOW, nodes=16)
    assert progress(ports, times=10) == 0


def test_a_report_that_comes_again_counts_once(ports: FakePorts) -> None:
    progress(ports)
    for _ in range(OFF_REPORTS - 1):
        progress(ports, step_ms=2000.0)
        for _ in range(5):
            tell(ports, reports.Progress, step=9, loss=2.0, tokens_per_s=1.0, steady=replace(USUAL, step_ms=2000.0))
    assert signals(ports) == []


def test_a_signal_whose_report_failed_halfway_is_given_by_the_next_delivery_and_stands_once(ports: FakePorts) -> None:
    progress(ports)
    progress(ports, times=OFF_REPORTS - 1, step_ms=2000.0)
    before = ports.store.owners[b.LEADER]
    assert progress(ports, step_ms=2000.0) == 1
    ports.store.owners[b.LEADER] = before
    told = {"step": 5, "loss": 2.0, "tokens_per_s": 1.0}
    assert tell(ports, reports.Progress, **told, steady=replace(USUAL, step_ms=2000.0)) == {"StepsSlowed": 1}
    assert len(signals(ports)) == job(ports).slowdowns == 1


def test_saves_closer_than_the_reports_carry_the_same_figures(ports: FakePorts) -> None:
    for number in range(1, OFF_REPORTS + 2):
        ports.clock.step(300)
        slow = USUAL if number == 1 else replace(USUAL, data_wait_ms=100.0)
        save = {"save": save_name(10 * number, 1, number), "manifest_sha256": f"{number:064x}", "step": 10 * number}
        tell(ports, reports.CheckpointSaved, **save, loss=2.0, tokens_per_s=1.0, steady=slow)
    [signal] = signals(ports)
    assert "waiting for data takes 100 ms where 10 is usual" in signal.cause


def test_a_job_that_is_to_stop_gives_no_signal(ports: FakePorts) -> None:
    progress(ports)
    ports.holding(b.after(job(ports), b.cancelled()))
    assert progress(ports, times=10, step_ms=2000.0) == 0
    assert signals(ports) == []


def test_the_next_attempt_learns_and_signals_anew(ports: FakePorts) -> None:
    progress(ports)
    assert progress(ports, times=5, step_ms=2000.0) == 1
    over = b.after(job(ports), b.lost(b.OTHER), b.closed())
    again = b.after(over, b.started(2), b.intended(2), b.bought(2), b.ready(2), b.training(2))
    trains_on(ports, again, b.LEADER, b.OTHER, THIRD)
    ports.store.owners[b.LEADER] = replace(ports.store.owners[b.LEADER], attempt=2)
    assert progress(ports, times=5, step_ms=2000.0) == 1
    assert [one.attempt for one in signals(ports)] == [1, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_figures_that_are_no_time_are_left_out(ports: FakePorts, value: float) -> None:
    progress(ports, times=5, step_ms=value)
    assert ports.store.owners[b.LEADER].watch is None
    assert ports.store.usual == {}


def test_the_evaluation_loss_stays_until_the_next_one(ports: FakePorts) -> None:
    for loss in (1.5, None, float("nan")):
        ports.clock.step(1)
        tell(ports, reports.Progress, step=9, loss=2.0, tokens_per_s=1.0, evaluation_loss=loss)
        assert ports.store.owners[b.LEADER].evaluation_loss == 1.5
