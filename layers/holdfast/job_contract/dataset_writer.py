"""Writes a dataset: tokens go into shards of one size as they come, and the index closes it."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from job_contract.dataset import (
    DOCUMENT_BYTES,
    INDEX_FILE,
    DatasetIndex,
    Shard,
    StoredFile,
    TokenizerFacts,
    seal_index,
    shard_name,
)

TYPECODES = {"uint8": "B", "uint16": "H", "uint32": "I"}


def smallest_dtype(vocab: int) -> str:
    """Return the dtype that holds every token below `vocab` in the fewest bytes."""
    return "uint8" if vocab <= 1 << 8 else "uint16" if vocab <= 1 << 16 else "uint32"


class DatasetWriter:
    """A context: the draft lies beside `folder` until `close` has sealed it, and is gone after an error.

    The same documents in the same order make the same bytes, whatever the machine. A document may cross from one
    shard into the next, so all shards but the last have `shard_tokens` tokens.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab: int,
        tokenizer: TokenizerFacts,
        source: str,
        licence: str,
        shard_tokens: int,
    ) -> None:
        if shard_tokens < 1:
            raise ValueError(f"a shard of {shard_tokens} tokens is none")
        self.folder, self.vocab, self.dtype = folder, vocab, smallest_dtype(vocab)
        self.tokenizer, self.source, self.licence = tokenizer, source, licence
        self.shard_tokens = shard_tokens
        self.shards: list[Shard] = []
        self.tokens = self.documents = 0
        self._open: _OpenShard | None = None

    def __enter__(self) -> DatasetWriter:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.draft = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}.draft-", dir=self.folder.parent))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._open.abandon()
        shutil.rmtree(self.draft, ignore_errors=True)

    def add(self, tokens: Sequence[int], weights: bytes | None = None) -> None:
        """The document follows those before it; `weights` has a byte a token, 1 = a target. Raises ValueError."""
        if weights is not None and len(weights) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens and {len(weights)} weights")
        if not tokens:
            return
        if max(tokens) >= self.vocab or min(tokens) < 0:
            raise ValueError(f"token {max(tokens)} is outside the vocabulary of {self.vocab}")
        self.documents += 1
        # array() takes bytes for its own memory, whatever the width of its items.
        plain = tokens if self.dtype == "uint8" or not isinstance(tokens, bytes) else list(tokens)
        packed = array(TYPECODES[self.dtype], plain)
        at = 0
        while at < len(packed):
            shard = self._open = self._open or _OpenShard(self.draft, len(self.shards))
            if at == 0:
                shard.begin_document()
            part = slice(at, at + self.shard_tokens - shard.tokens)
            shard.write(packed[part], weights[part] if weights is not None else None)
            at = min(len(packed), part.stop)
            if shard.tokens == self.shard_tokens:
                self._close_shard()
        self.tokens += len(packed)

    def close(self) -> DatasetIndex:
        """Return the index of the dataset that lies in `folder` now. Raises ValueError without a token, OSError."""
        if self._open:
            self._close_shard()
        if not self.shards:
            raise ValueError("there is not one token")
        index = DatasetIndex(
            dtype=self.dtype,
            vocab=self.vocab,
            tokens=self.tokens,
            tokenizer=self.tokenizer,
            shards=tuple(self.shards),
            source=self.source,
            licence=self.licence,
        )
        raw, digest = seal_index(index)
        (self.draft / INDEX_FILE).write_bytes(raw)
        self.draft.chmod(0o755)
        self.draft.rename(self.folder)
        return DatasetIndex(**{**vars(index), "sha256": digest})

    def _close_shard(self) -> None:
        assert self._open
        self.shards.append(self._open.close())
        self._open = None


class _OpenShard:
    """Three files that grow; the one of weights begins with the first token that is no target."""

    def __init__(self, draft: Path, number: int) -> None:
        self.draft, self.number, self.tokens = draft, number, 0
        self._documents = array("Q")
        self._bin = _Growing(draft / shard_name(number))
        self._weights: _Growing | None = None

    def begin_document(self) -> None:
        self._documents.append(self.tokens)

    def write(self, tokens: array[int], weights: bytes | None) -> None:
        if weights is not None and self._weights is None and 0 in weights:
            self._weights = _Growing(self.draft / shard_name(self.number, "weights"))
            self._weights.write(b"\1" * self.tokens)
        if self._weights:
            self._weights.write(weights if weights is not None else b"\1" * len(tokens))
        self._bin.write(_little(tokens))
        self.tokens += len(tokens)

    def close(self) -> Shard:
        documents = _Growing(self.draft / shard_name(self.number, "documents"))
        documents.write(_little(self._documents))
        assert len(self._documents) * DOCUMENT_BYTES == documents.size
        return Shard(
            **vars(self._bin.close()),
            tokens=self.tokens,
            documents=documents.close(),
            document_count=len(self._documents),
            weights=self._weights.close() if self._weights else None,
        )

    def abandon(self) -> None:
        self._bin.close()
        if self._weights:
            self._weights.close()


class _Growing:
    """A file whose size and digest are known when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._digest = hashlib.sha256()
        self._stream: BinaryIO = path.open("wb")

    def write(self, raw: bytes) -> None:
        self._digest.update(raw)
        self.size += self._stream.write(raw)

    def close(self) -> StoredFile:
        self._stream.close()
        return StoredFile(file=self.path.name, bytes=self.size, sha256=self._digest.hexdigest())


def _little(items: array[int]) -> bytes:
    if sys.byteorder == "big":
        items = items[:]
        items.byteswap()
    return items.tobytes()
