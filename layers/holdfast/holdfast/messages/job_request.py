"""holdfast.job-request/1 -> what the user wants trained, on which machines, within which limits.

`python -m holdfast.messages.job_request` prints the JSON schema (kept in `docs/job-request.schema.json`).
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from holdfast.domain.errors import Rejected
from holdfast.messages.envelope import open_envelope
from holdfast.messages.refusal import Coded, printable, validated
from holdfast.messages.unsupported import refuse_by_name
from holdfast.messages.variables import one_of_each, plain_variables, secret_variables
from job_contract.checkpoint_layout import job_prefix
from job_contract.spec import (
    CheckpointSpec,
    DataSpec,
    EvaluationSpec,
    ImageSpec,
    JobSpec,
    LoraSpec,
    ModelSpec,
    TrainingSpec,
)
from job_contract.version import canonical_json, encode

SCHEMA = "holdfast.job-request/1"
TEMPLATE_NAME = r"^[a-z0-9][a-z0-9-]{0,62}$"
DATASET_NAME = r"[a-z0-9][a-z0-9-]{0,62}"
DATASET = rf"^{DATASET_NAME}@[1-9][0-9]{{0,5}}$"
JOB_ID_CHARACTERS = 40
IDENTITY_CHARACTERS = 10
SPEC_ID_CHARACTERS = 16
# What DynamoDB keeps.
LEAST_NUMBER, MOST_NUMBER = 1e-130, 9.9e125
AUTO_INTERVAL_S = {"spot": 900.0, "mixed": 900.0, "on_demand": 1800.0}
# 256 byte values and four marks: what a corpus of plain files needs.
BYTE_VOCAB = 260

PRESETS: dict[str, ModelSpec] = {
    "tiny": ModelSpec(dim=128, layers=4, heads=4, kv_heads=2, ffn_dim=384, vocab=BYTE_VOCAB),
    "small": ModelSpec(dim=256, layers=4, heads=8, kv_heads=4, ffn_dim=768, vocab=BYTE_VOCAB),
    "125m": ModelSpec(dim=768, layers=12, heads=12, kv_heads=4, ffn_dim=2048, vocab=32_000),
    # The sizes of TinyLlama 1.1B and of Llama 2.
    "1b": ModelSpec(dim=2048, layers=22, heads=32, kv_heads=4, ffn_dim=5632, vocab=32_000),
    "7b": ModelSpec(dim=4096, layers=32, heads=32, kv_heads=32, ffn_dim=11_008, vocab=32_000),
    "13b": ModelSpec(dim=5120, layers=40, heads=40, kv_heads=40, ffn_dim=13_824, vocab=32_000),
    "70b": ModelSpec(dim=8192, layers=80, heads=64, kv_heads=8, ffn_dim=28_672, vocab=32_000),
}
SHELL_CHARACTERS = frozenset("`$;|&<>\\\"'")
SIZES = ("dim", "layers", "heads", "kv_heads", "ffn_dim")


def _distinct(items: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(items)) < len(items):
        raise Coded("named_twice", f"{list(items)} names one thing twice; name each once")
    return items


def _plain_name(text: str) -> str:
    """Return the name unchanged. A name is shown to people and never reaches a shell; this is the second fence."""
    if text != text.strip():
        raise Coded("blank_edges", f"name is {text!r}; take the blanks at its ends away")
    if text.startswith("-") or SHELL_CHARACTERS & set(text):
        signs = " ".join(sorted(SHELL_CHARACTERS))
        raise Coded("shell_like_name", f"name is {text!r}; leave out {signs} and a dash at the beginning")
    return text


def _moment(text: str) -> str:
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"is {text!r}, which is no time; write 2027-01-31T18:00:00Z") from error
    if parsed.tzinfo is None:
        raise ValueError(f"is {text!r}, without a zone; write 2027-01-31T18:00:00Z")
    return text


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _can_be_kept(cls, value: Any) -> Any:
        if isinstance(value, float) and value and not LEAST_NUMBER <= abs(value) <= MOST_NUMBER:
            raise ValueError(f"is {value}; a number is 0 or between {LEAST_NUMBER} and {MOST_NUMBER}")
        return value


class Model(_Part):
    """A Llama-like decoder: a preset, or all five sizes."""

    preset: Literal["tiny", "small", "125m", "1b", "7b", "13b", "70b"] | None = Field(
        None, description=f"one of {', '.join(PRESETS)}"
    )
    dim: int | None = Field(None, ge=2, le=65_536, description="the model's width, a whole number from 2 to 65536")
    layers: int | None = Field(None, ge=1, le=1_000, description="a whole number from 1 to 1000")
    heads: int | None = Field(None, ge=1, le=1_024, description="attention heads, a whole number from 1 to 1024")
    kv_heads: int | None = Field(
        None, ge=1, le=1_024, description="heads of keys and values, a whole number from 1 to 1024"
    )
    ffn_dim: int | None = Field(
        None, ge=1, le=1_048_576, description="width of the feed-forward part, a whole number from 1 to 1048576"
    )
    vocab: int | None = Field(
        None,
        ge=BYTE_VOCAB,
        le=1_048_576,
        description=f"tokens in the vocabulary, a whole number from {BYTE_VOCAB} to 1048576",
    )
    dropout: float | None = Field(None, ge=0, lt=1, description="share of values dropped in training, 0 to below 1")

    @model_validator(mode="after")
    def _sizes_fit(self) -> Model:
        given = [name for name in SIZES if getattr(self, name) is not None]
        if self.preset is not None and given:
            raise ValueError(
                f"training.model has a preset and {', '.join(given)}; give the preset, or all sizes without it"
            )
        if self.preset is None and len(given) < len(SIZES):
            lacking = [name for name in SIZES if name not in given]
            raise ValueError(
                f"training.model lacks {', '.join(lacking)}; give a preset ({', '.join(PRESETS)}), "
                f"or all of {', '.join(SIZES)}"
            )
        if self.preset is None:
            self._heads_fit(*(getattr(self, name) for name in ("dim", "heads", "kv_heads")))
        return self

    def _heads_fit(self, dim: int, heads: int, kv_heads: int) -> None:
        if heads % kv_heads:
            raise ValueError(
                f"training.model.heads is {heads}, no multiple of kv_heads {kv_heads}; "
                "each kv head serves equally many heads"
            )
        if dim % heads:
            raise ValueError(f"training.model.dim is {dim}, no multiple of heads {heads}; choose a multiple")
        if dim // heads % 2:
            raise ValueError(
                f"training.model.dim / heads is {dim // heads}; rotary embeddings turn pairs, so make it even"
            )

    def as_spec(self) -> ModelSpec:
        """Return the sizes, those of the preset where one is named."""
        spec = PRESETS[self.preset] if self.preset else ModelSpec(**{name: getattr(self, name) for name in SIZES})
        changed = {name: value for name in ("vocab", "dropout") if (value := getattr(self, name)) is not None}
        return ModelSpec(**{**vars(spec), **changed})


class Data(_Part):
    """Tokens to train on: a corpus that the image carries, a registered dataset, or the place of one."""

    corpus: Literal["stdlib"] | None = Field(None, description='"stdlib", the Python standard library as bytes')
    uri: str | None = Field(
        None,
        max_length=1_024,
        pattern=r"^(s3://[a-z0-9.-]{3,63}|file://)/\S+$",
        description="the folder of a dataset, s3://bucket/prefix or file:///mnt/folder",
    )
    dataset: str | None = Field(
        None, pattern=DATASET, description="a registered dataset as name@version, such as web@3"
    )
    digest: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="the digest of the index at uri, 64 hex digits in lower case"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        if sum(source is not None for source in (self.corpus, self.uri, self.dataset)) != 1:
            raise ValueError(
                'training.data needs exactly one of corpus ("stdlib"), dataset ("name@version") and uri (s3://...)'
            )
        if self.digest is not None and self.uri is None:
            raise ValueError("training.data.digest goes with uri only; leave it out")
        return self


class Evaluation(_Part):
    """A dataset that is not trained on, and how often the loss on it is taken."""

    data: Data = Field(description='{"dataset": "name@version"}, or {"uri": "s3://..."}')
    every_steps: int = Field(
        ge=1, le=99_999_999, description="optimizer steps between evaluations, a whole number of at least 1"
    )
    batches: int = Field(
        8, ge=1, le=1_000_000, description="global batches of an evaluation, a whole number from 1 to 1000000"
    )

    @model_validator(mode="after")
    def _apart_from_the_image(self) -> Evaluation:
        if self.data.corpus is not None:
            raise ValueError("training.evaluation.data is a corpus of the image; give dataset or uri")
        return self


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(_Part):
    """Adapters of low rank beside the frozen weights of the target matrices (LoRA, Hu et al. 2021)."""

    rank: int = Field(8, ge=1, le=1_024, description="a whole number from 1 to 1024")
    alpha: float = Field(16.0, gt=0, le=65_536, description="the adapters count alpha / rank times, above 0")
    targets: Annotated[tuple[LoraTarget, ...], AfterValidator(_distinct)] = Field(
        ("q_proj", "v_proj"), min_length=1, max_length=7, description="which matrices of each layer get one"
    )


class Training(_Part):
    """What is trained; `global_batch` counts sequences per optimizer step, all nodes together."""

    model: Model = Field(description='{"preset": "tiny"}, or the sizes')
    data: Data = Field(description='{"corpus": "stdlib"}, {"dataset": "name@version"}, or {"uri": "s3://..."}')
    # A save's folder name has eight digits for the step.
    steps: int = Field(ge=1, le=99_999_999, description="optimizer steps, a whole number from 1 to 99999999")
    global_batch: int = Field(
        ge=1, le=1_000_000, description="sequences per optimizer step, a whole number from 1 to 1000000"
    )
    sequence_length: int = Field(
        ge=2, le=1_048_576, description="tokens per sequence, a whole number from 2 to 1048576"
    )
    learning_rate: float = Field(gt=0, le=100, description="the peak learning rate, a number above 0 and at most 100")
    warmup_steps: int = Field(
        0, ge=0, le=99_999_999, description="steps of rising learning rate, a whole number of at least 0"
    )
    weight_decay: float = Field(0.1, ge=0, le=10, description="AdamW's weight decay, a number from 0 to 10")
    clip_norm: float = Field(1.0, gt=0, le=1_000_000, description="the largest gradient norm, a number above 0")
    parallel: Literal["ddp", "fsdp", "hsdp", "auto"] = Field("auto", description="ddp, fsdp, hsdp or auto")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto, fp32 or bf16")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="a whole number from 0 to 2**63 - 1")
    micro_batch: int | None = Field(
        None, ge=1, le=1_000_000, description="sequences per rank and forward pass, a whole number of at least 1"
    )
    init_from: str | None = Field(
        None,
        max_length=1_024,
        pattern=r"^(s3://[a-z0-9.-]{3,63}/\S+|file:///mnt(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+)$",
        description="weights to start from in Hugging Face's Llama layout: a folder on the nodes, file:///mnt/folder, "
        "or with SHA256SUMS in the stack's bucket, s3://bucket/teams/<team>/folder; or a committed save of the team, "
        "s3://bucket/teams/<team>/jobs/<job>/saves/<save>",
    )

    evaluation: Evaluation | None = Field(None, description="data, every_steps, batches")
    activation_checkpointing: Literal["none", "full", "selective"] | None = Field(
        None, description="what is computed again in the backward pass to save memory: none, full or selective"
    )
    compile: bool | None = Field(None, description="whether each block is compiled; by default on GPUs only")
    prefetch: int | None = Field(
        None, ge=0, le=8, description="blocks gathered ahead with fsdp and hsdp, 0 to 8; by default 1 on GPUs"
    )
    reshard_after_forward: bool | None = Field(
        None, description="whether gathered weights are freed between forward and backward; by default true"
    )

    trainable: Literal["all", "lora"] = Field("all", description="all, or lora: only adapters are trained and saved")
    lora: Lora | None = Field(
        None, description='with trainable "lora": {"rank": 8, "alpha": 16, "targets": ["q_proj"]}'
    )

    @property
    def lora_spec(self) -> LoraSpec | None:
        """The adapters that are trained, None where everything is."""
        if self.trainable == "all":
            return None
        return LoraSpec(**(self.lora or Lora()).model_dump())

    @model_validator(mode="after")
    def _numbers_fit(self) -> Training:
        if self.lora is not None and self.trainable != "lora":
            raise ValueError('training.lora is given and trainable is "all"; set trainable to "lora" or leave lora out')
        if self.warmup_steps > self.steps:
            raise ValueError(f"training.warmup_steps is {self.warmup_steps}, more than steps {self.steps}; lower it")
        if self.micro_batch is not None and self.micro_batch > self.global_batch:
            raise ValueError(
                f"training.micro_batch is {self.micro_batch}, more than global_batch {self.global_batch}; lower it"
            )
        return self


InstanceType = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}\.[a-z0-9-]{1,32}$")]
Zone = Annotated[str, Field(pattern=r"^[a-z0-9-]{3,32}$")]


class Fleet(_Part):
    """The gang of machines, bought all or nothing."""

    nodes: int = Field(ge=1, le=1_000, description="machines, a whole number from 1 to 1000")
    min_nodes: int | None = Field(
        None, ge=1, le=1_000, description="machines to go on with when no more can be had, at most nodes"
    )
    instance_types: Annotated[tuple[InstanceType, ...], AfterValidator(_distinct)] = Field(
        min_length=1, max_length=20, description='1 to 20 EC2 instance types, best first, such as ["p5.48xlarge"]'
    )
    market: Literal["spot", "on_demand", "mixed"] = Field("spot", description="spot, on_demand or mixed")
    on_demand_floor: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of a mixed fleet that is on demand, a number from 0 to 1",
    )
    reservation: str | None = Field(
        None,
        pattern=r"^cr-[0-9a-f]{8,17}$",
        description="a capacity reservation or Capacity Block to buy in first, such as cr-0123456789abcdef0",
    )
    zones: (
        Literal["any"] | Annotated[tuple[Zone, ...], Field(min_length=1, max_length=20), AfterValidator(_distinct)]
    ) = Field("any", description='"any", or 1 to 20 zones such as ["us-east-1a"]')

    @model_validator(mode="after")
    def _fewest_fit(self) -> Fleet:
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise Coded(
                "min_nodes_above_nodes",
                f"fleet.min_nodes is {self.min_nodes}, more than nodes {self.nodes}; lower min_nodes or raise nodes",
            )
        if self.on_demand_floor is not None and self.market != "mixed":
            raise ValueError(
                f"fleet.on_demand_floor is {self.on_demand_floor} and fleet.market {self.market}; "
                "it says something of mixed fleets only, so leave it out or set market to mixed"
            )
        return self

    @property
    def fewest_nodes(self) -> int:
        """Nodes that the job can go on with; all of them where the request says nothing."""
        return self.nodes if self.min_nodes is None else self.min_nodes


class Checkpoint(_Part):
    """How often state is saved; auto, or neither interval, leaves it to the supervisor."""

    interval_steps: Annotated[int, Field(ge=1, le=99_999_999)] | Literal["auto"] | None = Field(
        None, description='optimizer steps between saves, a whole number of at least 1, or "auto"'
    )
    interval_s: Annotated[float, Field(ge=1, le=86_400)] | Literal["auto"] | None = Field(
        None, description='seconds between saves, a number from 1 to 86400, or "auto"'
    )
    keep: int = Field(3, ge=1, le=100, description="newest saves to keep, a whole number from 1 to 100")
    resume_from: str | None = Field(
        None,
        max_length=1_024,
        pattern=r"^s3://[a-z0-9.-]{3,63}/\S+$",
        description="a save whose whole state is the start, s3://bucket/teams/<team>/jobs/<job>/saves/<save>",
    )

    @model_validator(mode="after")
    def _one_interval(self) -> Checkpoint:
        if self.interval_steps is not None and self.interval_s is not None:
            raise Coded("two_intervals", "checkpoint has interval_steps and interval_s; keep one of them")
        return self


class Limits(_Part):
    """Where the job gives up. Attempts ended by a lack of capacity or by an interruption are not counted."""

    attempts: int = Field(
        5, ge=1, le=1_000, description="failed attempts before the job fails, a whole number from 1 to 1000"
    )
    run_s: int = Field(
        86_400,
        ge=1,
        le=31_536_000,
        description="seconds one attempt may train, a whole number from 1 to 31536000 (a year)",
    )
    wait_s: int = Field(
        90_000,
        ge=1,
        le=31_536_000,
        description="seconds to wait for the first machines, a whole number from 1 to 31536000 (a year)",
    )
    budget_usd: float | None = Field(
        None, gt=0, le=1_000_000_000, description="US dollars that may be spent, a number above 0"
    )
    finish_by: Annotated[str, AfterValidator(_moment)] | None = Field(
        None, max_length=40, description="when training must have ended, a time such as 2027-01-31T18:00:00Z"
    )

    @property
    def finish_by_at(self) -> float | None:
        """Seconds since 1970 (UTC), None where the request names no time."""
        return None if self.finish_by is None else datetime.fromisoformat(self.finish_by).timestamp()


class Image(_Part):
    """A container image of the user's own that keeps the job contract."""

    uri: str = Field(
        max_length=256, pattern=r"^[a-zA-Z0-9][\w./:@-]*$", description="a container image such as registry/name:tag"
    )
    command: Annotated[tuple[Annotated[str, Field(max_length=4_096)], ...], Field(max_length=64)] = Field(
        (), description="words of the command that starts a rank; empty for the bundled trainer"
    )


