"""Claims about ranks that live and do nothing: found by the bound they stated, named, dumped, ended."""

import os
import signal
from dataclasses import replace

import pytest

from agent.hang import HangWatch, state_of
from agent.hygiene import marked
from job_contract.node_files import RankPulse, write_message

BOUND_S = 0.5
RUNNING = {0: os.getpid(), 1: os.getpid()}


def test_a_frozen_rank_is_declared_hung_within_its_bound_and_its_node_names_it(start_node, play):
    node = start_node()
    behaviour = f"pulse:{BOUND_S}"
    node.orders.value = play.seen("run", 3, spec=play.spec(behaviour, ranks_per_node=2))
    play.until(lambda: len(list(node.run_dir.glob("pulse/rank-*.json"))) == 2, node)
    os.kill(node.agent.attempt.ranks.pids()[1], signal.SIGSTOP)
    failed = node.wait_for("failed")
    assert (failed.failure, failed.rank) == ("hang", 1)
    for word in ("rank 1 made no progress", "phase running", "bound 0 s", "its process is stopped"):
        assert word in failed.reason
    assert "Current thread" in failed.log_tail
    assert marked(node.root) == []


def test_ranks_that_step_are_never_hung(start_node, play):
    node = start_node()
    node.orders.value = play.seen("run", 3, behaviour=f"pulse:{BOUND_S}")
    play.until(lambda: len(node.heard("progress")) > 12, node)
    assert node.heard("failed") == []


def test_a_fetch_that_never_ends_is_declared_hung_with_what_it_fetches_and_how_the_bucket_answers(start_node, play, s3):
    s3.fail("get", "SHA256SUMS", "SlowDown", 503, times=1000)
    spec, node = play.spec("waits:0.5"), start_node()
    uri = "s3://bucket/teams/research/llama"
    node.orders.value = play.seen("run", 1, spec=replace(spec, training=replace(spec.training, init_from=uri)))
    failed = node.wait_for("failed")
    assert failed.failure == "hang"
    for words in ("in phase loading_weights", "it waits for the weights", "init_from: SlowDown"):
        assert words in failed.reason


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watch(tmp_path, clock):
    return HangWatch(tmp_path, grace_s=3.0, clock=clock)


def beat(run_dir, rank, step, bound_s=30.0, phase="running"):
    pulse = RankPulse(rank=rank, phase=phase, step=step, bound_s=bound_s)
    write_message(run_dir / "pulse" / f"rank-{rank}.json", pulse)


def test_a_node_whose_processes_all_run_waits_for_the_one_that_knows_better(watch, clock, tmp_path):
    """In a gang every rank stops when one does, and only one node sees why."""
    beat(tmp_path, 0, 7)
    assert watch.look(RUNNING) is None
    clock.now = 32.0
    assert watch.look(RUNNING) is None
    clock.now = 33.5
    hang = watch.look(RUNNING)
    assert (hang.pulse.rank, hang.stopped) == (0, False)
    assert "rank 0 made no progress for 34 s in phase running at step 7 (bound 30 s)" in hang.reason


def test_the_rank_that_is_furthest_behind_is_named_when_none_is_stopped(watch, clock, tmp_path):
    beat(tmp_path, 0, 8)
    beat(tmp_path, 1, 7)
    watch.look(RUNNING)
    clock.now = 40.0
    assert watch.look(RUNNING).pulse.rank == 1


def test_a_long_phase_that_was_announced_is_no_hang_and_a_new_step_starts_the_bound_anew(watch, clock, tmp_path):
    beat(tmp_path, 0, 0, bound_s=900.0, phase="warming_up")
    watch.look(RUNNING)
    clock.now = 800.0
    assert watch.look(RUNNING) is None
    for step in range(1, 5):
        beat(tmp_path, 0, step)
        assert watch.look(RUNNING) is None
        clock.now += 29.0
    clock.now += 5.0
    assert watch.look(RUNNING).pulse.step == 4


def test_a_rank_that_never_wrote_a_pulse_or_wrote_nonsense_is_not_watched(watch, clock, tmp_path):
    (tmp_path / "pulse").mkdir()
    (tmp_path / "pulse/rank-0.json").write_text("{")
    watch.look(RUNNING)
    clock.now = 1e6
    assert watch.look(RUNNING) is None


def test_a_rank_that_is_not_asked_about_is_never_hung(watch, clock, tmp_path):
    beat(tmp_path, 0, 8)
    watch.look({1: os.getpid()})
    clock.now = 1e6
    assert watch.look({1: os.getpid()}) is None


def test_the_state_of_a_process_is_read_whatever_its_name():
    assert state_of(os.getpid()) in "RS"
    assert state_of(2**22 + 1) == ""
