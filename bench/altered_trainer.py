"""The trainer with one thing changed: wrong, to show that the checks of exactness can fail, or the slower way.

`python -m bench.altered_trainer <how> <run_dir>`
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from job_contract.node_files import JobFile
from trainer import checkpoint, data, train
from trainer.__main__ import main

FAR = 1000


def sample_swapped() -> None:
    """The second sample of the step that follows the restored one is another."""
    sample = data.Order.sample
    resume = train.start_or_resume

    def altered_resume(run: train.Run, job: JobFile) -> None:
        resume(run, job)
        wrong = run.step * run.config.training.global_batch + 1
        data.Order.sample = lambda order, index: sample(order, index + FAR if index == wrong else index)  # type: ignore[method-assign]

    train.start_or_resume = altered_resume


def moments_zeroed() -> None:
    """The optimizer starts without the moments that the save holds."""

    def zero(run: train.Run) -> None:
        for name, tensor in run.learner.tensors().items():
            if name.startswith("moment"):
                tensor.zero_()

    _after_resume(zero)


def optimizer_step_off_by_one() -> None:
    """AdamW counts one step more than were taken."""
    _after_resume(lambda run: run.learner.set_step(run.step + 1))


def data_off_by_one() -> None:
    """Every step trains on the global batch of the next."""
    micro = data.Batches.micro
    _after_resume(
        lambda _: setattr(data.Batches, "micro", lambda batches, step, number: micro(batches, step + 1, number))
    )


def not_warmed_up() -> None:
    """The state is loaded before DDP has settled its buckets."""
    train.WARM_UP_STEPS = 0


def saves_synchronous() -> None:
    """No memory is left for a copy of the state."""
    checkpoint.staging_fits = lambda needed, free: False


def writes_slowly() -> None:
    """The disk takes a second and a half for a rank's share."""
    write = checkpoint.SaveWriter.write_data

    def slow(writer: checkpoint.SaveWriter, *plan: Any) -> Any:
        time.sleep(1.5)
        return write(writer, *plan)

    checkpoint.SaveWriter.write_data = slow  # type: ignore[method-assign]


def first_save_meets_a_full_disk() -> None:
    """Rank 1 cannot write its share of the first save."""
    write = checkpoint.SaveWriter.write_data

    def full(writer: checkpoint.SaveWriter, *plan: Any) -> Any:
        if os.environ["RANK"] == "1" and Path(writer.path).name.endswith(".s01"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(writer, *plan)

    checkpoint.SaveWriter.write_data = full  # type: ignore[method-assign]


def _after_resume(alter: Callable[[train.Run], object]) -> None:
    resume = train.start_or_resume

    def altered(run: train.Run, job: JobFile) -> None:
        resume(run, job)
        alter(run)

    train.start_or_resume = altered


ALTERATIONS = {
    change.__name__: change
    for change in (
        sample_swapped,
        moments_zeroed,
        optimizer_step_off_by_one,
        data_off_by_one,
        not_warmed_up,
        saves_synchronous,
        writes_slowly,
        first_save_meets_a_full_disk,
    )
}

if __name__ == "__main__":
    ALTERATIONS[sys.argv[1]]()
    code = main(sys.argv[2:])
    sys.stderr.flush()
    os._exit(code)
