"""The frozen index of a dataset, version 1, and what is no index."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from job_contract.checkpoint_layout import body_sha256
from job_contract.dataset import (
    BadIndex,
    DatasetIndex,
    Shard,
    StoredFile,
    TokenizerFacts,
    open_index,
    seal_index,
    shard_name,
)
from job_contract.version import canonical_json

GOLDEN = Path(__file__).parents[2] / "events/contract/v1/dataset-index.json"


def shard(number: int, tokens: int, *, masked: bool = False) -> Shard:
    def stored(kind: str, size: int, digit: str) -> StoredFile:
        return StoredFile(file=shard_name(number, kind), bytes=size, sha256=digit * 64)

    return Shard(
        **vars(stored("bin", 2 * tokens, "a")),
        tokens=tokens,
        document_count=3,
        documents=stored("documents", 24, "d"),
        weights=stored("weights", tokens, "c") if masked else None,
    )


INDEX = DatasetIndex(
    dtype="uint16",
    vocab=260,
    tokens=96,
    tokenizer=TokenizerFacts(kind="bytes", end=256),
    shards=(shard(0, 64), shard(1, 32, masked=True)),
    source="corpus of examples",
    licence="CC0-1.0",
)


def resealed(change: Any) -> bytes:
    """Return the golden index with a change, and a digest that fits it."""
    body = json.loads(GOLDEN.read_bytes())
    change(body)
    return canonical_json({**body, "sha256": body_sha256(body)})


def test_a_frozen_index_is_read_as_ever() -> None:
    index = open_index(GOLDEN.read_bytes())
    assert replace(index, sha256="") == INDEX
    assert index.masked
    assert [file.file for file in index.files] == [
        "shard-00000.bin",
        "shard-00000.documents",
        "shard-00001.bin",
        "shard-00001.weights",
        "shard-00001.documents",
    ]


def test_an_index_is_written_byte_for_byte_as_ever() -> None:
    raw, digest = seal_index(INDEX)
    assert raw == GOLDEN.read_bytes()
    assert open_index(raw, digest).sha256 == digest


def test_one_changed_digit_or_letter_anywhere_in_an_index_is_found() -> None:
    raw = GOLDEN.read_bytes()
    for place in range(len(raw)):
        with pytest.raises(BadIndex):
            open_index(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"null", b"\xff", b'{"version": NaN}', b"[" * 100_000])
def test_what_is_no_index_is_refused(raw: bytes) -> None:
    with pytest.raises(BadIndex):
        open_index(raw)


def test_a_whole_index_of_another_dataset_is_not_the_pinned_one() -> None:
    with pytest.raises(BadIndex, match="pinned was 000000000000"):
        open_index(GOLDEN.read_bytes(), "0" * 64)


def _set(*path: Any, value: Any) -> Any:
    def change(body: dict[str, Any]) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set("version", value=2), "version 2; this reader knows 1"),
        (_set("version", value=True), "version True"),
        (_set("dtype", value="float32"), "float32"),
        (_set("vocab", value=70_000), "cannot hold"),
        (_set("vocab", value="260"), "vocab"),
        (_set("tokens", value=97), "the shards have 96"),
        (_set("shards", value=[]), "no shard"),
        (_set("shards", 0, "file", value="../../etc/passwd"), "passwd"),
        (_set("shards", 0, "file", value="shard-00001.bin"), "shard-00000.bin belongs"),
        (_set("shards", 1, "weights", "file", value="shard-00001.bin"), "weights belongs"),
        (_set("shards", 1, "weights", "bytes", value=31), "should have 32"),
        (_set("shards", 1, "documents", "bytes", value=8), "should have 24"),
        (_set("shards", 0, "bytes", value=127), "should have 128"),
        (_set("shards", 0, "tokens", value=0), "0 tokens"),
        (_set("shards", 0, "sha256", value="A" * 64), "64 hex digits"),
        (_set("shards", 0, "sha256", value=None), "lacks the field 'sha256'"),
        (_set("tokenizer", value="bytes"), "TokenizerFacts"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused_even_with_a_digest_that_fits(change: Any, said: str) -> None:
    with pytest.raises(BadIndex, match=said):
        open_index(resealed(change))


def test_fields_of_a_later_release_are_ignored_and_part_of_the_digest() -> None:
    raw = resealed(_set("a_field_of_tomorrow", value=[1]))
    assert open_index(raw).sha256 != open_index(GOLDEN.read_bytes()).sha256
    assert open_index(raw).shards == INDEX.shards


def test_what_a_node_holds_of_a_dataset_is_at_least_its_smallest_shards() -> None:
    def shard(number: int) -> Shard:
        file = StoredFile(file=f"w{number}", bytes=number, sha256="")
        facts = {"file": "", "sha256": "", "documents": file, "document_count": 0}
        return Shard(tokens=number, bytes=2 * number, weights=file, **facts)

    index = DatasetIndex(
        dtype="uint16", vocab=260, tokens=0, tokenizer=TokenizerFacts(kind="bytes"),
        shards=tuple(shard(number) for number in range(10, 0, -1)), source="", licence="",
    )  # fmt: skip
    assert index.smallest(1) == (10, 30)
    assert index.smallest(2) == (36, 108)
    assert index.smallest(3) == (55, 165)
