"""A tiny Llama on bytes with the Hugging Face Trainer: what `image.command` of a request starts once a rank.

"image": {"uri": "<an image with transformers and accelerate>", "command": ["python", "-m", "examples.hugging_face"]}
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from callbacks.hugging_face import HoldfastCallback
from job_contract.rank import Rank

LENGTH = 64


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of a text as bytes: the source of one module of the standard library."""

    def __init__(self) -> None:
        with open(argparse.__file__, "rb") as file:
            self.tokens = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.tokens) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": window, "labels": window}


def main() -> None:
    rank = Rank.join()
    training = rank.job.spec.training
    arguments = TrainingArguments(
        output_dir=str(rank.run_dir / "hugging_face"),
        max_steps=rank.steps,
        per_device_train_batch_size=training.global_batch // rank.world_size,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        seed=training.seed,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
    )
    torch.manual_seed(training.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=training.model.dim,
            num_hidden_layers=training.model.layers,
            num_attention_heads=training.model.heads,
            num_key_value_heads=training.model.kv_heads,
            intermediate_size=training.model.ffn_dim,
        )
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Windows(), callbacks=[HoldfastCallback(rank)])
    folder = rank.restore()
    trainer.train(resume_from_checkpoint=str(folder) if folder else None)


if __name__ == "__main__":
    main()