class TemplateRef(_Part):
    """The template that this request was made from; the supervisor writes the version in."""

    name: str = Field(pattern=TEMPLATE_NAME, description="1 to 63 characters a-z, 0-9 and -, the first no dash")
    version: int | None = Field(
        None, ge=1, le=1_000_000, description="a whole number of at least 1; left out, the newest"
    )


class JobRequest(_Part):
    """A training job for Holdfast, as it is sent to the request queue."""

    schema_: Literal["holdfast.job-request/1"] = Field(alias="schema", description=f'"{SCHEMA}"')
    name: Annotated[str, AfterValidator(printable), AfterValidator(_plain_name)] = Field(
        min_length=1, max_length=80, description="1 to 80 printable characters"
    )
    team: str = Field(
        pattern=r"^[a-z0-9][a-z0-9-]{0,30}$", description="1 to 31 characters a-z, 0-9 and -, the first no dash"
    )
    priority: int = Field(50, ge=0, le=100, description="a whole number from 0 (last) to 100 (first)")
    dedup_id: Annotated[str, AfterValidator(printable)] | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="1 to 128 printable characters; the same id of one team is the same job",
    )
    training: Training = Field(description="model, data, steps, global_batch, sequence_length, learning_rate, ...")
    fleet: Fleet = Field(description="nodes, instance_types, ...")
    checkpoint: Checkpoint = Field(
        Checkpoint.model_validate({}), description="interval_steps or interval_s, keep, resume_from"
    )
    limits: Limits = Field(Limits.model_validate({}), description="attempts, run_s, wait_s, budget_usd, finish_by")
    report_s: float = Field(
        300.0, ge=1, le=3_600, description="seconds between progress reports, a number from 1 to 3600"
    )
    image: Image | None = Field(None, description="uri, command")
    environment: Annotated[dict[str, str], AfterValidator(plain_variables)] | None = Field(
        None, description="variables for the ranks, name to text"
    )
    secrets: Annotated[dict[str, str], AfterValidator(secret_variables)] | None = Field(
        None, description="variables by reference, name to secretsmanager:ARN or ssm:/name"
    )
    template: TemplateRef | None = Field(None, description="name, version")

    @model_validator(mode="after")
    def _batch_feeds_every_node(self) -> JobRequest:
        if self.training.global_batch < self.fleet.nodes:
            raise ValueError(
                f"training.global_batch is {self.training.global_batch}, less than fleet.nodes {self.fleet.nodes}; "
                "each node needs at least one sequence"
            )
        return self

    @model_validator(mode="after")
    def _each_variable_once(self) -> JobRequest:
        one_of_each(self.environment or {}, self.secrets or {})
        return self


