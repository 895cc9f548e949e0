"""What is trained on, as shards in a folder: the standard library of this interpreter, or what the agent brings.

The format is `job_contract.dataset`. The standard library is here whole and is proved at its start. Shards that the
agent brings are proved by it before they lie under their names, and come and go while training runs.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Collection
from pathlib import Path

import numpy as np

from job_contract.dataset import INDEX_FILE, BadIndex, DatasetIndex, StoredFile, TokenizerFacts, open_index
from job_contract.dataset_writer import DatasetWriter

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SHARD_TOKENS = 1 << 18


class Corpus:
    """An index, and its shards as far as they are here; they are mapped, never read whole."""

    def __init__(self, folder: Path, index: DatasetIndex) -> None:
        self.folder, self.index = folder, index
        self.shard_tokens = tuple(shard.tokens for shard in index.shards)
        self._mapped: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}

    @property
    def digest(self) -> str:
        """Names every token: the digest of the index, which holds the digests of the shards."""
        return self.index.sha256

    def has(self, shard: int) -> bool:
        """Whether the shard can be read from now on, even if its files are taken away, until it is forgotten."""
        try:
            self._map(shard)
        except FileNotFoundError:
            return False
        return True

    def forget_all_but(self, shards: Collection[int]) -> None:
        """The disk space of other shards is free once their files are taken away."""
        self._mapped = {shard: mapped for shard, mapped in self._mapped.items() if shard in shards}

    def row(self, shard: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return tokens of the shard as int64, and a weight for each as a target; None where all are targets."""
        tokens, weights = self._map(shard)
        part = slice(first, first + count)
        return tokens[part].astype(np.int64), None if weights is None else weights[part].astype(np.float32)

    def _map(self, shard: int) -> tuple[np.ndarray, np.ndarray | None]:
        if shard not in self._mapped:
            facts = self.index.shards[shard]
            dtype = np.dtype(self.index.dtype).newbyteorder("<")
            tokens = np.memmap(self.folder / facts.file, dtype=dtype, mode="r", shape=(facts.tokens,))
            weights = facts.weights and np.memmap(self.folder / facts.weights.file, dtype=np.uint8, mode="r")
            self._mapped[shard] = tokens, weights
        return self._mapped[shard]


def open_corpus(folder: Path) -> Corpus:
    """Return the standard-library corpus in `folder`, built there if need be, every file proved. Raises OSError."""
    if not (folder / INDEX_FILE).exists():
        _build(folder)
    try:
        index = open_index((folder / INDEX_FILE).read_bytes())
    except BadIndex as error:
        raise OSError(f"{folder} is damaged: {error}") from error
    for stored in index.files:
        _prove(folder, stored)
    return Corpus(folder, index)


def _prove(folder: Path, stored: StoredFile) -> None:
    with (folder / stored.file).open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != stored.sha256:
        raise OSError(f"{folder / stored.file} is damaged: its digest is {digest[:12]}, built was {stored.sha256[:12]}")


def _build(folder: Path) -> None:
    """The folder exists complete; of several processes that build at once one wins, and all made the same bytes."""
    with DatasetWriter(
        folder,
        vocab=256,
        tokenizer=TokenizerFacts(kind="bytes"),
        source=f"the standard library of CPython {platform.python_version()}",
        licence="PSF-2.0",
        shard_tokens=SHARD_TOKENS,
    ) as writer:
        for path in _sources(Path(sysconfig.get_path("stdlib"))):
            writer.add(path.read_bytes())
        try:
            writer.close()
        except OSError:
            if not (folder / INDEX_FILE).exists():
                raise


def _sources(root: Path) -> list[Path]:
    found = []
    for here, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED)
        found += [Path(here) / name for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
