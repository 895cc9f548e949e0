"""Claims about ranks that lose their peer or their agent."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from job_contract.node_files import JobFile, write_message
from tests.training_image.trainer.folder_agent import DEADLINE_S, free_port, rank_environment, started, tiny_spec
from trainer.endings import exit_code_of

pytestmark = pytest.mark.ranks
ENDLESS = 100_000

# An agent that starts one rank, says its pid, and waits to be killed.
AGENT = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-m", "trainer", sys.argv[1]])
print(rank.pid, flush=True)
time.sleep(600)
"""


def test_a_rank_whose_peer_is_killed_ends_as_peer_lost(tmp_path, corpus_dir):
    with started(tmp_path, corpus_dir, tiny_spec(steps=ENDLESS), 2) as ranks:
        ranks.until(lambda: ranks.saw("first_step"))
        ranks.processes[1].kill()
        assert ranks.finish()[0] == 73, ranks.log(0)
        assert ranks.outcomes() == []


def test_a_training_that_stays_non_finite_ends_as_diverged_and_saves_nothing_of_it(tmp_path, corpus_dir):
    spec = tiny_spec(steps=ENDLESS, interval_steps=1, learning_rate=1e38, warmup_steps=0)
    with started(tmp_path, corpus_dir, spec, 1) as ranks:
        assert ranks.finish() == [71], ranks.log(0)
        assert [pointer.step for pointer in ranks.bucket.committed] == [1]
        assert [line["step"] for line in ranks.metrics()] == [1, 2, 3, 4]


def test_a_rank_without_memory_ends_in_a_class_of_its_own_and_names_the_ways_out(tmp_path, corpus_dir):
    # 2**50 bytes are more than any process can address, so nothing is really taken.
    with started(tmp_path, corpus_dir, tiny_spec(model={"vocab": 2**42}), 1) as ranks:
        assert ranks.finish() == [72], ranks.log(0)
        last = ranks.log(0).splitlines()[-1]
    for way in ("fleet.nodes", "fleet.instance_types", "training.activation_checkpointing", "training.micro_batch"):
        assert way in last


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_every_kind_of_memory_that_runs_out_is_one_class(error: BaseException):
    assert exit_code_of(error) == 72
    assert exit_code_of(RuntimeError("CUDA error: an illegal memory access")) == 1


def test_no_rank_outlives_its_agent(tmp_path, corpus_dir):
    spec = tiny_spec(steps=ENDLESS)
    job = JobFile(
        job=spec.job,
        attempt=1,
        spec=spec,
        node_rank=0,
        nodes=1,
        agent_pid=0,
        corpus_dir=str(corpus_dir),
        roster_id="roster-1",
    )
    write_message(tmp_path / "job.json", job)
    command = [sys.executable, "-c", AGENT, str(tmp_path)]
    agent = subprocess.Popen(
        command, env=rank_environment(0, 1, free_port()), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    rank = int(agent.stdout.readline())
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists())
    agent.kill()
    agent.wait()
    wait_for(lambda: not alive(rank), deadline_s=2)


def test_a_rank_started_by_another_process_than_its_agent_does_not_train(tmp_path, corpus_dir):
    spec = tiny_spec()
    job = JobFile(
        job=spec.job,
        attempt=1,
        spec=spec,
        node_rank=0,
        nodes=1,
        agent_pid=1,
        corpus_dir=str(corpus_dir),
        roster_id="roster-1",
    )
    write_message(tmp_path / "job.json", job)
    rank = subprocess.run(
        [sys.executable, "-m", "trainer", str(tmp_path)],
        env=rank_environment(0, 1, free_port()),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert rank.returncode == 1
    assert "the agent 1 is gone" in rank.stderr


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(holds, deadline_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