def read_request(body: str) -> JobRequest:
    """Return the request in a message's body, plain or wrapped by SNS or EventBridge. Raises Rejected."""
    return read_message(open_envelope(body))


def read_message(message: Mapping[str, Any]) -> JobRequest:
    """Return the request that the message is. Raises Rejected."""
    if message.get("schema") != SCHEMA:
        raise Rejected(
            "unknown_schema", f"schema is {message.get('schema')!r}; this stack reads {SCHEMA!r}, so set it to that"
        )
    refuse_by_name(message)
    return validated(JobRequest, message)


def canonical_body(request: JobRequest) -> bytes:
    """Return the request as its sender wrote it, in one spelling; `read_request` reads it back to an equal request."""
    return canonical_json(request.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True))


def body_sha256(request: JobRequest) -> str:
    """Return the digest by which two requests of one identity are told apart."""
    return hashlib.sha256(canonical_body(request)).hexdigest()


def request_identity(request: JobRequest) -> str:
    """Return what makes two requests the same job, in hex: team and dedup_id where given, else the whole body."""
    if request.dedup_id is None:
        return body_sha256(request)
    return hashlib.sha256(canonical_json({"team": request.team, "dedup_id": request.dedup_id})).hexdigest()


def job_id(request: JobRequest) -> str:
    """Return the job's id: a slug of its name and ten digits of its identity, at most 40 characters of [a-z0-9-]."""
    plain = unicodedata.normalize("NFKD", request.name).encode("ascii", "ignore").decode().lower()
    room = JOB_ID_CHARACTERS - IDENTITY_CHARACTERS - 1
    slug = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:room].strip("-")
    return f"{slug or 'job'}-{request_identity(request)[:IDENTITY_CHARACTERS]}"


