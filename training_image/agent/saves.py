"""From a save on local disk to a committed one: hash, upload, part, commit; one save of the attempt after another.

A file is uploaded as soon as it has its name, while the ranks write the next ones.
"""

from __future__ import annotations

import dataclasses
import queue
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agent.cloud import CLOUD_ERRORS, Bucket, error_code, permanent
from agent.commit import Committed, Committer, Fenced, HeadUnreadable
from agent.files import plain_name, sha256_of
from agent.journal import Journal
from agent.ranks import Seats
from agent.settings import Pace
from agent.threads import Loop
from job_contract.checkpoint_layout import (
    PARTS_FOLDER,
    Part,
    SavedFile,
    file_key,
    open_part,
    parse_save_name,
    part_key,
    seal,
)
from job_contract.node_files import Control, ControlKind, RankSave, read_message
from job_contract.version import ContractError

# Seconds between looks for a save that has become complete on disk.
LOOK_S = 0.1
RETRY_S = 1.0
# The longest pause before the n-th retry of an upload is this times 2^n, and the pause is drawn evenly below it.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
# An upload of less says nothing about the network.
RATED_BYTES = 1 << 20
DATA_FILES = "__*.distcp"


@dataclass(frozen=True)
class Saved:
    """The save is committed and the head is at or past it."""

    committed: Committed

    @property
    def name(self) -> str:
        return self.committed.manifest.save


@dataclass(frozen=True)
class SaveFailed:
    """The save is over and was not committed."""

    name: str
    final: bool
    reason: str


@dataclass(frozen=True)
class LostToFence:
    """A later attempt owns the head; this attempt is over."""

    reason: str


@dataclass(frozen=True)
class Found:
    """Answer to `look_up`: the committed save of that name, None when there is none."""

    name: str
    committed: Committed | None


@dataclass(frozen=True)
class LocalSave:
    """A save that all ranks of this node have completed; `any_rank` stands for what is equal on all of them."""

    folder: Path
    any_rank: RankSave
    files: tuple[str, ...]
    failed: str | None = None

    @property
    def name(self) -> str:
        return self.any_rank.save


Result = Saved | SaveFailed | LostToFence | Found
Version = tuple[int, int, int]


class NotUploaded(Exception):
    """A file of the save is not in the bucket, and will not be; the text is the error's code and the file's name."""


