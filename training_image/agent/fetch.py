"""Answers the ranks' needs: files of a committed save, each proved by size and sha256 before a rank may see it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agent.cloud import CLOUD_ERRORS, Bucket, Missing, error_code
from agent.files import plain_name, sha256_of
from agent.journal import Journal
from agent.threads import Loop
from job_contract.checkpoint_layout import (
    MANIFEST_FILE,
    Manifest,
    SavedFile,
    SavePointer,
    file_key,
    manifest_key,
    open_manifest,
    parse_save_name,
)
from job_contract.node_files import Needs, Provided, read_message, write_message
from job_contract.reports import FellBack
from job_contract.version import ContractError

# Seconds between looks for a new request of a rank.
LOOK_S = 0.1
RETRY_S = 1.0


class NotAsCommitted(Exception):
    """A file of the save is missing or has other bytes than were committed."""


class Fetch:
    """Serves the requests of one attempt's ranks here. A bucket that does not answer is asked again, not blamed."""

    def __init__(
        self,
        ranks: Iterable[int],
        *,
        job: str,
        prefix: str,
        run_dir: Path,
        local: Iterable[Path],
        bucket: Bucket,
        downloads: int,
        journal: Journal,
    ) -> None:
        self._answered = dict.fromkeys(ranks, 0)
        self._job, self._prefix, self._run_dir = job, prefix, run_dir
        self._local, self._bucket, self._downloads, self._journal = tuple(local), bucket, downloads, journal
        self._manifests: dict[SavePointer, Manifest] = {}
        self._verified: set[tuple[SavePointer, str]] = set()
        self._taken_local: set[str] = set()
        self.loop = Loop("fetch", self._round, journal)

    def _round(self) -> float:
        for rank, answered in self._answered.items():
            needs = read_message(self._run_dir / "needs" / f"rank-{rank}.json", Needs)
            if needs is None or needs.number <= answered:
                continue
            try:
                provided = self.provide(needs)
            except CLOUD_ERRORS as error:
                self._journal.note("fetch_retry", save=needs.save.save, error=error_code(error))
                return RETRY_S
            write_message(self._run_dir / "provided" / f"rank-{rank}.json", provided)
            self._answered[rank] = needs.number
        return LOOK_S

    def provide(self, needs: Needs) -> Provided:
        """Return the answer; what it does not call damaged lies in its folder. Raises CLOUD_ERRORS."""
        try:
            parse_save_name(needs.save.save)
        except ContractError as error:
            damage = FellBack(save=needs.save.save, file=MANIFEST_FILE, reason=str(error))
            return Provided(number=needs.number, folder=str(self._run_dir / "restore"), damaged=(damage,))
        folder = self._run_dir / "restore" / needs.save.save
        folder.mkdir(parents=True, exist_ok=True)
        self._taken_local.clear()
        damaged = self._provide_into(folder, needs)
        for damage in damaged:
            self._journal.note("damaged", save=damage.save, file=damage.file, reason=damage.reason)
        self._journal.note(
            "provided",
            save=needs.save.save,
            files=len(needs.files),
            local=len(self._taken_local),
            damaged=len(damaged),
        )
        return Provided(number=needs.number, folder=str(folder), damaged=damaged)

    def _provide_into(self, folder: Path, needs: Needs) -> tuple[FellBack, ...]:
        try:
            manifest = self._manifest(folder, needs.save)
        except ContractError as error:
            return (FellBack(save=needs.save.save, file=MANIFEST_FILE, reason=str(error)),)
        entries = {file.path: file for file in manifest.files}
        with ThreadPoolExecutor(self._downloads, thread_name_prefix="download") as pool:
            answers = [
                pool.submit(self._provide_file, folder, needs.save, name, entries.get(name)) for name in needs.files
            ]
            return tuple(damage for answer in answers if (damage := answer.result()))

    def _manifest(self, folder: Path, pointer: SavePointer) -> Manifest:
        """Return the proved manifest; it lies in the folder as well. Raises ContractError (Damaged)."""
        if pointer not in self._manifests:
            stored = self._bucket.get(manifest_key(self._prefix, pointer.save))
            if stored is None:
                raise ContractError(f"{MANIFEST_FILE} of {pointer.save} is not in the bucket")
            self._manifests[pointer] = open_manifest(stored.body, job=self._job, pointer=pointer)
            (folder / MANIFEST_FILE).write_bytes(stored.body)
        return self._manifests[pointer]

    def _provide_file(self, folder: Path, pointer: SavePointer, name: str, entry: SavedFile | None) -> FellBack | None:
        """The file lies in the folder, unless the damage that is returned says why not."""
        if (pointer, name) in self._verified:
            return None
        try:
            if entry is None:
                raise NotAsCommitted("the manifest has no such file")
            self._bring(folder / plain_name(name), pointer.save, entry)
        except (NotAsCommitted, ContractError) as error:
            return FellBack(save=pointer.save, file=name, reason=str(error))
        self._verified.add((pointer, name))
        return None

    def _bring(self, target: Path, save: str, entry: SavedFile) -> None:
        if any(_took_local(kept / save / entry.path, target, entry) for kept in self._local):
            self._taken_local.add(entry.path)
            return
        draft = target.with_name(f"{target.name}.part")
        digest, size_bytes = hashlib.sha256(), 0
        try:
            with draft.open("wb") as file:
                for chunk in self._bucket.stream(file_key(self._prefix, save, entry.path)):
                    digest.update(chunk)
                    size_bytes += file.write(chunk)
        except Missing as error:
            draft.unlink()
            raise NotAsCommitted("the bucket has no such file") from error
        if difference := _difference(entry, digest.hexdigest(), size_bytes):
            draft.unlink()
            raise NotAsCommitted(difference)
        draft.replace(target)


def _took_local(source: Path, target: Path, entry: SavedFile) -> bool:
    """Return whether this node's own copy was whole, and is the target now too."""
    try:
        digest, size_bytes = sha256_of(source)
    except OSError:
        return False
    if _difference(entry, digest, size_bytes):
        return False
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
    return True


def _difference(entry: SavedFile, digest: str, size_bytes: int) -> str:
    """Return how the bytes differ from the committed ones, nothing when they don't."""
    if size_bytes != entry.size_bytes:
        return f"{size_bytes} bytes, committed were {entry.size_bytes}"
    if digest != entry.sha256:
        return f"sha256 {digest[:12]}, committed was {entry.sha256[:12]}"
    return ""
