"""Which tokens a request means: what it names is looked up once, at the door, and pinned by digest for the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from holdfast.application.ports import Ports, RequestFiles
from holdfast.application.weights import weights_sha256
from holdfast.domain.errors import Rejected
from holdfast.domain.locations import dataset_place
from holdfast.messages.acceptance import Acceptance, with_data
from holdfast.messages.control_request import RegisterDataset
from holdfast.messages.job_request import Data, Training, evaluation_spec
from job_contract.dataset import INDEX_FILE, BadIndex, DatasetIndex, open_index
from job_contract.spec import DataSpec

# Some fifty thousand shards.
INDEX_LIMIT_BYTES = 16 << 20


class Registry(Protocol):
    def dataset(self, name: str, version: int) -> Mapping[str, Any] | None: ...


@dataclass(frozen=True)
class Facts:
    """What is known of a dataset; nothing of one that the supervisor cannot read."""

    vocab: int | None = None
    longest_shard: int | None = None
    block_bytes: int = 0
    two_blocks_bytes: int = 0
    two_blocks_tokens: int = 0

    def on_disk_bytes(self, tokens: int) -> int:
        """Return what a node keeps at least while so many tokens are read: the block that is read, and the next."""
        return self.two_blocks_bytes if tokens >= self.two_blocks_tokens else self.block_bytes


NUMBERS = tuple(field.name for field in fields(Facts))


def pinned(order: Acceptance, *, registry: Registry, files: RequestFiles, bucket: str | None) -> Acceptance:
    """Return the order with the datasets and weights that it names, by place and digest, in its spec.

    Raises Rejected.
    """
    training, team = order.asked.training, order.asked.team
    brought_bytes = 0

    def found(asked: Data, field: str, steps: int) -> DataSpec:
        nonlocal brought_bytes
        if asked.corpus is not None:
            return DataSpec(corpus=asked.corpus)
        if asked.dataset is not None:
            spec, facts = _registered(asked.dataset, registry, bucket=bucket, team=team)
        else:
            uri = dataset_place(asked.uri or "", f"{field}.uri", bucket=bucket, team=team)
            spec, facts = _at(uri, asked.digest, files)
        _refuse_what_does_not_fit(training, facts, field)
        brought_bytes += facts.on_disk_bytes(steps * training.global_batch * training.sequence_length)
        return spec

    evaluation = None
    if training.evaluation is not None:
        asked = training.evaluation
        evaluation = evaluation_spec(asked, found(asked.data, "training.evaluation.data", asked.batches))
    data = found(training.data, "training.data", training.steps)
    made = with_data(order, data, evaluation, init_sha256=weights_sha256(training, files))
    return replace(made, brought_bytes=brought_bytes)


def register(wish: RegisterDataset, ports: Ports, *, bucket: str | None) -> bool:
    """The dataset is known by name and version, for good; False when it was. Raises Rejected."""
    uri = dataset_place(wish.uri, "uri", bucket=bucket, team=None)
    facts: dict[str, Any] = {"digest": wish.digest}
    if uri.startswith("s3://"):
        index = _index(uri, wish.digest, ports.request_files)
        facts = {
            "digest": index.sha256,
            "tokens": index.tokens,
            "vocab": index.vocab,
            "longest_shard": max(shard.tokens for shard in index.shards),
            **_blocks(index),
            "masked": index.masked,
            "tokenizer": index.tokenizer.kind,
            "source": index.source,
            "licence": index.licence,
        }
    elif wish.digest is None:
        raise _digest_needed(uri)
    about = {"registered_at": ports.clock(), "registered_by": wish.requested_by or ""}
    return ports.store.put_dataset({"name": wish.name, "version": wish.version, "uri": uri, **facts, **about})


def _registered(name: str, registry: Registry, *, bucket: str | None, team: str) -> tuple[DataSpec, Facts]:
    plain, _, version = name.partition("@")
    found = registry.dataset(plain, int(version))
    if found is None:
        raise Rejected("unknown_dataset", f"there is no dataset {name}; `holdfast dataset list` shows those there are")
    # A dataset of one team's part of the bucket stays that team's.
    uri = dataset_place(str(found["uri"]), f"the place of dataset {name}", bucket=bucket, team=team)
    numbers = {key: int(found[key]) for key in NUMBERS if found.get(key) is not None}
    return DataSpec(uri=uri, index_sha256=str(found["digest"]), dataset=name), Facts(**numbers)


def _at(uri: str, digest: str | None, files: RequestFiles) -> tuple[DataSpec, Facts]:
    if uri.startswith("s3://"):
        index = _index(uri, digest, files)
        facts = Facts(index.vocab, max(shard.tokens for shard in index.shards), **_blocks(index))
        return DataSpec(uri=uri, index_sha256=index.sha256), facts
    if digest is None:
        raise _digest_needed(uri)
    return DataSpec(uri=uri, index_sha256=digest), Facts()


def _blocks(index: DatasetIndex) -> dict[str, int]:
    (_, one), (tokens, two) = index.smallest(1), index.smallest(2)
    return {"block_bytes": one, "two_blocks_bytes": two, "two_blocks_tokens": tokens}


def _digest_needed(uri: str) -> Rejected:
    return Rejected(
        "dataset_digest_needed",
        f"{uri} is on a file system of the nodes, which the supervisor cannot read; give digest, as "
        "`holdfast dataset prepare` printed it",
    )


REASONS = {
    "reference_not_found": (
        "dataset_not_found",
        "is not there; upload what `holdfast dataset prepare` made, or correct the address",
    ),
    "reference_not_readable": (
        "dataset_not_readable",
        "is not there or may not be read; name its bucket in the stack's DataBucketArns",
    ),
    "bucket_not_ours": (
        "bucket_not_ours",
        "is in no bucket that the stack may read data from; name the bucket in the stack's DataBucketArns",
    ),
    "reference_too_large": (
        "dataset_damaged",
        f"has more than {INDEX_LIMIT_BYTES} bytes; prepare the dataset with larger shards",
    ),
}


def _index(uri: str, digest: str | None, files: RequestFiles) -> DatasetIndex:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    place = f"{uri}/{INDEX_FILE}"
    try:
        raw = files.read(bucket, f"{prefix}/{INDEX_FILE}", limit_bytes=INDEX_LIMIT_BYTES)
    except Rejected as refusal:
        if refusal.code not in REASONS:
            raise
        code, why = REASONS[refusal.code]
        raise Rejected(code, f"{place} {why}") from refusal
    try:
        return open_index(raw, digest)
    except BadIndex as error:
        raise Rejected("dataset_damaged", f"{place}: {error}") from error


def _refuse_what_does_not_fit(training: Training, facts: Facts, field: str) -> None:
    vocab = training.model.as_spec().vocab
    if facts.vocab is not None and vocab < facts.vocab:
        raise Rejected(
            "data_does_not_fit",
            f"training.model.vocab is {vocab}, the dataset of {field} has tokens up to {facts.vocab - 1}; "
            f"set it to {facts.vocab} at least",
        )
    if facts.longest_shard is not None and training.sequence_length >= facts.longest_shard:
        raise Rejected(
            "data_does_not_fit",
            f"training.sequence_length is {training.sequence_length}, the largest shard of {field} has "
            f"{facts.longest_shard} tokens; shorten the sequence, or prepare more text",
        )
