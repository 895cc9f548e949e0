"""Brings the ranks' data: the shards that they read now and next, each proved before it lies under its own name."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from botocore.exceptions import ClientError

from agent.cloud import CLOUD_ERRORS, Bucket, Missing, error_code
from agent.files import sha256_of
from agent.journal import Journal
from agent.threads import Loop
from job_contract.dataset import INDEX_FILE, BadIndex, DatasetIndex, StoredFile, open_index
from job_contract.node_files import DAMAGED_DATA_FILE, DamagedData, DataNeeds, read_message, write_message
from job_contract.spec import DataSpec

# Seconds between looks for new needs of the ranks.
LOOK_S = 0.1
RETRY_S = 1.0
DATA, EVALUATION = "data", "evaluation"
INDEX_LIMIT_BYTES = 64 << 20
DENIED = frozenset({"AccessDenied", "AllAccessDisabled", "Forbidden", "403"})
_CHUNK = 1 << 20


class NotAsPinned(Exception):
    """A file of the data set cannot be had as the index pins it; the text says why."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file, self.reason = file, reason


class Place(Protocol):
    """Where a data set lies."""

    def stream(self, file: str) -> Iterator[bytes]:
        """Yield the file's bytes. Raises Missing, CLOUD_ERRORS, OSError."""

    def path(self, file: str) -> Path | None:
        """Return where ranks can read the file in place; None where it has to be brought."""


@dataclass(frozen=True)
class InBucket:
    bucket: Bucket
    prefix: str

    def stream(self, file: str) -> Iterator[bytes]:
        return self.bucket.stream(f"{self.prefix}/{file}")

    def path(self, file: str) -> None:
        return None


@dataclass(frozen=True)
class InFolder:
    """A file system that is mounted on the node: FSx for Lustre, Mountpoint for S3, or a plain folder."""

    folder: Path

    def stream(self, file: str) -> Iterator[bytes]:
        try:
            with self.path(file).open("rb") as stream:
                yield from iter(lambda: stream.read(_CHUNK), b"")
        except FileNotFoundError as error:
            raise Missing(str(self.path(file))) from error

    def path(self, file: str) -> Path:
        return self.folder / file


def place_of(uri: str, bucket: Bucket) -> Place:
    """Return the place of a data set's folder; `bucket` lends its client."""
    kind, _, place = uri.partition("://")
    if kind == "file":
        return InFolder(Path(place))
    name, _, prefix = place.partition("/")
    return InBucket(bucket.sibling(name), prefix.rstrip("/"))


