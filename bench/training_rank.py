"""A rank of `bench.training`: it times the trainer's own step beside the plain loop's, and saves beside plain writes.

`python -m bench.training_rank <run_dir>` writes `timed.json`. All is interleaved, so that a busy machine hurts both.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from bench.plain_loop import PlainLoop
from job_contract.node_files import JobFile, read_message
from trainer import train
from trainer.config import config_of
from trainer.parallel import join

ROUNDS, BLOCK, SAVES = 12, 4, 5
HOOKS = ("seed_dropout", "record", "interval_is_over", "show")


class Stopwatch:
    """The seconds spent inside the functions that it wraps, and those of the processor; one inside another counts once.

    The rest is waiting: for the file system, and on a busy machine for the processor.
    """

    def __init__(self) -> None:
        self.seconds = self.processor_s = 0.0
        self._depth = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began, worked, self._depth = time.perf_counter(), time.thread_time(), self._depth + 1
            try:
                return function(*arguments, **named)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - began
                    self.processor_s += time.thread_time() - worked

        return timed


def steps(run: train.Run) -> dict[str, Any]:
    """Return the seconds of each step, ours and plain, and those that ours spent in hooks."""
    hooks = Stopwatch()
    for name in HOOKS:
        setattr(train, name, hooks.wrap(getattr(train, name)))
    run.agreement.start = hooks.wrap(run.agreement.start)  # type: ignore[method-assign]
    plain = PlainLoop(run.config.training)
    for number in range(BLOCK):
        train.one_step(run)
        plain.step(number)
    hooks.seconds = hooks.processor_s = 0.0
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(ROUNDS):
        ours += [timed(lambda: train.one_step(run)) for _ in range(BLOCK)]
        theirs += [timed(partial(plain.step, number)) for number in range(BLOCK)]
    return {"loop": ours, "plain": theirs, "hooks_s": hooks.seconds, "hooks_processor_s": hooks.processor_s}


def saves(run: train.Run, run_dir: Path) -> dict[str, Any]:
    """Return the seconds of each save: ours with its digests, plain DCP, and the same bytes written raw; no fsync."""
    tensors = run.learner.tensors()
    own = [one.to_local() if isinstance(one, DTensor) else one for one in tensors.values()]
    size_bytes = sum(one.nbytes for one in own)
    facts = {"step": 1, "config": run.config.fixed}
    found: dict[str, Any] = {"ours": [], "dcp": [], "raw": [], "size_bytes": size_bytes}

    def save() -> None:
        name = run.saves.write(tensors, facts, generation=0, doomed=())
        for path in (run_dir / "saves" / name).glob(f"__{run.ranks.rank}_*.distcp"):
            with path.open("rb") as stream:
                hashlib.file_digest(stream, "sha256")

    def raw() -> None:
        with (run_dir / "raw").open("wb") as stream:
            for one in own:
                stream.write(memoryview(one.contiguous().numpy()).cast("B"))

    ways: dict[str, Callable[[], Any]] = {
        "ours": save,
        "dcp": lambda: dcp.save(
            tensors, storage_writer=dcp.FileSystemWriter(run_dir / "dcp", sync_files=False, overwrite=True)
        ),
        "raw": raw,
    }
    for number in range(SAVES + 1):
        for name, way in ways.items():
            dist.barrier()
            seconds = timed(way)
            found[name] += [seconds] if number else []
        for folder in ("saves", "dcp"):
            shutil.rmtree(run_dir / folder, ignore_errors=True)
    return found


def timed(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def main(run_dir: Path) -> None:
    """timed.json holds what this rank measured."""
    job = read_message(run_dir / "job.json", JobFile)
    assert job is not None
    config, ranks = config_of(job.spec), join()
    run = train.prepare(run_dir, job, config, ranks)
    train.warm_up(run)
    measured = saves(run, run_dir) if config.training.steps == 1 else steps(run)
    (run_dir / "timed.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
