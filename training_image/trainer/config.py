"""What a rank trains, frozen: taken from the job's spec once, and hashed where a resume must not differ."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from typing import Any

from job_contract.spec import CheckpointSpec, JobSpec, ModelSpec, TrainingSpec
from job_contract.version import canonical_json, plain
from trainer.endings import UserError

BYTE_VALUES = 256
LOWEST_RATE = 0.1  # of the peak, where the cosine ends

PARALLEL = ("ddp", "fsdp", "hsdp")
PRECISION = ("auto", "fp32", "bf16")
CHECKPOINTING = ("none", "full", "selective")

# What adapters can be put beside: the names in Hugging Face's Llama, and ours.
TARGETS = {
    "q_proj": "attention.query",
    "k_proj": "attention.key",
    "v_proj": "attention.value",
    "o_proj": "attention.output",
    "gate_proj": "feed_forward.gate",
    "up_proj": "feed_forward.up",
    "down_proj": "feed_forward.output",
}

# Free to change between attempts: they move the last bits of a sum, not what is trained.
FREE_FIELDS = (
    "parallel",
    "micro_batch",
    "init_from",
    "init_sha256",
    "activation_checkpointing",
    "compile",
    "prefetch",
    "reshard_after_forward",
    "evaluation",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the model is run: `prefetch` units are gathered ahead; `reshard` frees a gathered unit after its forward."""

    checkpointing: str
    compile: bool
    prefetch: int
    reshard: bool


@dataclass(frozen=True, kw_only=True)
class Config:
    """The training part of a spec, found fit for this trainer."""

    training: TrainingSpec
    checkpoint: CheckpointSpec
    ranks_per_node: int

    @property
    def model(self) -> ModelSpec:
        return self.training.model

    @property
    def tokens_per_step(self) -> int:
        return self.training.global_batch * self.training.sequence_length

    @property
    def fixed(self) -> dict[str, Any]:
        """The fields that a resume must find unchanged; what is left out of a spec is left out here."""
        fields = {**dataclasses.asdict(self.training), "data": self._data, "lora": plain(self.training.lora)}
        return {name: value for name, value in fields.items() if name not in FREE_FIELDS and value is not None}

    @property
    def _data(self) -> dict[str, Any]:
        """A dataset is its digest, wherever it lies and whatever it is called."""
        data = self.training.data
        return {"corpus": data.corpus} if data.index_sha256 is None else {"index_sha256": data.index_sha256}

    @property
    def hash(self) -> str:
        return hashlib.sha256(canonical_json(self.fixed)).hexdigest()

    def mesh(self, world_size: int) -> tuple[int, ...]:
        """Return (replicas, ranks that share one) for hsdp, a node being one replica; else all ranks in one line."""
        nodes = world_size // self.ranks_per_node
        if self.training.parallel == "hsdp" and nodes > 1 and nodes * self.ranks_per_node == world_size:
            return (nodes, self.ranks_per_node)
        return (world_size,)

    def options(self, *, gpu: bool) -> Options:
        """Return what the spec asks for, and where it leaves the choice, what the device is best served by.

        On CPUs compiling takes longer than it saves, and nothing is gathered over a wire (measured, torch 2.13).
        """
        training = self.training
        return Options(
            checkpointing=training.activation_checkpointing or "none",
            compile=gpu if training.compile is None else training.compile,
            prefetch=int(gpu) if training.prefetch is None else training.prefetch,
            reshard=training.reshard_after_forward is not False,
        )

    def learning_rate(self, step: int) -> float:
        """Return the rate of the step after `step` finished ones: linear warm-up, then a cosine to a tenth."""
        training = self.training
        if step < training.warmup_steps:
            return training.learning_rate * (step + 1) / training.warmup_steps
        progress = (step - training.warmup_steps) / max(1, training.steps - training.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return training.learning_rate * (LOWEST_RATE + (1 - LOWEST_RATE) * cosine)


def config_of(spec: JobSpec) -> Config:
    """Return the config of a spec. Raises UserError for what this trainer cannot do."""
    _refuse(spec.training)
    return Config(training=spec.training, checkpoint=spec.checkpoint, ranks_per_node=spec.ranks_per_node)


def _refuse(training: TrainingSpec) -> None:
    model, data = training.model, training.data
    checks = {
        f"data.corpus is {data.corpus!r}; this image carries 'stdlib'": data.corpus == "stdlib" or data.uri is not None,
        "data.uri has no index_sha256 beside it": data.uri is None or data.index_sha256 is not None,
        f"init_from is {training.init_from!r}; this image reads file:///folder and s3://bucket/folder": (
            training.init_from is None or training.init_from.startswith(("file:///", "s3://"))
        ),
        f"parallel is {training.parallel!r}; known are {', '.join(PARALLEL)}": training.parallel in PARALLEL,
        f"precision is {training.precision!r}; known are {', '.join(PRECISION)}": training.precision in PRECISION,
        f"activation_checkpointing is {training.activation_checkpointing!r}; known are {', '.join(CHECKPOINTING)}": (
            training.activation_checkpointing in (None, *CHECKPOINTING)
        ),
        f"prefetch is {training.prefetch}; it must be at least 0": (training.prefetch or 0) >= 0,
        f"model.vocab is {model.vocab}; byte tokens need at least {BYTE_VALUES}": model.vocab >= BYTE_VALUES,
        f"model.dim {model.dim} is not a multiple of 2 x heads {model.heads}": model.dim % (2 * model.heads) == 0,
        f"model.heads {model.heads} is not a multiple of kv_heads {model.kv_heads}": model.heads % model.kv_heads == 0,
        "steps, global_batch, sequence_length and micro_batch must be positive": min(
            training.steps, training.global_batch, training.sequence_length, training.micro_batch or 1
        )
        > 0,
    }
    if training.lora is not None:
        unknown = [target for target in training.lora.targets if target not in TARGETS]
        checks[f"lora.targets holds {unknown}; known are {', '.join(TARGETS)}"] = not unknown
        checks["lora.rank must be positive, and lora.targets not empty"] = bool(
            training.lora.rank > 0 and training.lora.targets
        )
    wrong = [text for text, holds in checks.items() if not holds]
    if wrong:
        raise UserError("; ".join(wrong))
