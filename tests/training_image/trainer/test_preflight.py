"""Claims about the first collective, the announced phases, and the stacks of a rank that is asked for them."""

from __future__ import annotations

import signal

import pytest
from torch import distributed as dist

from job_contract.node_files import NetworkCheck, RankPulse, read_message
from tests.training_image.trainer.folder_agent import started, tiny_spec
from trainer.endings import NetworkFailed, exit_code_of
from trainer.preflight import bus_gbps, reachable
from trainer.pulse import FIRST_STEP_S, Lack, Pulse, step_bound_s


@pytest.mark.ranks
def test_ranks_tell_of_their_network_and_of_each_phase_and_show_their_stacks_when_asked(tmp_path, corpus_dir):
    with started(tmp_path, corpus_dir, tiny_spec(steps=100_000), 2) as ranks:
        ranks.until(lambda: ranks.saw("first_step"))
        for rank in ranks.ranks:
            check = read_message(ranks.run_dir(rank) / "network.json", NetworkCheck)
            assert (check.backend, check.world_size) == ("gloo", 2)
            assert min(check.seconds, check.bandwidth_gbps) > 0

        def pulses():
            paths = [ranks.run_dir(rank) / f"pulse/rank-{rank}.json" for rank in ranks.ranks]
            found = [read_message(path, RankPulse) for path in paths]
            return all(pulse and pulse.phase == "running" and pulse.step > 5 for pulse in found)

        ranks.until(pulses)
        ranks.until(lambda: ranks.progress().node_ms is not None)
        progress = ranks.progress()
        assert progress.step_ms > progress.comm_ms > 0
        assert min(progress.node_ms) > 0
        assert (len(progress.node_ms), progress.mfu) == (2, None)
        assert read_message(ranks.run_dir(1) / "pulse/rank-1.json", RankPulse).bound_s >= 30
        ranks.processes[1].send_signal(signal.SIGUSR1)
        ranks.until(lambda: "most recent call first" in ranks.log(1))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:119] Timed out waiting 120000ms for recv operation"),
        dist.DistStoreError("Timed out after 301 seconds waiting for clients. 1/2 clients joined."),
        dist.DistNetworkError(
            "The client socket has timed out after 300000ms while trying to connect to (10.0.0.1, 4)."
        ),
        RuntimeError("connect [10.0.0.2]:4911: No route to host"),
    ],
)
def test_peers_that_never_answer_are_a_failure_of_the_network(error):
    with pytest.raises(NetworkFailed) as failed, reachable():
        raise error
    assert exit_code_of(failed.value) == 75
    assert str(error) in str(failed.value)


def test_a_peer_that_closed_its_connection_died_of_something_else():
    error = RuntimeError("Connection closed by peer [10.0.0.2]:4911")
    with pytest.raises(RuntimeError) as failed, reachable():
        raise error
    assert exit_code_of(failed.value) == 73


def test_the_bandwidth_is_what_a_node_sends():
    assert bus_gbps(1_000_000_000, 2, 1.0) == pytest.approx(8.0)
    assert bus_gbps(1_000_000_000, 16, 0.05) == pytest.approx(300.0)


def test_the_bound_of_a_step_follows_the_slowest_of_the_last_ones():
    assert (step_bound_s(None), step_bound_s(0.2), step_bound_s(12.0)) == (FIRST_STEP_S, 30.0, 120.0)


def test_another_phase_is_told_at_once_and_another_step_at_most_twice_a_second(tmp_path):
    pulse = Pulse(tmp_path, 3)

    def told():
        return read_message(tmp_path / "pulse/rank-3.json", RankPulse)

    pulse.beat("starting")
    pulse.beat("running", step=1)
    assert (told().phase, told().step, told().bound_s) == ("running", 1, FIRST_STEP_S)
    pulse.beat("running", step=2, slowest_s=1.0)
    assert told().step == 1
    pulse.beat("saving", step=2)
    assert (told().phase, told().step) == ("saving", 2)


def test_the_bound_of_a_fetch_follows_its_bytes_and_counts_from_when_the_rank_began_to_wait(tmp_path):
    pulse, path = Pulse(tmp_path, 3), tmp_path / "pulse/rank-3.json"
    for lack, bound_s in ((Lack("data/index.json", 0), 600.0), (Lack("data/shard-00007.bin", 40_000_000_000), 2000.0)):
        pulse.beat("waiting_for_data", lack=lack)
        told = read_message(path, RankPulse)
        assert (told.phase, told.waits_for, told.bound_s) == ("waiting_for_data", lack.what, bound_s)
        path.unlink()
        pulse._at -= 1000.0
        pulse.beat("waiting_for_data", lack=lack)
        assert not path.exists(), "a word said again would move the bound"
    pulse.beat("running")
    assert read_message(path, RankPulse).waits_for is None