def node_spec(
    request: JobRequest,
    job: str,
    *,
    ranks_per_node: int,
    parallel: str | None = None,
    data: DataSpec | None = None,
    evaluation: EvaluationSpec | None = None,
    init_sha256: str | None = None,
) -> JobSpec:
    """Return what the nodes of the job need to know, named by its own digest.

    `parallel` is a plan's choice; `data`, `evaluation` and `init_sha256` what the request's data and weights were found
    to be, None where nobody has looked.
    """
    spec = JobSpec(
        job=job,
        team=request.team,
        spec_id="",
        prefix=job_prefix(request.team, job),
        training=_training_spec(request.training, parallel, data, evaluation, init_sha256),
        checkpoint=checkpoint_spec(request),
        ranks_per_node=ranks_per_node,
        report_s=request.report_s,
        environment=request.environment or None,
        secrets=request.secrets or None,
        image=ImageSpec(uri=request.image.uri, command=request.image.command) if request.image else None,
    )
    return JobSpec(**{**vars(spec), "spec_id": spec_id(spec)})


def spec_id(spec: JobSpec) -> str:
    """Return the name of the spec: the start of the sha256 of its canonical JSON without the name."""
    body = {key: value for key, value in encode(spec).items() if key != "spec_id"}
    return hashlib.sha256(canonical_json(body)).hexdigest()[:SPEC_ID_CHARACTERS]


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the request. Rules between two fields (min_nodes <= nodes) are not in it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA, **JobRequest.model_json_schema()}


