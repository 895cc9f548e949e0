"""Proves a committed save from its bytes: manifest, data files, parts, and the head where it names the save.

Nothing is unpickled and no torch is needed, so any machine that can read the files can judge them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from job_contract.checkpoint_layout import (
    HEAD_FILE,
    MANIFEST_FILE,
    Manifest,
    SavedFile,
    SavePointer,
    open_head,
    open_part,
    part_file,
    read_manifest,
)
from job_contract.version import ContractError

CHUNK = 1 << 20


@dataclass(frozen=True)
class Damage:
    """A file of a save that is not what was committed; `file` is its path in the save's folder, or `head.json`."""

    file: str
    reason: str


class Files(Protocol):
    """The files of one save, by their path in the save's folder."""

    def chunks(self, path: str) -> Iterable[bytes] | None:
        """Return the file's bytes in pieces, None when there is no such file."""


class Folder:
    """A save in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def chunks(self, path: str) -> Iterable[bytes] | None:
        try:
            stream = (self.root / path).open("rb")
        except (FileNotFoundError, NotADirectoryError):
            return None
        return _pieces(stream)


def verify(
    files: Files, *, job: str, save: str, pointer: SavePointer | None = None, head: bytes | None = None
) -> list[Damage]:
    """Return what is wrong with the save, nothing when every byte is the one that was committed.

    `pointer`, when given, fixes the manifest's digest; so does `head`, the bytes of the job's head, when it names the
    save or has it as the parent.
    """
    damages: list[Damage] = []
    pointers = [pointer] if pointer else []
    if head is not None:
        try:
            opened = open_head(head, job=job)
            pointers += [known for known in (opened.pointer, opened.parent) if known and known.save == save]
        except ContractError as error:
            damages.append(Damage(HEAD_FILE, str(error)))
    try:
        manifest = _manifest(files, job, save, pointers)
    except ContractError as error:
        return [*damages, Damage(MANIFEST_FILE, str(error))]
    damages += _files(files, manifest)
    damages += _parts(files, manifest)
    return damages


def _manifest(files: Files, job: str, save: str, pointers: list[SavePointer]) -> Manifest:
    raw = _whole(files, MANIFEST_FILE)
    if raw is None:
        raise ContractError("it is missing: the save was never committed")
    manifest = read_manifest(raw)
    if (manifest.job, manifest.save) != (job, save):
        raise ContractError(f"it belongs to job {manifest.job}, save {manifest.save}")
    for pointer in pointers:
        if manifest.sha256 != pointer.manifest_sha256:
            raise ContractError(f"digest {str(manifest.sha256)[:12]}, committed was {pointer.manifest_sha256[:12]}")
    return manifest


def _files(files: Files, manifest: Manifest) -> Iterator[Damage]:
    for file in manifest.files:
        plain = Path(file.path).name == file.path and "\0" not in file.path
        if reason := difference(file, files.chunks(file.path)) if plain else "it is not a plain file name":
            yield Damage(file.path, reason)


def difference(file: SavedFile, chunks: Iterable[bytes] | None) -> str:
    """Return how the bytes differ from the committed ones, nothing when they don't."""
    if chunks is None:
        return "it is missing"
    digest, size_bytes = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        size_bytes += len(chunk)
    if size_bytes != file.size_bytes:
        return f"{size_bytes} bytes, committed were {file.size_bytes}"
    if digest.hexdigest() != file.sha256:
        return f"sha256 {digest.hexdigest()[:12]}, committed was {file.sha256[:12]}"
    return ""


def _parts(files: Files, manifest: Manifest) -> Iterator[Damage]:
    """Every node that wrote a file has a part, and it says of its files what the manifest says."""
    for node_rank in sorted({file.node_rank for file in manifest.files}):
        listed = sorted((file for file in manifest.files if file.node_rank == node_rank), key=lambda file: file.path)
        raw = _whole(files, part_file(node_rank))
        if raw is None:
            yield Damage(part_file(node_rank), "it is missing")
            continue
        try:
            part = open_part(raw, job=manifest.job, save=manifest.save, node_rank=node_rank)
        except ContractError as error:
            yield Damage(part_file(node_rank), str(error))
            continue
        if part.failed or sorted(part.files, key=lambda file: file.path) != listed:
            yield Damage(part_file(node_rank), "it lists other files than the manifest")


def _whole(files: Files, path: str) -> bytes | None:
    chunks = files.chunks(path)
    return None if chunks is None else b"".join(chunks)


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    with stream:
        yield from iter(lambda: stream.read(CHUNK), b"")
