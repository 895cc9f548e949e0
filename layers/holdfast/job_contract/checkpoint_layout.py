"""Where a checkpoint lives in the bucket, and the three files that make it one: part, manifest, head.

    teams/<team>/jobs/<job>/head.json
    teams/<team>/jobs/<job>/saves/step-00000025.a0001.s01/<data files>
    teams/<team>/jobs/<job>/saves/step-00000025.a0001.s01/parts/node-0.json
    teams/<team>/jobs/<job>/saves/step-00000025.a0001.s01/manifest.json

A save exists once its manifest does (PUT with If-None-Match: *); it is the job's newest once the head names it
(PUT with If-Match). All three carry the digest of their own canonical body.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from job_contract.version import ContractError, canonical_json, decode, encode

SAVE_NAME = re.compile(r"step-(\d{8})\.a(\d{4,})\.s(\d{2,})")
HEAD_FILE = "head.json"
MANIFEST_FILE = "manifest.json"
METRICS_FOLDER = "metrics"
PARTS_FOLDER = "parts"


class Damaged(ContractError):
    """A file of a checkpoint whose bytes are not the ones that were committed."""


def job_prefix(team: str, job: str) -> str:
    """Return the key prefix of everything the job owns in the bucket, without a slash at the end."""
    return f"teams/{team}/jobs/{job}"


def save_name(step: int, attempt: int, number: int) -> str:
    """Return the folder name of the `number`-th save of an attempt, taken after optimizer step `step`."""
    return f"step-{step:08d}.a{attempt:04d}.s{number:02d}"


@dataclass(frozen=True)
class SaveName:
    """The three numbers in a save's folder name."""

    step: int
    attempt: int
    number: int


@lru_cache(maxsize=1024)
def parse_save_name(name: str) -> SaveName:
    """Return the numbers of a save's name. Raises ContractError for anything else, paths included."""
    match = SAVE_NAME.fullmatch(name)
    if not match:
        raise ContractError(f"{name!r} is not the name of a save (step-NNNNNNNN.aNNNN.sNN)")
    return SaveName(*(int(number) for number in match.groups()))


def head_key(prefix: str) -> str:
    return f"{prefix}/{HEAD_FILE}"


def file_key(prefix: str, save: str, file: str) -> str:
    return f"{prefix}/saves/{save}/{file}"


def manifest_key(prefix: str, save: str) -> str:
    return file_key(prefix, save, MANIFEST_FILE)


def part_file(node_rank: int) -> str:
    """Return the path of a node's part in the save's folder."""
    return f"{PARTS_FOLDER}/node-{node_rank}.json"


def part_key(prefix: str, save: str, node_rank: int) -> str:
    return file_key(prefix, save, part_file(node_rank))


def metrics_key(prefix: str, attempt: int) -> str:
    """Return where the metrics of an attempt lie: one JSON line a step, thinned where there are many."""
    return f"{prefix}/{METRICS_FOLDER}/attempt-{attempt:04d}.jsonl"


@dataclass(frozen=True, kw_only=True)
class SavePointer:
    """Names a committed save and fixes its content by the digest of its manifest."""

    save: str
    manifest_sha256: str

    @property
    def step(self) -> int:
        return parse_save_name(self.save).step


@dataclass(frozen=True, kw_only=True)
class SavedFile:
    """One file of a save: path inside the save's folder, size in bytes, sha256 in hex, node rank that wrote it."""

    path: str
    size_bytes: int
    sha256: str
    node_rank: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one node put into a save, or why it could not."""

    job: str
    attempt: int
    save: str
    node_rank: int
    roster_id: str
    files: tuple[SavedFile, ...] = ()
    failed: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A committed save. `facts` is what the trainer wants back at a resume (schedule, data position, seeds)."""

    job: str
    attempt: int
    step: int
    save: str
    world_size: int
    mesh: tuple[int, ...]
    config_hash: str
    corpus_digest: str
    versions: dict[str, str]
    facts: dict[str, Any]
    files: tuple[SavedFile, ...]
    final: bool = False
    answers_generation: int = 0
    parent: SavePointer | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Head:
    """The job's newest save and the attempt that may write the next one; the fence against older attempts."""

    job: str
    attempt: int
    branch: int = 0
    step: int = 0
    save: str | None = None
    manifest_sha256: str | None = None
    parent: SavePointer | None = None
    sha256: str | None = None

    @property
    def pointer(self) -> SavePointer | None:
        """The newest save, None before the first."""
        if self.save is None or self.manifest_sha256 is None:
            return None
        return SavePointer(save=self.save, manifest_sha256=self.manifest_sha256)


