"""What a node needs to know of a job to run it; immutable, named by its own digest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes of a Llama-like decoder."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab: int = 260
    rope_theta: float = 10000.0
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """`corpus` names a corpus that the image carries ("stdlib"); `uri` the folder of a dataset, s3:// or file://.

    With `uri` goes `index_sha256`, which pins the dataset's index; `dataset` is its registered name, for people.
    """

    corpus: str | None = None
    uri: str | None = None
    index_sha256: str | None = None
    dataset: str | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationSpec:
    """Each `every_steps` optimizer steps the loss of the same `batches` global batches of `data` is taken."""

    data: DataSpec
    every_steps: int
    batches: int = 8


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Adapters of `rank` beside the frozen target matrices, by their names in Hugging Face's Llama (q_proj, ...)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """`global_batch` is in sequences per optimizer step, `sequence_length` in tokens, `micro_batch` in sequences.

    `activation_checkpointing` is none, full or selective. None in it, in `compile`, `prefetch` (units gathered ahead)
    or `reshard_after_forward` leaves the choice to the trainer, by device. With `lora` only adapters are trained.
    `init_sha256` pins an s3:// `init_from`: the sha256 of the SHA256SUMS that lay in the folder when the job was
    accepted, or the digest of the save's manifest.
    """

    model: ModelSpec
    data: DataSpec
    steps: int
    global_batch: int
    sequence_length: int
    learning_rate: float
    warmup_steps: int = 0
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    parallel: str = "fsdp"
    precision: str = "auto"
    seed: int = 0
    micro_batch: int | None = None
    init_from: str | None = None
    evaluation: EvaluationSpec | None = None
    activation_checkpointing: str | None = None
    compile: bool | None = None
    prefetch: int | None = None
    reshard_after_forward: bool | None = None
    lora: LoraSpec | None = None
    init_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Exactly one of the intervals is set; `keep` is how many committed saves the supervisor keeps."""

    interval_steps: int | None = None
    interval_s: float | None = None
    keep: int = 3


@dataclass(frozen=True, kw_only=True)
class ImageSpec:
    """An image of the user's own that keeps this contract."""

    uri: str
    command: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """`prefix` is where the job's checkpoints live in the bucket; `report_s` the seconds between progress reports.

    `ranks_per_node` 0 = one rank a GPU, and one on a node without GPUs. `environment` goes to the ranks as it stands;
    `secrets` gives variables by reference, `secretsmanager:ARN` or `ssm:/name`, which the node resolves.
    """

    job: str
    team: str
    spec_id: str
    prefix: str
    training: TrainingSpec
    checkpoint: CheckpointSpec
    ranks_per_node: int = 1
    report_s: float = 300.0
    image: ImageSpec | None = None
    environment: dict[str, str] | None = None
    secrets: dict[str, str] | None = None
