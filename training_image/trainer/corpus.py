"""The offline corpus: the source of the interpreter's own standard library as byte tokens.

A corpus is a folder of two files: `tokens.bin` (one byte a token) and `index.json` (sizes, digest, where each document
starts, licence).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FORMAT = 1
TOKENS_FILE, INDEX_FILE = "tokens.bin", "index.json"
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SHARD_TOKENS = 1 << 18


@dataclass(frozen=True)
class Corpus:
    """All tokens, mapped from disk, and the sha256 over them."""

    tokens: np.ndarray
    digest: str
    shard_tokens: int

    @property
    def shards(self) -> tuple[tuple[int, int], ...]:
        """First token and number of tokens of each shard: fixed slices, the last one shorter."""
        total = len(self.tokens)
        return tuple((start, min(self.shard_tokens, total - start)) for start in range(0, total, self.shard_tokens))


def open_corpus(folder: Path) -> Corpus:
    """Return the standard-library corpus in `folder`, built there if need be, its bytes proven by their digest."""
    if not (folder / INDEX_FILE).exists():
        _build(folder)
    index = json.loads((folder / INDEX_FILE).read_text())
    tokens = np.memmap(folder / TOKENS_FILE, dtype=np.uint8, mode="r")
    digest = hashlib.sha256(tokens.data).hexdigest()
    if digest != index["sha256"]:
        raise OSError(
            f"{folder / TOKENS_FILE} is damaged: its digest is {digest[:12]}, built was {index['sha256'][:12]}"
        )
    return Corpus(tokens=tokens, digest=digest, shard_tokens=index["shard_tokens"])


def _build(folder: Path) -> None:
    """The folder exists complete; of several processes that build at once one wins, and all made the same bytes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    documents = [path.read_bytes() for path in _sources(Path(sysconfig.get_path("stdlib")))]
    text = b"".join(documents)
    starts = np.cumsum([0, *(len(document) for document in documents[:-1])]).tolist()
    (draft / TOKENS_FILE).write_bytes(text)
    index = {
        "format": FORMAT,
        "dtype": "uint8",
        "tokens": len(text),
        "shard_tokens": SHARD_TOKENS,
        "sha256": hashlib.sha256(text).hexdigest(),
        "document_starts": starts,
        "weights": None,
        "licence": "PSF-2.0",
    }
    (draft / INDEX_FILE).write_text(json.dumps(index))
    _move_unless_there(draft, folder)


def _sources(root: Path) -> list[Path]:
    found = []
    for here, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED)
        found += [Path(here) / name for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _move_unless_there(draft: Path, folder: Path) -> None:
    try:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        draft.rename(folder)
    except OSError:
        shutil.rmtree(draft)
        if not (folder / INDEX_FILE).exists():
            raise