class Shards:
    """Serves one attempt's ranks here. A place that does not answer is asked again; one that lies is named.

    `store` outlives the attempt, so that a survivor brings nothing twice; `visible` is this attempt's, and a file is
    in it only after its size and sha256 were proved in this attempt. `field` is what of the request names it;
    `trouble` is how the place answered last, empty when it did as it should.
    """

    field = "data"

    def __init__(
        self,
        data: DataSpec,
        ranks: Iterable[int],
        *,
        run_dir: Path,
        root: Path,
        place: Place,
        downloads: int,
        journal: Journal,
        name: str = DATA,
    ) -> None:
        assert data.index_sha256
        self._pinned, self._ranks, self._run_dir = data.index_sha256, tuple(ranks), run_dir
        self._place, self._downloads, self._journal = place, downloads, journal
        self.visible, self.store = run_dir / name, root / name / data.index_sha256
        self._needs = run_dir / f"{name}-needs"
        self._index: DatasetIndex | None = None
        self._in_place: set[tuple[str, int]] = set()
        self.damaged: DamagedData | None = None
        self.trouble = ""
        for folder in self.store.parent.glob("*"):
            if folder != self.store:
                shutil.rmtree(folder, ignore_errors=True)
        self.visible.mkdir(parents=True, exist_ok=True)
        self.store.mkdir(parents=True, exist_ok=True)
        self.loop = Loop(name, self.round, journal)

    def round(self) -> float:
        """A few missing files are there; return the seconds until the next look."""
        if self.damaged:
            return RETRY_S
        try:
            pause_s = self._bring_some()
            self.trouble = ""
            return pause_s
        except NotAsPinned as error:
            self.damaged = DamagedData(file=error.file, reason=error.reason)
            self._journal.note("data_damaged", file=error.file, reason=error.reason)
            write_message(self._run_dir / DAMAGED_DATA_FILE, self.damaged)
        except (*CLOUD_ERRORS, OSError) as error:
            self.trouble = f"{error_code(error)}: {str(error)[:200]}"
            self._journal.note("data_retry", error=error_code(error), text=str(error)[:200])
        return RETRY_S

    def _bring_some(self) -> float:
        index = self._index = self._index or self._bring_index()
        needs = [read_message(self._needs / f"rank-{rank}.json", DataNeeds) for rank in self._ranks]
        wanted = {file.file: file for file in _in_order_of_need(index, needs)}
        if all(needs):
            self._evict(wanted)
        missing = [file for name, file in wanted.items() if not (self.visible / name).exists()]
        if not missing:
            return LOOK_S
        with ThreadPoolExecutor(self._downloads, thread_name_prefix="data") as pool:
            for _ in pool.map(self._bring, missing[: self._downloads]):
                pass
        # The ranks may have moved on meanwhile, so their needs are read again before more is brought.
        return 0.0

    def _bring_index(self) -> DatasetIndex:
        raw = b""
        for chunk in self._stream(INDEX_FILE):
            raw += chunk
            if len(raw) > INDEX_LIMIT_BYTES:
                raise NotAsPinned(INDEX_FILE, f"it has more than {INDEX_LIMIT_BYTES} bytes")
        try:
            index = open_index(raw, self._pinned)
        except BadIndex as error:
            raise NotAsPinned(INDEX_FILE, str(error)) from error
        draft = self.visible / f".{INDEX_FILE}"
        draft.write_bytes(raw)
        draft.replace(self.visible / INDEX_FILE)
        return index

    def _evict(self, wanted: Iterable[str]) -> None:
        """What no rank here reads now or next takes no room; a rank that has it open keeps it."""
        keep = {INDEX_FILE, *wanted}
        for path in (*self.visible.iterdir(), *self.store.iterdir()):
            if path.name not in keep:
                path.unlink(missing_ok=True)

    def _bring(self, stored: StoredFile) -> None:
        """The file is visible, and is what the index says. Raises NotAsPinned."""
        started, kept = time.monotonic(), self.store / stored.file
        in_place = self._place.path(stored.file)
        if in_place is not None:
            self._prove_in_place(stored, in_place)
            (self.visible / stored.file).symlink_to(in_place)
        else:
            local = _is_whole(kept, stored)
            if not local:
                self._proved(stored, lambda: self._download(stored, kept))
            os.link(kept, self.visible / stored.file)
            self._journal.note(
                "data_brought", file=stored.file, bytes=stored.bytes, local=local, took_s=time.monotonic() - started
            )

    def _prove_in_place(self, stored: StoredFile, path: Path) -> None:
        """The file was read whole once since it was last written."""
        try:
            state = (stored.file, path.stat().st_mtime_ns)
        except FileNotFoundError as error:
            raise NotAsPinned(stored.file, f"there is no such file ({path})") from error
        if state not in self._in_place:
            self._proved(stored, lambda: self._read(stored))
            self._in_place.add(state)
            self._journal.note("data_proved", file=stored.file, bytes=stored.bytes)

    def _proved(self, stored: StoredFile, attempt: Callable[[], str]) -> None:
        """One more attempt is made where the bytes differ: a transfer may be at fault, and not the place."""
        for last in (False, True):
            difference = attempt()
            if not difference:
                return
            self._journal.note("data_differs", file=stored.file, reason=difference)
            if last:
                raise NotAsPinned(stored.file, difference)

    def _download(self, stored: StoredFile, target: Path) -> str:
        draft = target.with_name(f".{target.name}.part")
        try:
            with draft.open("wb") as stream:
                difference = self._read(stored, into=stream)
            if not difference:
                draft.replace(target)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                free = shutil.disk_usage(self.store).free
                raise NotAsPinned(
                    stored.file,
                    f"no room on the node's disk: it has {stored.bytes} bytes and {free} are free; "
                    "prepare the data set with smaller shards, or use a type with more disk",
                ) from error
            raise
        finally:
            draft.unlink(missing_ok=True)
        return difference

    def _read(self, stored: StoredFile, into: BinaryIO | None = None) -> str:
        """Return how the bytes differ from the index, nothing when they don't; they were written `into`."""
        digest, size = hashlib.sha256(), 0
        for chunk in self._stream(stored.file):
            digest.update(chunk)
            size += len(chunk)
            if into:
                into.write(chunk)
        return _difference(stored, digest.hexdigest(), size)

    def _stream(self, file: str) -> Iterator[bytes]:
        return streamed(self._place, file, self.loop)


def streamed(place: Place, file: str, loop: Loop) -> Iterator[bytes]:
    """Yield the bytes while `loop` runs. Raises NotAsPinned where asking again mends nothing, CLOUD_ERRORS."""
    try:
        for chunk in place.stream(file):
            if loop.closed.is_set():
                raise NotAsPinned(file, "the attempt is over")
            yield chunk
    except Missing as error:
        raise NotAsPinned(file, f"there is no such file ({error})") from error
    except ClientError as error:
        if error_code(error) in DENIED:
            raise NotAsPinned(
                file, f"nodes may not read it ({error_code(error)}); name its bucket in the stack's DataBucketArns"
            ) from error
        raise


def visible_folder(run_dir: Path) -> Path:
    """Return where the ranks of an attempt find the index and the shards that are here."""
    return run_dir / DATA


def _in_order_of_need(index: DatasetIndex, needs: Iterable[DataNeeds | None]) -> Iterator[StoredFile]:
    """Yield the files of the needed shards: what any rank reads first comes first."""
    places: dict[int, int] = {}
    for one in needs:
        for place, shard in enumerate(one.shards if one else ()):
            if 0 <= shard < len(index.shards):
                places[shard] = min(place, places.get(shard, place))
    for shard in sorted(places, key=lambda shard: (places[shard], shard)):
        yield from index.shards[shard].needed


def _is_whole(path: Path, stored: StoredFile) -> bool:
    try:
        digest, size = sha256_of(path)
    except OSError:
        return False
    return not _difference(stored, digest, size)


def _difference(stored: StoredFile, digest: str, size: int) -> str:
    if size != stored.bytes:
        return f"{size} bytes, the index says {stored.bytes}"
    if digest != stored.sha256:
        return f"sha256 {digest[:12]}, the index says {stored.sha256[:12]}"
    return ""