class Saves:
    """Works on one attempt's saves in a thread of its own; `results` says how each ended."""

    def __init__(
        self,
        seats: Seats,
        *,
        roster_id: str,
        prefix: str,
        run_dir: Path,
        bucket: Bucket,
        committer: Committer,
        control: Callable[[], Control],
        pace: Pace,
        journal: Journal,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._seats, self._roster_id, self._prefix = seats, roster_id, prefix
        self._folder = run_dir / "saves"
        self._bucket, self._committer, self._control = bucket, committer, control
        self._pace, self._journal, self._clock = pace, journal, clock
        self.results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self._settled: set[str] = set()
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._known_parts: dict[str, Part] = {}
        self._uploaded: dict[tuple[str, str], tuple[Version, SavedFile]] = {}
        self._bytes_per_s: float | None = None
        self._early_from = 0.0
        self.failures: dict[str, str] = {}
        self.answered_after_s: dict[str, float] = {}
        self._ordered_at: dict[int, float] = {}
        self._fenced = False
        self.newest: str | None = None
        self.loop = Loop("saves", self._round, journal)

    def look_up(self, save: str) -> None:
        """A Found for this save will come, after every save that is complete on disk now."""
        self._asked.put(save)
        self.loop.poke()

    def idle(self) -> bool:
        """Return whether every save that is complete on disk has its result in `results`."""
        return self._fenced or not self._unsettled()

    def under_way(self) -> bool:
        """Return whether a save of this attempt is being written, uploaded or committed."""
        names = [entry.name for entry in _entries(self._folder) if entry.name not in self._settled]
        return not self._fenced and next(_saves_of(names, self._seats.attempt), None) is not None

    def _round(self) -> float:
        if self._fenced:
            return LOOK_S
        self._note_order()
        for name in self._unsettled():
            self._settle(name)
            if self._fenced or self.loop.closed.is_set():
                return LOOK_S
        self._upload_what_is_written()
        if not self._asked.empty():
            name = self._asked.get()
            try:
                self.results.put(Found(name, self._committer.find(name)))
            except CLOUD_ERRORS as error:
                self._journal.note("manifest_unread", save=name, error=error_code(error))
                self._asked.put(name)
                return RETRY_S
            except ContractError as error:
                self._journal.note("manifest_damaged", save=name, error=str(error))
                self.results.put(Found(name, None))
        return LOOK_S

    def _note_order(self) -> None:
        control = self._control()
        if control.kind is not ControlKind.NONE:
            self._ordered_at.setdefault(control.generation, self._clock())

    def _answered(self, committed: Committed) -> None:
        """How long an order waited for its save is known: from the look that saw it to the commit."""
        manifest = committed.manifest
        self._note_order()
        ordered_at = self._ordered_at.get(manifest.answers_generation)
        if ordered_at is not None:
            seconds = self.answered_after_s.setdefault(manifest.save, round(self._clock() - ordered_at, 3))
            self._journal.note("order_answered", save=manifest.save, seconds=seconds)

    def _settle(self, name: str) -> None:
        try:
            result = self.settle(local_save(self._folder / name, self._seats.ranks))
        except Fenced as error:
            self._journal.note("fenced", save=name, error=str(error))
            self._fenced = True
            result = LostToFence(str(error))
        except ValueError as error:
            result = SaveFailed(name, False, f"a rank described it wrongly: {error}")
        if isinstance(result, SaveFailed):
            self.failures[name] = result.reason
        self.results.put(result)
        self._settled.add(name)

    def settle(self, save: LocalSave) -> Result:
        """Return how the save ended; until then its files are uploaded and its part is put. Raises Fenced."""
        seen_at = self._clock()
        part = self._part(save)
        if not self._put_part(part, save, seen_at):
            return SaveFailed(save.name, save.any_rank.final, "the part could not be put before the deadline")
        while not self.loop.closed.is_set():
            try:
                if result := self._look(save):
                    return result
            except (*CLOUD_ERRORS, HeadUnreadable) as error:
                self._journal.note("save_retry", save=save.name, error=error_code(error))
            except (ContractError, ValueError) as error:
                return SaveFailed(save.name, save.any_rank.final, str(error))
            if self._clock() > self._due_at(seen_at):
                return SaveFailed(save.name, save.any_rank.final, "not all parts came before the deadline")
            self.loop.closed.wait(self._pace.parts_s)
        return SaveFailed(save.name, save.any_rank.final, "the attempt was left")

    def _look(self, save: LocalSave) -> Result | None:
        parts = self._parts(save.name)
        committed = self._committer.find(save.name)
        if committed is None:
            broken = next((part for part in parts if part.failed), None)
            if broken:
                reason = f"part of node {broken.node_rank} failed: {broken.failed}"
                return SaveFailed(save.name, save.any_rank.final, reason)
            if len(parts) < self._seats.nodes:
                return self._overdue(save, {part.node_rank for part in parts})
            committed = self._committer.commit(save.any_rank, parts)
        self._committer.move_head(committed)
        self._journal.note("committed", save=save.name, step=committed.manifest.step, sha256=committed.sha256)
        self._answered(committed)
        self.newest = save.name
        self._forget_older(save.name)
        return Saved(committed)

    def _overdue(self, save: LocalSave, put: set[int]) -> SaveFailed | None:
        """The part of a node under notice is due when the notice ends: afterwards nobody is there to put it."""
        control = self._control()
        missing = sorted(set(control.doomed) - put)
        if (
            not missing
            or control.deadline_at is None
            or self._clock() < control.deadline_at + self._pace.doomed_slack_s
        ):
            return None
        reason = f"node {missing[0]} was taken away before its part was put"
        return SaveFailed(save.name, save.any_rank.final, reason)

    def _part(self, save: LocalSave) -> Part:
        """Return this node's part; its files are in the bucket unless it says failed."""
        part = Part(
            job=self._seats.job,
            attempt=self._seats.attempt,
            save=save.name,
            node_rank=self._seats.node_rank,
            roster_id=self._roster_id,
        )
        if save.failed:
            return dataclasses.replace(part, failed=save.failed)
        try:
            files = self._upload_all(save.folder, save.files, save)
        except (NotUploaded, OSError, ContractError) as error:
            self._journal.note("upload_failed", save=save.name, error=str(error))
            return dataclasses.replace(part, failed=str(error))
        self._journal.note(
            "save_uploaded", save=save.name, files=len(files), size_bytes=sum(f.size_bytes for f in files)
        )
        return dataclasses.replace(part, files=files)

    def _upload_what_is_written(self) -> None:
        """The files that the ranks have closed of a save that they still write are in the bucket; else tried later."""
        if self._clock() < self._early_from:
            return
        names = [entry.name for entry in _entries(self._folder) if entry.name not in self._settled]
        for folder in (self._folder / name for name in _saves_of(names, self._seats.attempt)):
            written = [path.name for path in sorted(folder.glob(DATA_FILES))]
            try:
                self._upload_all(folder, written)
            except (NotUploaded, OSError) as error:
                self._journal.note("upload_deferred", save=folder.name, error=str(error))
                self._early_from = self._clock() + random.uniform(RETRY_S, LONGEST_PAUSE_S)

    def _upload_all(self, folder: Path, names: Sequence[str], save: LocalSave | None = None) -> tuple[SavedFile, ...]:
        """Return the files, each in the bucket. Raises NotUploaded, OSError, ContractError for one that is not."""
        left = [name for name in names if self._known(folder, name) is None]
        started = time.perf_counter()
        with ThreadPoolExecutor(self._workers(), thread_name_prefix="upload") as pool:
            sizes = [file.size_bytes for file in pool.map(lambda name: self._upload(folder, name, save), left)]
        if sum(sizes) >= RATED_BYTES:
            self._bytes_per_s = sum(sizes) / (time.perf_counter() - started)
        return tuple(file for name in names if (file := self._known(folder, name)))

    def _known(self, folder: Path, name: str) -> SavedFile | None:
        """Return the file as it was uploaded, None when it was not, or has been written again since."""
        version, file = self._uploaded.get((folder.name, name), (None, None))
        return file if version == _version(folder / name) else None

    def _workers(self) -> int:
        return self._pace.uploads_doomed if self._doomed() else self._pace.uploads

    def _upload(self, folder: Path, name: str, save: LocalSave | None) -> SavedFile:
        key, path = file_key(self._prefix, folder.name, name), folder / plain_name(name)
        version = _version(path)
        if save is not None and (newer := self._gives_way_to(save)):
            raise NotUploaded(f"replaced by {newer}, for which the time is left")
        digest, size_bytes = sha256_of(path)
        patience_s = self._pace.upload_retry_s if save is not None else 0.0
        give_up_at, longest = self._clock() + patience_s, FIRST_PAUSE_S
        while True:
            try:
                self._bucket.upload(path, key)
                break
            except CLOUD_ERRORS as error:
                code = error_code(error)
                if permanent(error) or self._clock() >= give_up_at or self.loop.closed.is_set():
                    raise NotUploaded(f"{code} at {name}") from error
                self._journal.note("upload_retry", save=folder.name, file=name, error=code)
                self.loop.closed.wait(random.uniform(0, longest))
                longest = min(2 * longest, LONGEST_PAUSE_S)
        file = SavedFile(path=name, size_bytes=size_bytes, sha256=digest, node_rank=self._seats.node_rank)
        self._uploaded[folder.name, name] = (version, file)
        return file

    def _gives_way_to(self, save: LocalSave) -> str | None:
        """Return the newer save that is to have the last seconds of this node, None when this one keeps them."""
        control, number = self._control(), parse_save_name(save.name).number
        newer = [name for name in self._unsettled() if parse_save_name(name).number > number]
        if not newer or not self._doomed() or control.deadline_at is None or self._bytes_per_s is None:
            return None
        left_s = control.deadline_at - self._clock()
        here, there = self._bytes_left(save.folder), self._bytes_left(self._folder / newer[-1])
        return newer[-1] if gives_way(here / self._bytes_per_s, there / self._bytes_per_s, left_s) else None

    def _bytes_left(self, folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.glob(DATA_FILES) if self._known(folder, path.name) is None)

    def _put_part(self, part: Part, save: LocalSave, seen_at: float) -> bool:
        key = part_key(self._prefix, save.name, self._seats.node_rank)
        while not self.loop.closed.is_set():
            try:
                self._bucket.put(key, seal(part)[0])
            except CLOUD_ERRORS as error:
                self._journal.note("part_unput", save=save.name, error=error_code(error))
                if self._clock() > self._due_at(seen_at):
                    return False
                self.loop.closed.wait(RETRY_S)
            else:
                return True
        return False

    def _parts(self, save: str) -> list[Part]:
        """Return the parts put so far that belong to this attempt's roster; each is read once. Raises Damaged."""
        there = self._bucket.keys(file_key(self._prefix, save, f"{PARTS_FOLDER}/"))
        parts = []
        for node_rank in range(self._seats.nodes):
            key = part_key(self._prefix, save, node_rank)
            # A part that is gone again is of a save that the supervisor deletes.
            if key in there and key not in self._known_parts and (stored := self._bucket.get(key)):
                part = open_part(stored.body, job=self._seats.job, save=save, node_rank=node_rank)
                self._known_parts[key] = part
            known = self._known_parts.get(key) if key in there else None
            if known and known.roster_id == self._roster_id:
                parts.append(known)
        return parts

    def _doomed(self) -> bool:
        return self._seats.node_rank in self._control().doomed

    def _due_at(self, seen_at: float) -> float:
        """Doomed nodes have until the notice ends, the others a grace beyond it."""
        deadline_at = self._control().deadline_at
        if deadline_at is None:
            return seen_at + self._pace.save_grace_s
        return deadline_at if self._doomed() else max(deadline_at, seen_at) + self._pace.save_grace_s

    def _unsettled(self) -> list[str]:
        """Return the saves that are complete on this node and have no result yet, oldest first."""
        names = [entry.name for entry in _entries(self._folder) if entry.name not in self._settled]
        ours = [name for name in _saves_of(names, self._seats.attempt) if self._complete(self._folder / name)]
        return sorted(ours, key=lambda name: parse_save_name(name).number)

    def _complete(self, folder: Path) -> bool:
        return all((folder / f"rank-{rank}.json").exists() for rank in self._seats.ranks)

    def _forget_older(self, save: str) -> None:
        number = parse_save_name(save).number
        for entry in _entries(self._folder):
            if entry.name in self._settled and parse_save_name(entry.name).number < number:
                shutil.rmtree(entry, ignore_errors=True)


def gives_way(finish_s: float, newer_s: float, left_s: float) -> bool:
    """Return whether a doomed node drops the save that it uploads: not both can be uploaded, and the newer one can."""
    return finish_s + newer_s > left_s >= newer_s


def local_save(folder: Path, ranks: Sequence[int]) -> LocalSave:
    """Return the save in the folder; each rank has said that its share is complete. Raises ValueError."""
    shares = [share for rank in ranks if (share := read_message(folder / f"rank-{rank}.json", RankSave))]
    if len(shares) < len(ranks):
        raise ContractError(f"{folder.name} lacks a rank's share")
    files = tuple(sorted({name for share in shares for name in share.files}))
    return LocalSave(folder, shares[0], files, next((share.failed for share in shares if share.failed), None))


def _version(path: Path) -> Version:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _saves_of(names: list[str], attempt: int) -> Iterator[str]:
    for name in names:
        try:
            if parse_save_name(name).attempt == attempt:
                yield name
        except ContractError:
            continue


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
