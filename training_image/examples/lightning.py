"""A tiny decoder on bytes with Lightning: what `image.command` of a request starts once a rank.

"image": {"uri": "<an image with lightning>", "command": ["python", "-m", "examples.lightning"]}
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from callbacks.lightning import HoldfastCallback
from job_contract.rank import Rank
from job_contract.spec import TrainingSpec

LENGTH = 64


class Windows:
    """Batches of byte windows; it keeps its position, so that a resumed training sees each batch once."""

    def __init__(self, training: TrainingSpec, rank: int, world_size: int) -> None:
        with open(argparse.__file__, "rb") as file:
            self.tokens = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
        self.batch, self.all = training.global_batch // world_size, training.global_batch
        self.rank, self.step, self.steps = rank, 0, training.steps

    def __len__(self) -> int:
        # Without a length Lightning fetches one batch ahead, and the position in a save is one too far.
        return self.steps

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.step < self.steps:
            first = self.step * self.all + self.rank * self.batch
            starts = torch.arange(first, first + self.batch) * LENGTH % (len(self.tokens) - LENGTH - 1)
            self.step += 1
            yield torch.stack([self.tokens[start : start + LENGTH + 1] for start in starts.tolist()])

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Decoder(LightningModule):
    def __init__(self, training: TrainingSpec) -> None:
        super().__init__()
        self.rate, dim = training.learning_rate, training.model.dim
        self.embed, self.head = nn.Embedding(256, dim), nn.Linear(dim, 256)
        layer = nn.TransformerEncoderLayer(dim, training.model.heads, training.model.ffn_dim, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, training.model.layers, enable_nested_tensor=False)

    def training_step(self, windows: torch.Tensor) -> torch.Tensor:
        tokens, targets = windows[:, :-1], windows[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        logits = self.head(self.blocks(self.embed(tokens), mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


def main() -> None:
    rank = Rank.join()
    training = rank.job.spec.training
    torch.manual_seed(training.seed)
    gpu = torch.cuda.is_available()
    callback = HoldfastCallback(rank)
    trainer = Trainer(
        accelerator="gpu" if gpu else "cpu",
        devices=rank.job.spec.ranks_per_node,
        num_nodes=rank.job.nodes,
        # The agent sets torchrun's variables, all but the ones by which Lightning would know torchrun.
        strategy=DDPStrategy(
            cluster_environment=TorchElasticEnvironment(), process_group_backend="nccl" if gpu else "gloo"
        ),
        max_steps=rank.steps,
        callbacks=[callback],
        default_root_dir=rank.run_dir / "lightning",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    windows = Windows(training, rank.rank, rank.world_size)
    trainer.fit(Decoder(training), windows, ckpt_path=callback.restore())


if __name__ == "__main__":
    main()
