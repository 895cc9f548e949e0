"""Where a step's time goes, and what share of the peak it makes of it."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

from job_contract.node_files import MEASURED_STEPS
from job_contract.spec import ModelSpec
from trainer import timing
from trainer.flops import flops_per_token, mfu, peak_of
from trainer.timing import Probe, StepTimes, time_sharding


class Clock:
    """Moves only when a test says so; stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_a_steps_own_time_is_what_it_did_not_wait_for_others(clock):
    times = StepTimes(torch.device("cpu"))
    assert (times.step_ms, times.comm_ms, times.data_wait_ms, times.own_ms) == (None, None, None, 0.0)
    with times.loading():
        clock.now += 0.02
    times.handed_over()
    clock.now += 0.3
    times.arrived()
    with times.waiting():
        clock.now += 0.1
    times.finish(1.0)
    assert (times.step_ms, times.data_wait_ms, times.comm_ms, times.own_ms) == (1000.0, 20.0, 400.0, 600.0)
    assert times.last_data_wait_ms == 20.0
    times.arrived()
    times.finish(0.5)
    assert (times.step_ms, times.comm_ms, times.own_ms) == (750.0, 200.0, 550.0)
    assert (times.data_wait_ms, times.last_data_wait_ms) == (10.0, 0.0)


def test_only_the_last_ten_steps_count():
    times = StepTimes(torch.device("cpu"))
    assert timing.STEPS == MEASURED_STEPS, "agents sample by it"
    for seconds in (9.0, *[1.0] * 10):
        times.finish(seconds)
    assert times.step_ms == 1000.0


def test_collectives_of_sharding_count_as_waiting_for_others(clock, monkeypatch):
    def gather(output):
        clock.now += 0.25
        return output

    monkeypatch.setattr(dist, "all_gather_single", gather)
    monkeypatch.setattr(dist, "reduce_scatter_single", gather)
    times = StepTimes(torch.device("cpu"))
    time_sharding(times)
    assert dist.all_gather_single(output=7) == 7
    dist.reduce_scatter_single(7)
    times.finish(1.0)
    assert times.comm_ms == 500.0


def test_the_probe_measures_its_device_and_not_more_often_than_said():
    probe = Probe(torch.device("cpu"), side=64, repeats=2)
    probe.look()
    first = probe.ms
    assert first > 0
    probe.ms = 0.0
    probe.look()
    assert probe.ms == 0.0


MODEL = ModelSpec(dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14336)


def test_mfu_is_the_share_of_the_peak_by_the_stated_formula():
    per_token = flops_per_token(8_000_000_000, MODEL, 8192)
    assert per_token == 6 * 8e9 + 12 * 32 * 4096 * 8192
    peak = peak_of("NVIDIA H100 80GB HBM3")
    assert mfu(100_000.0, per_token, 16, peak) == pytest.approx(100_000 * per_token / (16 * 989e12), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA A100-SXM4-40GB", 312e12), ("NVIDIA L40S", 362e12), ("NVIDIA L4", 121e12), ("Tesla T4", None)],
)
def test_the_peak_is_known_by_the_name_of_the_gpu(name, peak):
    assert peak_of(name) == peak


def test_without_a_peak_or_before_the_first_step_there_is_no_mfu():
    assert mfu(100.0, 1e9, 2, None) is None
    assert mfu(0.0, 1e9, 2, 989e12) is None
