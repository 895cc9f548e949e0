"""Whatever moment a node dies at, does the job come back? `python -m bench.kills` answers with a table.

A run of 40 steps with a save every 5 is killed with SIGKILL after each of its steps, and at 50 seeded moments inside
its saves and uploads: before or after one of the calls to the bucket, or while a rank writes. Then a new attempt takes
the head over and goes on from it. The ranks are real processes, forked from one that has torch loaded; a node's agent
is its real upload, commit and fetch, and dies by making no further call: a call that was made is whole, as in S3.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import boto3
from moto import mock_aws

import agent.fetch
import agent.saves
from agent.cloud import Bucket
from agent.commit import Committer
from agent.fetch import Fetch
from agent.journal import Journal
from agent.ranks import Seats
from agent.saves import Saves
from agent.settings import Pace
from bench.table import Row, report
from holdfast.adapters.checkpoints_s3 import S3Checkpoints
from holdfast.domain.job import Job
from job_contract.checkpoint_layout import SavePointer, file_key, head_key, open_head, parse_save_name
from job_contract.node_files import Control, JobFile, write_message
from job_contract.spec import JobSpec
from job_contract.verification import verify
from tests import builders
from tests.training_image.trainer.folder_agent import ROOTS, free_port, rank_environment, tiny_spec

STEPS, INTERVAL, KILLS_IN_SAVES = 40, 5, 50
GOES_ON_FOR = 2
PATIENCE_S = 180.0
SEED = 1
BUCKET = "bucket"
PACE = Pace(parts_s=0.02, save_grace_s=20.0, upload_retry_s=0.0)
MODEL = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 64}


@dataclass(frozen=True)
class Kill:
    """When the victims die: after this step, at this call to the bucket, or so long after this save was begun."""

    nodes: int = 1
    victims: tuple[int, ...] = (0,)
    after_step: int | None = None
    at_call: int | None = None
    call_is_made: bool = False
    in_save: int | None = None
    delay_s: float = 0.0


@dataclass
class Verdict:
    """What came of a kill; `wrong` is empty when the job came back as it must."""

    kill: Kill
    trained: int = 0
    durable: int = 0
    restored: int = 0
    wrong: list[str] = field(default_factory=list)


class Dead(Exception):
    """The node is dead, and so is every call that it would make."""


class MortalClient:
    """The S3 client of a node. `on_call` is told of each call before and after it is made, and may end the node."""

    def __init__(self, client: Any, on_call: Any) -> None:
        self._client, self._on_call = client, on_call
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if name == "get_paginator":
            return method

        def call(*arguments: Any, **fields: Any) -> Any:
            writes = name in ("put_object", "upload_file")
            self._live()
            if writes:
                self._on_call(made=False)
                self._live()
            answer = method(*arguments, **fields)
            if writes:
                self._on_call(made=True)
                self._live()
            return answer

        return call

    def _live(self) -> None:
        if self.dead:
            raise Dead


class Quiet(Journal):
    """Writes to its file only."""

    def note(self, event: str, **fields: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({"at": self._clock(), "event": event, **fields}, default=str) + "\n")


class ForkServer:
    """A process that has the trainer loaded and forks ranks on demand: a start costs no import of torch."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, ROOTS)), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.kills", "--serve"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, run_dir: Path, environment: dict[str, str]) -> int:
        """Return the process of a rank that runs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"run_dir": str(run_dir), "environment": environment}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """No rank is left: each dies with its parent."""
        self._process.kill()
        self._process.wait()


def serve() -> None:
    """Fork a rank for each line of standard input."""
    from trainer import train  # noqa: F401 - loaded once, for all ranks
    from trainer.__main__ import main as rank_main
    from trainer.parent import die_with_parent

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            os.environ.update(asked["environment"])
            log = os.open(f"{asked['run_dir']}/log.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os._exit(rank_main([asked["run_dir"]]))
        print(pid, flush=True)


class Node:
    """One node of an attempt: a rank's process and the duties of its agent that touch saves."""

    def __init__(self, root: Path, attempt: Attempt, node_rank: int) -> None:
        self.attempt, self.node_rank, self.run_dir = attempt, node_rank, root / f"node-{node_rank}"
        self.run_dir.mkdir(parents=True)
        world, journal = attempt.world, Quiet(self.run_dir / "agent.jsonl")
        self.client = MortalClient(world.s3, attempt.called)
        bucket = Bucket(self.client, BUCKET)
        number = attempt.number
        self.saves = Saves(
            Seats(
                job=world.spec.job,
                attempt=number,
                node_rank=node_rank,
                nodes=attempt.nodes,
                ranks_per_node=1,
                leader_ip="",
                leader_port=0,
                interface="lo",
            ),
            roster_id=f"roster-{number}",
            prefix=world.spec.prefix,
            run_dir=self.run_dir,
            bucket=bucket,
            committer=Committer(bucket, prefix=world.spec.prefix, job=world.spec.job, attempt=number, journal=journal),
            control=lambda: Control(attempt=number, generation=0),
            pace=PACE,
            journal=journal,
        )
        self.fetch = Fetch(
            [node_rank],
            job=world.spec.job,
            prefix=world.spec.prefix,
            run_dir=self.run_dir,
            local=(),
            bucket=bucket,
            downloads=2,
            journal=journal,
        )
        self.pid: int | None = None

    def start(self, job: JobFile, port: int) -> None:
        write_message(self.run_dir / "job.json", replace(job, node_rank=self.node_rank))
        self.pid = self.attempt.world.server.start(
            self.run_dir, rank_environment(self.node_rank, self.attempt.nodes, port)
        )
        self.saves.loop.start()
        self.fetch.loop.start()

    def kill(self) -> None:
        """The rank has SIGKILL, and the agent makes no further call."""
        self.client.dead = True
        if self.pid is not None and self.runs():
            os.kill(self.pid, signal.SIGKILL)
        self.saves.loop.closed.set()
        self.fetch.loop.closed.set()

    def runs(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def events(self) -> list[dict[str, Any]]:
        return lines(self.run_dir / "events.jsonl")

    def metrics(self) -> list[dict[str, Any]]:
        return lines(self.run_dir / "metrics.jsonl")

    def log(self) -> str:
        return (self.run_dir / "log.txt").read_text()[-2000:]


class Attempt:
    """The nodes of one attempt, and the kill that awaits them."""

    def __init__(self, world: World, number: int, nodes: int, kill: Kill | None) -> None:
        self.world, self.number, self.nodes, self.planned = world, number, nodes, kill
        self.calls = 0
        self._lock = threading.Lock()
        self.members = [Node(world.root / f"attempt-{number}", self, rank) for rank in range(nodes)]
        self.killed = False

    def start(self, resume: SavePointer | None, parent: SavePointer | None) -> None:
        job = JobFile(
            job=self.world.spec.job,
            attempt=self.number,
            spec=self.world.spec,
            node_rank=0,
            nodes=self.nodes,
            agent_pid=0,
            corpus_dir=str(self.world.corpus),
            roster_id=f"roster-{self.number}",
            resume_from=resume,
            resume_parent=parent,
        )
        port = free_port()
        for node in self.members:
            node.start(job, port)

    def called(self, *, made: bool) -> None:
        """A node is about to write to the bucket, or has written."""
        with self._lock:
            self.calls += not made
            due = self.planned is not None and self.calls == self.planned.at_call
        if due and self.planned is not None and made == self.planned.call_is_made:
            self.kill_victims()

    def kill_victims(self) -> None:
        assert self.planned is not None
        self.killed = True
        for rank in self.planned.victims:
            self.members[rank].kill()

    def run_to_the_kill(self) -> None:
        """The victims are dead and the others have ended, with what they could still commit."""
        kill = self.planned
        assert kill is not None
        deadline = time.monotonic() + PATIENCE_S
        while not self.killed and any(node.runs() for node in self.members):
            if kill.after_step is not None and len(self.members[0].metrics()) >= kill.after_step:
                self.kill_victims()
            if kill.in_save is not None:
                begun = [line for line in self.members[0].events() if line["event"] == "save_started"]
                if len(begun) >= kill.in_save and time.time() >= begun[kill.in_save - 1]["at"] + kill.delay_s:
                    self.kill_victims()
            if time.monotonic() > deadline:
                raise TimeoutError(self.members[0].log())
            time.sleep(0.002)
        while any(node.runs() for node in self.members) and time.monotonic() < deadline:
            time.sleep(0.01)
        survivors = [node for node in self.members if not node.client.dead]
        until = time.monotonic() + 0.5
        while any(not node.saves.idle() for node in survivors) and time.monotonic() < until:
            time.sleep(0.01)
        self.end()

    def end(self) -> None:
        for node in self.members:
            node.kill()
        for node in self.members:
            node.saves.loop.close(wait_s=5.0)
            node.fetch.loop.close(wait_s=5.0)

    def run_until(self, step: int) -> None:
        """This step is trained, or a rank has ended."""
        deadline = time.monotonic() + PATIENCE_S
        while all(node.runs() for node in self.members):
            if any(line["step"] >= step for line in self.members[0].metrics()):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(self.members[0].log())
            time.sleep(0.005)

    def finish(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while any(node.runs() or not node.saves.idle() for node in self.members):
            if time.monotonic() > deadline:
                raise TimeoutError(self.members[0].log())
            time.sleep(0.01)


class World:
    """A bucket of its own, and the job that lives in it."""

    def __init__(self, server: ForkServer, s3: Any, root: Path, corpus: Path, name: str) -> None:
        self.server, self.s3, self.root, self.corpus = server, s3, root / name, corpus
        self.spec = spec_of(name)
        self.row: Job = builders.a_job(id=self.spec.job)

    def take_over(self, attempt: int) -> Any:
        """Return the head that the attempt starts from, taken over as the supervisor does it."""
        row = replace(self.row, last_roster_id="r" if attempt > 1 else None)
        return S3Checkpoints(self.s3, bucket=BUCKET).take_over(self.spec.prefix, row, attempt)

    def head(self) -> SavePointer | None:
        raw = self.s3.get_object(Bucket=BUCKET, Key=head_key(self.spec.prefix))["Body"].read()
        return open_head(raw, job=self.spec.job).pointer

    def damages(self, pointer: SavePointer) -> list[str]:
        world = self

        class Files:
            def chunks(self, path: str) -> Any:
                key = file_key(world.spec.prefix, pointer.save, path)
                try:
                    return [world.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()]
                except world.s3.exceptions.NoSuchKey:
                    return None

        found = verify(Files(), job=self.spec.job, save=pointer.save, pointer=pointer)
        return [f"{damage.file}: {damage.reason}" for damage in found]


def spec_of(name: str) -> JobSpec:
    spec = tiny_spec(
        steps=STEPS, interval_steps=INTERVAL, model=MODEL, sequence_length=16, global_batch=4, warmup_steps=4
    )
    return replace(spec, job=name, prefix=f"teams/research/jobs/{name}")


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


@contextmanager
def harness(root: Path) -> Iterator[Any]:
    """Yield what makes worlds, by name. The agents look a hundred times a second."""
    server, looks = ForkServer(), (agent.fetch.LOOK_S, agent.saves.LOOK_S)
    agent.fetch.LOOK_S = agent.saves.LOOK_S = 0.01
    try:
        with mock_aws():
            s3 = boto3.client("s3", region_name="us-east-1", aws_access_key_id="t", aws_secret_access_key="t")
            s3.create_bucket(Bucket=BUCKET)
            yield lambda name: World(server, s3, root, root / "corpus", name)
    finally:
        server.close()
        agent.fetch.LOOK_S, agent.saves.LOOK_S = looks


def uninterrupted(world: World, nodes: int) -> tuple[dict[int, float], int]:
    """Return the loss of each step of a run that nothing kills, and how often it wrote to the bucket."""
    world.take_over(1)
    attempt = Attempt(world, 1, nodes, None)
    attempt.start(None, None)
    attempt.finish()
    losses = {line["step"]: line["loss"] for line in attempt.members[0].metrics()}
    attempt.end()
    if len(losses) != STEPS:
        raise RuntimeError(attempt.members[0].log())
    return losses, attempt.calls


def judged(world: World, kill: Kill, losses: dict[int, float]) -> Verdict:
    """Return what came of the kill: the head after it, and a new attempt that goes on from there."""
    verdict = Verdict(kill)
    world.take_over(1)
    first = Attempt(world, 1, kill.nodes, kill)
    first.start(None, None)
    first.run_to_the_kill()
    events, metrics = first.members[0].events(), first.members[0].metrics()
    verdict.trained = metrics[-1]["step"] if metrics else 0
    head = world.take_over(2)
    verdict.durable = head.step
    begun = [line["step"] for line in events if line["event"] == "save_started" and line["step"] > head.step]
    undurable = verdict.trained - begun[0] if begun else 0
    if verdict.trained - verdict.durable > INTERVAL + undurable:
        verdict.wrong.append(f"{verdict.trained - verdict.durable} steps lost, {undurable} of them while not durable")
    if head.pointer and (found := world.damages(head.pointer)):
        verdict.wrong += found
    told = {line["save"] for node in first.members for line in lines(node.run_dir / "agent.jsonl")
            if line["event"] == "head_put"}  # fmt: skip
    if told and max(parse_save_name(save).step for save in told) > verdict.durable:
        verdict.wrong.append(f"the head is at {verdict.durable}, behind what was told: {sorted(told)}")

    second = Attempt(world, 2, kill.nodes, None)
    second.start(head.pointer, head.parent)
    goal = min(STEPS, verdict.durable + GOES_ON_FOR)
    if verdict.durable < STEPS:
        second.run_until(goal)
    else:
        second.finish()
    restored = [line["step"] for line in second.members[0].events() if line["event"] == "restored"]
    verdict.restored = restored[0] if restored else 0
    if verdict.restored != verdict.durable:
        verdict.wrong.append(f"restored {verdict.restored}, durable was {verdict.durable}: {second.members[0].log()}")
    again = {line["step"]: line["loss"] for line in second.members[0].metrics()}
    wanted = range(verdict.durable + 1, goal + 1)
    if [again.get(step) for step in wanted] != [losses[step] for step in wanted]:
        verdict.wrong.append(f"other losses after the resume: {again}")
    second.end()
    return verdict


def kills_in_saves(number: int, calls: dict[int, int], seed: int = SEED) -> list[Kill]:
    """Return seeded kills of one of two nodes, or of both: at a call to the bucket, or while a share is written."""
    draw = random.Random(seed)
    kills = []
    for _ in range(number):
        victims = draw.choice([(0,), (1,), (0, 1)])
        if draw.random() < 0.7:
            at_call = draw.randrange(1, calls[2] + 1)
            kills.append(Kill(nodes=2, victims=victims, at_call=at_call, call_is_made=draw.random() < 0.5))
        else:
            in_save = draw.randrange(1, STEPS // INTERVAL + 1)
            kills.append(Kill(nodes=2, victims=victims, in_save=in_save, delay_s=draw.uniform(0, 0.05)))
    return kills


def main() -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, harness(Path(folder)) as world:
        runs = {nodes: uninterrupted(world(f"whole-{nodes}"), nodes) for nodes in (1, 2)}
        calls = {nodes: run[1] for nodes, run in runs.items()}
        kills = [Kill(after_step=step) for step in range(1, STEPS + 1)] + kills_in_saves(KILLS_IN_SAVES, calls)
        verdicts = []
        for number, kill in enumerate(kills):
            verdicts.append(judged(world(f"kill-{number}"), kill, runs[kill.nodes][0]))
            for wrong in verdicts[-1].wrong:
                print(f"{kill}: {wrong}", flush=True)
    lost = [verdict.trained - verdict.durable for verdict in verdicts]
    bad = sum(bool(verdict.wrong) for verdict in verdicts)
    return report(
        "kills",
        [
            Row("kills after a step", STEPS, f"== {STEPS}", True),
            Row("kills inside saves and uploads", len(kills) - STEPS, f">= {KILLS_IN_SAVES}", True),
            Row("not resumed, torn, or more lost than allowed", bad, "== 0", bad == 0),
            Row("steps lost, mean", sum(lost) / len(lost), "reported", True),
            Row("steps lost, most", max(lost), "reported", True),
            Row("resumes from a save", sum(verdict.restored > 0 for verdict in verdicts), "> 0", any(lost)),
            Row("seconds", time.monotonic() - started, "reported", True),
        ],
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        sys.exit(main())