def body_sha256(body: Mapping[str, Any]) -> str:
    """Return the digest of the canonical body without its own `sha256` field."""
    return hashlib.sha256(canonical_json({key: value for key, value in body.items() if key != "sha256"})).hexdigest()


def seal(message: Manifest | Head | Part) -> tuple[bytes, str]:
    """Return the bytes to store, its own digest inside, and that digest."""
    body = encode(message)
    digest = body_sha256(body)
    return canonical_json({**body, "sha256": digest}), digest


def open_manifest(raw: bytes, *, job: str, pointer: SavePointer) -> Manifest:
    """Return the manifest after proving that it is the one `pointer` names, of this job. Raises Damaged."""
    body = _load(raw, MANIFEST_FILE)
    digest = body_sha256(body)
    if digest != pointer.manifest_sha256 or body.get("sha256") != digest:
        raise Damaged(
            f"{MANIFEST_FILE} of {pointer.save}: digest {digest[:12]}, committed was {pointer.manifest_sha256[:12]}"
        )
    manifest = _manifest(body)
    if (manifest.job, manifest.save) != (job, pointer.save):
        raise Damaged(f"{MANIFEST_FILE} of {pointer.save} belongs to job {manifest.job}, save {manifest.save}")
    return manifest


def read_manifest(raw: bytes) -> Manifest:
    """Return a manifest that agrees with its own digest and its own name. Raises Damaged."""
    return _manifest(_sealed(raw, MANIFEST_FILE))


def open_part(raw: bytes, *, job: str, save: str, node_rank: int) -> Part:
    """Return the part after checking its digest and whose it is. Raises Damaged."""
    file = part_file(node_rank)
    part = decode(Part, _sealed(raw, file))
    if (part.job, part.save, part.node_rank) != (job, save, node_rank):
        raise Damaged(f"{file} of {save} belongs to job {part.job}, save {part.save}, node {part.node_rank}")
    if part.attempt != parse_save_name(save).attempt:
        raise Damaged(f"{file} of {save} is of attempt {part.attempt}")
    return part


def open_head(raw: bytes, *, job: str) -> Head:
    """Return the head after checking its digest, its job, and that it agrees with the save it names. Raises Damaged."""
    head = decode(Head, _sealed(raw, HEAD_FILE))
    if head.job != job:
        raise Damaged(f"{HEAD_FILE} belongs to job {head.job}, not {job}")
    if (head.save is None) != (head.manifest_sha256 is None) or head.step != (head.pointer.step if head.pointer else 0):
        raise Damaged(f"{HEAD_FILE} names save {head.save} for step {head.step}")
    if head.save is not None and parse_save_name(head.save).attempt > head.attempt:
        raise Damaged(f"{HEAD_FILE} of attempt {head.attempt} names a later attempt's save, {head.save}")
    return head


def _manifest(body: dict[str, Any]) -> Manifest:
    manifest = decode(Manifest, body)
    name = parse_save_name(manifest.save)
    if (manifest.step, manifest.attempt) != (name.step, name.attempt):
        raise Damaged(f"{MANIFEST_FILE} of {manifest.save} says step {manifest.step}, attempt {manifest.attempt}")
    return manifest


def _sealed(raw: bytes, file: str) -> dict[str, Any]:
    body = _load(raw, file)
    if body.get("sha256") != body_sha256(body):
        raise Damaged(f"{file} does not agree with its own digest")
    return body


def _load(raw: bytes, file: str) -> dict[str, Any]:
    try:
        body = json.loads(raw)
        # NaN and lone surrogates are read by json and refused by the canonical form; deep nesting ends the parser.
        canonical = isinstance(body, dict) and raw == canonical_json(body)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{file} is not JSON: {error}") from error
    if not canonical:
        raise Damaged(f"{file} is not canonical JSON")
    return dict(body)
