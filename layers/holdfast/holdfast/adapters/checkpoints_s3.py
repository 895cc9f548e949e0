"""Keeps ports.Checkpoints on S3: the head of a job is the fence between its attempts."""

from __future__ import annotations

from typing import Any

from botocore.exceptions import ClientError

from holdfast.adapters.aws_errors import NO_SUCH_KEY, OBJECT_CONFLICT, PRECONDITION, code_of
from holdfast.domain.checkpoints import contradicts, of_an_older_life
from holdfast.domain.errors import IdentityReused, IllegalTransition, Unavailable
from holdfast.domain.job import Job
from job_contract.checkpoint_layout import (
    PARTS_FOLDER,
    SAVE_NAME,
    Head,
    Manifest,
    SavePointer,
    file_key,
    head_key,
    manifest_key,
    open_head,
    open_manifest,
    parse_save_name,
    read_manifest,
    seal,
)
from job_contract.version import ContractError

TRIES = 8
"""A commit of the older attempt may slip in between the read and the write a few times, never for ever."""


MOST_ANCESTORS = 200
"""`keep` is at most 100, and a save whose last step was not finite is never committed by our trainer."""

KEYS_A_CALL = 1000
"""What DeleteObjects takes (S3 API reference)."""


class S3Checkpoints:
    def __init__(self, client: Any, *, bucket: str) -> None:
        self.client, self.bucket = client, bucket

    def take_over(self, prefix: str, job: Job, attempt: int) -> Head:
        key = head_key(prefix)
        for _ in range(TRIES):
            head, etag = self._read(key, job)
            if head is not None and of_an_older_life(head, job, attempt):
                raise IdentityReused(job.id)
            if head is not None and contradicts(head, job):
                head = None
            if head is not None and head.attempt == attempt:
                return head
            if head is not None and head.attempt > attempt:
                raise IllegalTransition(f"head of {job.id} is at attempt {head.attempt}, past {attempt}")
            taken = _for_attempt(head, job, attempt)
            if self._write(key, taken, etag):
                return taken
        raise Unavailable(f"head of {job.id} changed {TRIES} times while attempt {attempt} took it over")

    def pointer(self, prefix: str, job: Job, save: str) -> SavePointer | None:
        parse_save_name(save)
        try:
            raw = self.client.get_object(Bucket=self.bucket, Key=manifest_key(prefix, save))["Body"].read()
        except ClientError as error:
            if code_of(error) in NO_SUCH_KEY:
                return None
            raise
        try:
            manifest = read_manifest(raw)
        except ContractError:
            return None
        if (manifest.job, manifest.save) != (job.id, save) or manifest.sha256 is None:
            return None
        return SavePointer(save=save, manifest_sha256=manifest.sha256)

    def saves(self, prefix: str) -> list[str]:
        folder = f"{prefix}/saves/"
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=folder, Delimiter="/")
        names = [item["Prefix"].removeprefix(folder)[:-1] for page in pages for item in page.get("CommonPrefixes", ())]
        return [name for name in names if SAVE_NAME.fullmatch(name)]

    def lineage(self, prefix: str, job: Job, most: int) -> list[Manifest]:
        head, _ = self._read(head_key(prefix), job)
        pointer, line = head.pointer if head else None, []
        while pointer is not None and len(line) < MOST_ANCESTORS:
            manifest = self._manifest(prefix, job, pointer)
            if manifest is None:
                break
            line.append(manifest)
            if sum(bool(one.facts.get("finite", True)) for one in line) >= most:
                break
            pointer = manifest.parent
        return line

    def forget(self, prefix: str, save: str) -> None:
        parse_save_name(save)
        folder = file_key(prefix, save, "")
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=folder)
        keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
        parts = [key for key in keys if key.startswith(f"{folder}{PARTS_FOLDER}/")]
        manifest = [key for key in keys if key == manifest_key(prefix, save)]
        # Without its parts no node commits it again, without its manifest it is no save; only then do its bytes go.
        for step in (parts, manifest, [key for key in keys if key not in {*parts, *manifest}]):
            self._delete(step)

    def _delete(self, keys: list[str]) -> None:
        for at in range(0, len(keys), KEYS_A_CALL):
            answer = self.client.delete_objects(
                Bucket=self.bucket,
                Delete={"Objects": [{"Key": key} for key in keys[at : at + KEYS_A_CALL]], "Quiet": True},
            )
            if errors := answer.get("Errors"):
                raise Unavailable(f"{errors[0]['Key']} cannot be deleted: {errors[0]['Code']}")

    def _manifest(self, prefix: str, job: Job, pointer: SavePointer) -> Manifest | None:
        try:
            raw = self.client.get_object(Bucket=self.bucket, Key=manifest_key(prefix, pointer.save))["Body"].read()
            return open_manifest(raw, job=job.id, pointer=pointer)
        except ContractError:
            return None
        except ClientError as error:
            if code_of(error) in NO_SUCH_KEY:
                return None
            raise

    def _read(self, key: str, job: Job) -> tuple[Head | None, str | None]:
        try:
            answer = self.client.get_object(Bucket=self.bucket, Key=key)
        except ClientError as error:
            if code_of(error) in NO_SUCH_KEY:
                return None, None
            raise
        try:
            return open_head(answer["Body"].read(), job=job.id), answer["ETag"]
        except ContractError:
            # The row remembers the newest save that was reported committed: the head is written anew from it.
            return None, answer["ETag"]

    def _write(self, key: str, head: Head, etag: str | None) -> bool:
        condition = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
        try:
            self.client.put_object(
                Bucket=self.bucket, Key=key, Body=seal(head)[0], ContentType="application/json", **condition
            )
        except ClientError as error:
            if code_of(error) in PRECONDITION | OBJECT_CONFLICT | NO_SUCH_KEY:
                return False
            raise
        return True


def _for_attempt(head: Head | None, job: Job, attempt: int) -> Head:
    if job.retry_from is not None and (head is None or head.branch < job.branch):
        start = job.retry_from
        return Head(
            job=job.id,
            attempt=attempt,
            branch=job.branch,
            step=start.step,
            save=start.save,
            manifest_sha256=start.manifest_sha256,
        )
    if head is not None:
        return Head(
            job=job.id,
            attempt=attempt,
            branch=max(head.branch, job.branch),
            step=head.step,
            save=head.save,
            manifest_sha256=head.manifest_sha256,
            parent=head.parent,
        )
    if job.saved is None:
        return Head(job=job.id, attempt=attempt)
    return Head(
        job=job.id,
        attempt=attempt,
        step=parse_save_name(job.saved.save).step,
        save=job.saved.save,
        manifest_sha256=job.saved.manifest_sha256,
        parent=job.saved.parent,
    )
