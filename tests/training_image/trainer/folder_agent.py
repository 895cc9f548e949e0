"""Plays the agents of N one-rank nodes for the trainer, with a folder in place of the bucket."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from job_contract.checkpoint_layout import Damaged, Manifest, SavedFile, SavePointer, open_manifest, seal
from job_contract.node_files import (
    Control,
    ControlKind,
    JobFile,
    Needs,
    Outcome,
    Provided,
    RankProgress,
    RankSave,
    read_message,
    write_message,
)
from job_contract.reports import FellBack
from job_contract.spec import CheckpointSpec, DataSpec, JobSpec, ModelSpec, TrainingSpec

REPOSITORY = Path(__file__).parents[3]
ROOTS = [REPOSITORY / "layers/holdfast", REPOSITORY / "training_image", REPOSITORY]
DEADLINE_S = 120.0


def tiny_spec(
    *, interval_steps: int | None = 100, ranks_per_node: int = 1, model: dict[str, Any] | None = None, **training: Any
) -> JobSpec:
    """Return a job that trains in seconds; `training` and `model` override the fields of the same name."""
    sizes = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 128, **(model or {})}
    fields = {
        "steps": 8,
        "global_batch": 16,
        "sequence_length": 64,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "seed": 7,
        **training,
    }
    return JobSpec(
        job="job-1",
        team="research",
        spec_id="spec-1",
        prefix="teams/research/jobs/job-1",
        training=TrainingSpec(model=ModelSpec(**sizes), data=DataSpec(corpus="stdlib"), **fields),
        checkpoint=CheckpointSpec(interval_steps=interval_steps),
        ranks_per_node=ranks_per_node,
    )


@dataclass
class FolderBucket:
    """Committed saves, one folder each, with their manifests; the newest is what an attempt resumes from."""

    root: Path
    committed: list[SavePointer] = field(default_factory=list)

    def folder(self, save: str) -> Path:
        return self.root / save

    def pointer(self, step: int) -> SavePointer:
        """Return the last save committed for the step."""
        return next(pointer for pointer in reversed(self.committed) if pointer.step == step)

    def commit(self, shares: list[tuple[Path, RankSave]], job: str, attempt: int) -> SavePointer:
        """The files of all ranks are in the bucket, and the manifest that names them."""
        first = shares[0][1]
        target = self.folder(first.save)
        target.mkdir(parents=True)
        files = []
        for node_rank, (source, share) in enumerate(shares):
            for name in share.files:
                shutil.copy(source / name, target / name)
                digest = hashlib.sha256((target / name).read_bytes()).hexdigest()
                files.append(
                    SavedFile(path=name, size_bytes=(target / name).stat().st_size, sha256=digest, node_rank=node_rank)
                )
        older = [pointer for pointer in self.committed if pointer.step < first.step]
        manifest = Manifest(
            job=job,
            attempt=attempt,
            step=first.step,
            save=first.save,
            world_size=first.world_size,
            mesh=first.mesh,
            config_hash=first.config_hash,
            corpus_digest=first.corpus_digest,
            versions=first.versions,
            facts=first.facts,
            files=tuple(files),
            final=first.final,
            answers_generation=first.answers_generation,
            parent=max(older, key=lambda pointer: pointer.save, default=None),
        )
        raw, digest = seal(manifest)
        (target / "manifest.json").write_bytes(raw)
        pointer = SavePointer(save=first.save, manifest_sha256=digest)
        self.committed.append(pointer)
        return pointer

    def provide(self, needs: Needs, target: Path, job: str) -> Provided:
        """The verified files are in `target`; what was damaged is named."""
        source = self.folder(needs.save.save)
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / "manifest.json", target)
        try:
            manifest = open_manifest((source / "manifest.json").read_bytes(), job=job, pointer=needs.save)
        except Damaged as error:
            problem = FellBack(save=needs.save.save, file="manifest.json", reason=str(error))
            return Provided(number=needs.number, folder=str(target), damaged=(problem,))
        listed, damaged = {file.path: file.sha256 for file in manifest.files}, []
        for name in needs.files:
            shutil.copy(source / name, target)
            if hashlib.sha256((target / name).read_bytes()).hexdigest() != listed.get(name):
                damaged.append(FellBack(save=needs.save.save, file=name, reason="its bytes are not the committed ones"))
        return Provided(number=needs.number, folder=str(target), damaged=tuple(damaged))


class Attempt:
    """Running ranks. `until` serves them, as the agents would, until something holds."""

    def __init__(
        self, root: Path, bucket: FolderBucket, job: JobFile, processes: list[subprocess.Popen[bytes]]
    ) -> None:
        self.root, self.bucket, self.job, self.processes = root, bucket, job, processes
        self.generation = 0
        self._committed: set[str] = set()

    @property
    def ranks(self) -> range:
        return range(len(self.processes))

    def run_dir(self, rank: int) -> Path:
        return self.root / f"node-{rank}"

    def order(self, kind: ControlKind, *, nodes: list[int] | None = None, doomed: tuple[int, ...] = ()) -> int:
        """The nodes named, or all, hold an order of a new generation, which is returned."""
        self.generation += 1
        control = Control(attempt=self.job.attempt, generation=self.generation, kind=kind, doomed=doomed)
        for rank in self.ranks if nodes is None else nodes:
            write_message(self.run_dir(rank) / "control.json", control)
        return self.generation

    def until(self, holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Serve the ranks until `holds`, or until they have all ended. Raises TimeoutError with the ranks' output."""
        deadline = time.monotonic() + deadline_s
        while not holds() and not self.ended():
            self.serve()
            if time.monotonic() > deadline:
                raise TimeoutError(self.logs())
            time.sleep(0.01)
        self.serve()

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def finish(self) -> list[int]:
        """Return the exit codes of all ranks, once they have ended."""
        self.until(self.ended)
        return [process.returncode for process in self.processes]

    def serve(self) -> None:
        """Every open need has its answer, every complete save is committed."""
        for rank in self.ranks:
            needs = read_message(self.run_dir(rank) / f"needs/rank-{rank}.json", Needs)
            answer = read_message(self.run_dir(rank) / f"provided/rank-{rank}.json", Provided)
            if needs is not None and (answer is None or answer.number < needs.number):
                provided = self.bucket.provide(needs, self.run_dir(rank) / "fetched" / needs.save.save, self.job.job)
                write_message(self.run_dir(rank) / f"provided/rank-{rank}.json", provided)
        for folder in sorted(self.run_dir(0).glob("saves/step-*")):
            self._commit(folder.name)

    def _commit(self, save: str) -> None:
        if save in self._committed:
            return
        folders = [self.run_dir(rank) / "saves" / save for rank in self.ranks]
        shares = [read_message(folder / f"rank-{rank}.json", RankSave) for rank, folder in enumerate(folders)]
        if all(share is not None and share.failed is None for share in shares):
            self.bucket.commit(list(zip(folders, shares, strict=True)), self.job.job, self.job.attempt)  # type: ignore[arg-type]
            self._committed.add(save)

    def log(self, rank: int) -> str:
        return (self.run_dir(rank) / "log.txt").read_text()

    def logs(self) -> str:
        """Return the ends of all ranks' logs."""
        return "\n".join(f"--- rank {rank}\n{self.log(rank)[-2000:]}" for rank in self.ranks)

    def outcomes(self) -> list[Outcome]:
        found = [read_message(self.run_dir(rank) / f"outcome/rank-{rank}.json", Outcome) for rank in self.ranks]
        return [outcome for outcome in found if outcome is not None]

    def progress(self) -> RankProgress | None:
        return read_message(self.run_dir(0) / "progress.json", RankProgress)

    def events(self, rank: int = 0) -> list[dict[str, Any]]:
        return _lines(self.run_dir(rank) / "events.jsonl")

    def saw(self, event: str, rank: int = 0) -> bool:
        return any(line["event"] == event for line in self.events(rank))

    def metrics(self) -> list[dict[str, Any]]:
        return _lines(self.run_dir(0) / "metrics.jsonl")

    def losses(self) -> dict[int, float]:
        """Return the loss of each finished step."""
        return {line["step"]: line["loss"] for line in self.metrics()}