def _training_spec(
    training: Training,
    parallel: str | None,
    data: DataSpec | None,
    evaluation: EvaluationSpec | None,
    init_sha256: str | None,
) -> TrainingSpec:
    numbers = training.model_dump(exclude={"model", "data", "parallel", "evaluation", "trainable", "lora"})
    return TrainingSpec(
        model=training.model.as_spec(),
        data=data or _as_asked(training.data),
        evaluation=evaluation or (evaluation_spec(training.evaluation) if training.evaluation else None),
        lora=training.lora_spec,
        init_sha256=init_sha256,
        # FSDP is right at every size; DDP only where a whole replica and its moments fit one GPU, which a plan knows.
        parallel=(parallel or "fsdp") if training.parallel == "auto" else training.parallel,
        **numbers,
    )


def evaluation_spec(asked: Evaluation, data: DataSpec | None = None) -> EvaluationSpec:
    """Return the evaluation for the nodes; `data` is what its data were found to be."""
    return EvaluationSpec(data=data or _as_asked(asked.data), every_steps=asked.every_steps, batches=asked.batches)


def _as_asked(data: Data) -> DataSpec:
    return DataSpec(corpus=data.corpus, uri=data.uri, index_sha256=data.digest, dataset=data.dataset)


def checkpoint_spec(request: JobRequest) -> CheckpointSpec:
    """Return the interval that was asked for, or the one that the market calls for, and how many saves are kept."""
    asked = request.checkpoint
    if isinstance(asked.interval_steps, int):
        return CheckpointSpec(interval_steps=asked.interval_steps, keep=asked.keep)
    every_s = asked.interval_s if isinstance(asked.interval_s, int | float) else AUTO_INTERVAL_S[request.fleet.market]
    return CheckpointSpec(interval_s=float(every_s), keep=asked.keep)


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
