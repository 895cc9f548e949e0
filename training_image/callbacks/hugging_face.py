"""The Hugging Face Trainer as a job: saves by order and by interval, resumes from the save that the supervisor names.

    rank = Rank.join()
    arguments = TrainingArguments(..., max_steps=rank.steps, save_strategy="no", ddp_backend="gloo" or "nccl")
    trainer = Trainer(..., args=arguments, callbacks=[HoldfastCallback(rank)])
    folder = rank.restore()
    trainer.train(resume_from_checkpoint=str(folder) if folder else None)

What is saved is the Trainer's own checkpoint: weights, optimizer, schedule, generators, position. It has to be a flat
set of files, so sharded state dicts (FSDP's and DeepSpeed's folders) are refused at the save.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from callbacks.agreement import agreement
from job_contract.rank import Rank


class HoldfastCallback(TrainerCallback):  # type: ignore[misc]
    """Asks the ranks after each optimizer step whether to save or to stop. The loss told is the newest one logged."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._wanted = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if dist.is_initialized():
            self.rank.agree = agreement()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        loss = next((line["loss"] for line in reversed(state.log_history) if "loss" in line), 0.0)
        self._wanted = self.rank.should_checkpoint(state.global_step, loss=float(loss))
        control.should_save = self._wanted
        control.should_training_stop = control.should_training_stop or self.rank.should_stop

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._wanted:
            return
        self._wanted = False
        # Every rank of the node has written into the node's folder by now; the first of them takes it all.
        self.rank.agree([0])
        written = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        with self.rank.commit() as folder:
            if self.rank.local_rank == 0 and written.is_dir():
                for path in sorted(written.iterdir()):
                    path.rename(folder / path.name)
        if self.rank.local_rank == 0:
            shutil.rmtree(written, ignore_errors=True)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.rank.finish()
