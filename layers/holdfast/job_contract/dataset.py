"""A dataset: shards of tokens, and the one index that proves them all.

    <place>/index.json                this index
    <place>/shard-00000.bin           tokens, little-endian, in the index's dtype
    <place>/shard-00000.weights       a byte a token, 1 where the token is a target and 0 where not; absent = all 1
    <place>/shard-00000.documents     8 bytes a document, little-endian: where in the shard it begins

The digest of the index's canonical body names the dataset: whoever pins it gets these tokens or a refusal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from job_contract.checkpoint_layout import body_sha256
from job_contract.version import ContractError, build, canonical_json, plain

INDEX_VERSION = 1
INDEX_FILE = "index.json"
# Bytes a token.
DTYPES = {"uint8": 1, "uint16": 2, "uint32": 4}
DOCUMENT_BYTES = 8

_SHA256 = re.compile(r"[0-9a-f]{64}")


BLOCK_SHARDS = 4
"""Windows are mixed within so many shards; a node holds those that it reads and the next."""


class BadIndex(ContractError):
    """An index that is not whole, not consistent, or not the one that was pinned."""


def shard_name(number: int, kind: str = "bin") -> str:
    """Return the name of a shard's file; `kind` is bin, weights or documents."""
    return f"shard-{number:05d}.{kind}"


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file beside the index: its size in bytes and its sha256 in hex."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Shard:
    """`tokens` tokens in `file`; `document_count` documents begin in it."""

    file: str
    tokens: int
    bytes: int
    sha256: str
    documents: StoredFile
    document_count: int
    weights: StoredFile | None = None

    @property
    def needed(self) -> tuple[StoredFile, ...]:
        """What training reads of the shard."""
        tokens = StoredFile(file=self.file, bytes=self.bytes, sha256=self.sha256)
        return (tokens, self.weights) if self.weights else (tokens,)


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """How text became tokens: kind bytes or huggingface; `sha256` of tokenizer.json; `end` closes a document."""

    kind: str
    sha256: str | None = None
    end: int | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetIndex:
    """`vocab`: every token is below it. `source` and `licence` are in the words of whoever prepared it."""

    dtype: str
    vocab: int
    tokens: int
    tokenizer: TokenizerFacts
    shards: tuple[Shard, ...]
    source: str
    licence: str
    sha256: str = ""

    @property
    def masked(self) -> bool:
        """Whether some tokens are no targets."""
        return any(shard.weights for shard in self.shards)

    def smallest(self, blocks: int) -> tuple[int, int]:
        """Return tokens and needed bytes of the smallest shards that make so many blocks; no node holds fewer."""
        shards = sorted(self.shards, key=lambda shard: shard.bytes)[: blocks * BLOCK_SHARDS]
        return sum(shard.tokens for shard in shards), sum(file.bytes for shard in shards for file in shard.needed)

    @property
    def files(self) -> Iterator[StoredFile]:
        """Every file beside the index."""
        for shard in self.shards:
            yield from (*shard.needed, shard.documents)


def seal_index(index: DatasetIndex) -> tuple[bytes, str]:
    """Return the bytes of index.json, its own digest inside, and that digest. Raises BadIndex."""
    body = {"version": INDEX_VERSION, **plain(index)}
    digest = _digest(body)
    raw = canonical_json({**body, "sha256": digest})
    open_index(raw)
    return raw, digest


def open_index(raw: bytes, sha256: str | None = None) -> DatasetIndex:
    """Return the index after proving that it is whole, consistent, and the one `sha256` pins. Raises BadIndex."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadIndex(f"{INDEX_FILE} is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadIndex(f"{INDEX_FILE} is no JSON object")
    if type(body.get("version")) is not int or body["version"] != INDEX_VERSION:
        raise BadIndex(
            f"{INDEX_FILE} has version {body.get('version')!r}; this reader knows {INDEX_VERSION}; prepare it anew"
        )
    digest = _digest(body)
    if body.get("sha256") != digest:
        raise BadIndex(f"{INDEX_FILE} does not agree with its own digest; prepare the dataset anew, or copy it again")
    if sha256 is not None and digest != sha256:
        raise BadIndex(f"{INDEX_FILE} has digest {digest[:12]}, pinned was {sha256[:12]}: the dataset was replaced")
    try:
        index = build(DatasetIndex, body)
    except ContractError as error:
        raise BadIndex(f"{INDEX_FILE}: {error}") from error
    _check(index)
    return index


def _check(index: DatasetIndex) -> None:
    width = DTYPES.get(index.dtype)
    if width is None:
        raise BadIndex(f"{INDEX_FILE}: dtype is {index.dtype!r}; known are {', '.join(DTYPES)}")
    if not 1 <= index.vocab <= 1 << (8 * width):
        raise BadIndex(f"{INDEX_FILE}: vocab is {index.vocab}, which {index.dtype} cannot hold")
    if not index.shards:
        raise BadIndex(f"{INDEX_FILE}: it has no shard")
    for number, shard in enumerate(index.shards):
        _check_shard(shard, number, width)
    total = sum(shard.tokens for shard in index.shards)
    if total != index.tokens:
        raise BadIndex(f"{INDEX_FILE}: tokens is {index.tokens}, the shards have {total}")


def _check_shard(shard: Shard, number: int, width: int) -> None:
    expected = [(shard.needed[0], "bin", shard.tokens * width)]
    expected += [(shard.documents, "documents", shard.document_count * DOCUMENT_BYTES)]
    expected += [(shard.weights, "weights", shard.tokens)] if shard.weights else []
    if shard.tokens < 1:
        raise BadIndex(f"{INDEX_FILE}: {shard.file!r} has {shard.tokens} tokens")
    for stored, kind, size in expected:
        # Names are joined to a folder and to a prefix: no other name may stand here.
        if stored.file != shard_name(number, kind):
            raise BadIndex(f"{INDEX_FILE}: file {stored.file[:80]!r} stands where {shard_name(number, kind)} belongs")
        if stored.bytes != size:
            raise BadIndex(f"{INDEX_FILE}: {stored.file} has {stored.bytes} bytes, it should have {size}")
        if not _SHA256.fullmatch(stored.sha256):
            raise BadIndex(f"{INDEX_FILE}: sha256 of {stored.file} is not 64 hex digits")


def _digest(body: Mapping[str, Any]) -> str:
    try:
        return body_sha256(body)
    except (ValueError, RecursionError) as error:
        raise BadIndex(f"{INDEX_FILE} is not JSON: {error}") from error