@contextmanager
def started(
    root: Path,
    corpus_dir: Path,
    spec: JobSpec,
    world_size: int,
    *,
    bucket: FolderBucket | None = None,
    attempt: int = 1,
    resume_from: SavePointer | None = None,
    resume_parent: SavePointer | None = None,
    command: tuple[str, ...] = ("-m", "trainer"),
) -> Iterator[Attempt]:
    """Ranks that run, one a node, each node with a run directory of its own; none is left afterwards."""
    root = root / f"attempt-{attempt}-{time.monotonic_ns()}"
    job = JobFile(
        job=spec.job,
        attempt=attempt,
        spec=spec,
        node_rank=0,
        nodes=world_size,
        agent_pid=os.getpid(),
        corpus_dir=str(corpus_dir),
        roster_id="roster-1",
        resume_from=resume_from,
        resume_parent=resume_parent,
    )
    port, processes = free_port(), []
    try:
        for rank in range(world_size):
            processes.append(_start(root / f"node-{rank}", job, rank, world_size, port, command))
        yield Attempt(root, bucket or FolderBucket(root / "bucket"), job, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun would set for a rank on loopback."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(root) for root in ROOTS),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        # A rank that aborts says where.
        "PYTHONFAULTHANDLER": "1",
    }


def _start(
    run_dir: Path, job: JobFile, rank: int, world_size: int, port: int, command: tuple[str, ...]
) -> subprocess.Popen[bytes]:
    run_dir.mkdir(parents=True)
    # A relative folder is each node's own.
    fields = {**job.__dict__, "node_rank": rank, "corpus_dir": str(run_dir / job.corpus_dir)}
    write_message(run_dir / "job.json", JobFile(**fields))
    with (run_dir / "log.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command, str(run_dir)],
            env=rank_environment(rank, world_size, port),
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def free_port() -> int:
    """Return a port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
