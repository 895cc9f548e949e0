"""The commit of a save: manifest with If-None-Match, then head with If-Match. Every agent of the attempt may do it.

The manifest's bytes are the same from every committer, so it does not matter whose arrives first.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from agent.cloud import Bucket, Conflict, Refused
from agent.journal import Journal
from job_contract.checkpoint_layout import (
    Damaged,
    Head,
    Manifest,
    Part,
    SavePointer,
    head_key,
    manifest_key,
    open_head,
    parse_save_name,
    read_manifest,
    seal,
)
from job_contract.node_files import RankSave
from job_contract.version import ContractError

# Tries after 409; S3 settles such a conflict as soon as the other write is through.
CONFLICT_TRIES = 40


class Fenced(Exception):
    """The head belongs to a later attempt; this one may write nothing more."""


class HeadUnreadable(Exception):
    """There is no head, or not a whole one; the supervisor writes it anew."""


@dataclass(frozen=True)
class Committed:
    """A manifest as it stands in the bucket, and its digest."""

    manifest: Manifest
    sha256: str

    @property
    def pointer(self) -> SavePointer:
        return SavePointer(save=self.manifest.save, manifest_sha256=self.sha256)


class Committer:
    """Commits the saves of one attempt. Every method raises CLOUD_ERRORS; Damaged, HeadUnreadable where it reads."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        prefix: str,
        job: str,
        attempt: int,
        journal: Journal,
        pause: Callable[[float], Any] = time.sleep,
    ) -> None:
        self._bucket, self._prefix, self._job, self._attempt = bucket, prefix, job, attempt
        self._journal, self._pause = journal, pause

    def find(self, save: str) -> Committed | None:
        """Return the save's manifest, None when it is not committed."""
        stored = self._bucket.get(manifest_key(self._prefix, save))
        if stored is None:
            return None
        manifest = read_manifest(stored.body)
        if (manifest.job, manifest.save) != (self._job, save):
            raise Damaged(f"manifest of {save} belongs to job {manifest.job}, save {manifest.save}")
        return Committed(manifest, str(manifest.sha256))

    def commit(self, save: RankSave, parts: Iterable[Part]) -> Committed:
        """The save's manifest exists. Raises Fenced before anything is written."""
        head, _ = self._head()
        manifest = self._manifest(save, parts, head)
        body, digest = seal(manifest)
        try:
            self._patiently(lambda: self._bucket.put_new(manifest_key(self._prefix, save.save), body))
        except Refused:
            found = self.find(save.save)
            if found is None:
                raise
            return found
        self._journal.note("manifest_put", save=save.save, attempt=self._attempt, sha256=digest)
        return Committed(manifest, digest)

    def move_head(self, committed: Committed) -> None:
        """The head names this save or a later one of this attempt. Raises Fenced."""
        while True:
            head, etag = self._head()
            if self._at_or_past(head, committed.manifest.save):
                return
            body, _ = seal(self._head_for(committed, head))
            try:
                self._patiently(lambda: self._bucket.replace(head_key(self._prefix), body, etag=etag))  # noqa: B023
            except Refused:
                continue
            self._journal.note("head_put", save=committed.manifest.save, attempt=self._attempt)
            return

    def _head(self) -> tuple[Head, str]:
        stored = self._bucket.get(head_key(self._prefix))
        if stored is None:
            raise HeadUnreadable(f"{head_key(self._prefix)} is missing; the supervisor creates it before the fleet")
        try:
            head = open_head(stored.body, job=self._job)
        except ContractError as error:
            raise HeadUnreadable(str(error)) from error
        if head.attempt > self._attempt:
            raise Fenced(f"the head belongs to attempt {head.attempt}, this is attempt {self._attempt}")
        return head, stored.etag

    def _manifest(self, save: RankSave, parts: Iterable[Part], head: Head) -> Manifest:
        made_here = head.pointer is not None and parse_save_name(head.pointer.save).attempt == self._attempt
        return Manifest(
            job=self._job,
            attempt=self._attempt,
            step=save.step,
            save=save.save,
            world_size=save.world_size,
            mesh=save.mesh,
            config_hash=save.config_hash,
            corpus_digest=save.corpus_digest,
            versions=save.versions,
            facts=save.facts,
            files=tuple(sorted((file for part in parts for file in part.files), key=lambda file: file.path)),
            final=save.final,
            answers_generation=save.answers_generation,
            parent=head.pointer if made_here else save.restored,
        )

    def _head_for(self, committed: Committed, head: Head) -> Head:
        return Head(
            job=self._job,
            attempt=self._attempt,
            branch=head.branch,
            step=committed.manifest.step,
            save=committed.manifest.save,
            manifest_sha256=committed.sha256,
            parent=committed.manifest.parent,
        )

    def _at_or_past(self, head: Head, save: str) -> bool:
        if head.save is None:
            return False
        there, here = parse_save_name(head.save), parse_save_name(save)
        return there.attempt == here.attempt and there.number >= here.number

    def _patiently(self, write: Callable[[], None]) -> None:
        for _ in range(CONFLICT_TRIES):
            try:
                return write()
            except Conflict:
                self._pause(random.uniform(0.05, 0.25))
        return write()
