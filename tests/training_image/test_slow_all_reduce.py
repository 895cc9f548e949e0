"""All-reduce that has become slower, from the rank's clock to the signal: trainer, agent and supervisor in one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from agent.steady import SteadySteps
from holdfast.application.node_reports import NodeReports
from holdfast.domain.events import StepsSlowed
from holdfast.messages.acceptance import read_acceptance
from job_contract.node_files import RankProgress
from job_contract.reports import Progress
from tests import builders as b
from tests.application.fakes import FakePorts
from trainer import timing
from trainer.timing import StepTimes

REPORT_S, STEPS_A_REPORT = 300.0, 100


class Rank0:
    """Measures steps of 0.6 s of its own work and 0.4 s of all-reduce, and shows them as the trainer does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.step, self.slower = 0.0, 0, 1.0
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.times = StepTimes(torch.device("cpu"))

    def train(self) -> RankProgress:
        began = self.now
        with self.times.loading():
            self.now += 0.01
        self.now += 0.59
        with self.times.waiting():
            self.now += 0.4 * self.slower
        self.times.finish(self.now - began)
        self.step += 1
        return RankProgress(
            step=self.step,
            loss=2.0,
            tokens_per_s=1000.0,
            state="running",
            world_size=2,
            started=True,
            step_ms=self.times.step_ms,
            data_wait_ms=self.times.data_wait_ms,
            comm_ms=self.times.comm_ms,
            node_ms=(600.0, 600.0 + 400 * (self.slower - 1)),
        )


@pytest.mark.parametrize(("slower", "signals"), [(1.15, 0), (1.25, 1)])
def test_a_quarter_more_all_reduce_is_one_signal_and_fifteen_percent_none(
    monkeypatch: pytest.MonkeyPatch, slower: float, signals: int
) -> None:
    ports, rank, steady = FakePorts(), Rank0(monkeypatch), SteadySteps()
    job = ports.holding(b.a_running_job())
    ports.owning(job, b.LEADER, b.OTHER)
    body = (b.ROOT / "events" / "job-request.json").read_text()
    ports.store.requests[job.id] = read_acceptance(body, now=b.NOW).request
    for number in range(12):
        rank.slower = slower if number >= 3 else 1.0
        for _ in range(STEPS_A_REPORT):
            shown = rank.train()
            steady.look(shown, saving=False)
        ports.clock.step(REPORT_S)
        report = Progress(
            job=job.id,
            attempt=1,
            instance=b.LEADER,
            at=ports.clock(),
            step=shown.step,
            loss=2.0,
            tokens_per_s=1000.0,
            node_ms=shown.node_ms,
            steady=steady.take(),
        )
        NodeReports(ports).take(report)
    told = [one for one in ports.store.events[job.id].values() if isinstance(one, StepsSlowed)]
    assert len(told) == signals
    assert all("waiting for other ranks takes 500 ms where 400 is usual (+25%), node 1" in one.cause for one in told)
