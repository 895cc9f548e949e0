"""Lightning as a job: saves by order and by interval, resumes from the save that the supervisor names.

    rank = Rank.join()
    callback = HoldfastCallback(rank)
    trainer = Trainer(max_steps=rank.steps, callbacks=[callback], enable_checkpointing=False, ...)
    trainer.fit(module, data, ckpt_path=callback.restore())

A save is Lightning's own checkpoint in one file. Lightning starts the data of a half-trained epoch anew unless the
loader keeps its position: give it one with `state_dict`, `load_state_dict` and `__len__`.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch import distributed as dist

from callbacks.agreement import agreement
from job_contract.rank import Rank

FILE = "lightning.ckpt"


class HoldfastCallback(Callback):
    """Asks the ranks after each optimizer step whether to save or to stop."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def restore(self) -> str | None:
        """Return the checkpoint to go on from, for `fit(ckpt_path=...)`; None for a new start."""
        folder = self.rank.restore()
        return str(folder / FILE) if folder else None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if dist.is_initialized():
            self.rank.agree = agreement()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Batches of one accumulation share a step, and one step has one answer.
        if trainer.global_step == self.rank.step:
            return
        if self.rank.should_checkpoint(trainer.global_step, loss=_loss(outputs)):
            with self.rank.commit() as folder:
                trainer.save_checkpoint(folder / FILE)
        if self.rank.should_stop:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rank.finish()


def _loss(outputs: Any) -> float:
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs
    return float(loss.detach()) if isinstance(loss, Tensor) else 0.0
