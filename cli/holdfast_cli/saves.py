"""`holdfast checkpoints` and `holdfast verify`: what the bucket holds of a job, and whether it can be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import boto3
import typer
from botocore.exceptions import ClientError

from holdfast.domain.job import Job
from holdfast_cli import show
from holdfast_cli.errors import UserError, told
from holdfast_cli.options import AsJson, JobId, StackName, known
from holdfast_cli.stack import CONFIG, Stack
from job_contract.checkpoint_layout import (
    MANIFEST_FILE,
    SAVE_NAME,
    Damaged,
    Head,
    file_key,
    head_key,
    job_prefix,
    manifest_key,
    open_head,
    parse_save_name,
    read_manifest,
)
from job_contract.verification import Damage, Folder, verify
from job_contract.version import ContractError

CHUNK = 1 << 20
EXIT_DAMAGED = 1
UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


@told
def checkpoints(job: JobId, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """List a job's saves: step, size, whether each is committed and its manifest agrees with itself and the files."""
    target = Stack(stack)
    row = known(target, job).job
    saves = saves_of(boto3.client("s3", config=CONFIG), target.output("CheckpointBucketName"), row)
    if as_json:
        show.as_json(saves)
    elif not saves:
        print(f"{job} has no saves yet")
    else:
        show.table(("SAVE", "STEP", "ATTEMPT", "COMMITTED", "SIZE", "MANIFEST", "HEAD"), [_row(save) for save in saves])


@told
def verify_save(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="The job's id, as submit printed it.")] = None,
    save: Annotated[str | None, typer.Argument(metavar="SAVE", help="One save; else the newest one.")] = None,
    folder: Annotated[Path | None, typer.Option(help="A copy of a save's folder instead of the bucket.")] = None,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Read a save whole and prove it: head, manifest, parts, and size and sha256 of every file.

    Exit code 0 when every byte is the committed one, 1 when not, with each damaged file and the reason.
    """
    if folder is not None:
        if job is not None or save is not None:
            raise UserError("give JOB and SAVE, or --folder, not both: a folder says itself whose save it is")
        name, damages = _verified_folder(folder)
    elif job is None:
        raise UserError("which save? give a JOB, or --folder with a copy of a save")
    else:
        name, damages = _verified(Stack(stack), job, save)
    if as_json:
        files = [{"file": damage.file, "reason": damage.reason} for damage in damages]
        show.as_json({"save": name, "ok": not damages, "damaged": files})
    else:
        for damage in damages:
            print(f"{name}: {damage.file}: {damage.reason}")
        if not damages:
            print(f"{name}: ok")
    if damages:
        raise typer.Exit(EXIT_DAMAGED)


def _verified(target: Stack, job: str, save: str | None) -> tuple[str, list[Damage]]:
    row = known(target, job).job
    client, bucket = boto3.client("s3", config=CONFIG), target.output("CheckpointBucketName")
    prefix = job_prefix(row.team, row.id)
    head = _Objects(client, bucket, prefix).chunks(head_key(prefix).removeprefix(f"{prefix}/"))
    raw = b"".join(head) if head is not None else None
    name = save or _newest(raw, row)
    try:
        parse_save_name(name)
    except ContractError as error:
        raise UserError(f"{error}; `holdfast checkpoints {job}` lists them") from error
    files = _Objects(client, bucket, file_key(prefix, name, "").removesuffix("/"))
    return name, verify(files, job=row.id, save=name, head=raw)


def _newest(head: bytes | None, job: Job) -> str:
    """Return the save that the head names; the row's where the head cannot be read, so that it is named as damaged."""
    try:
        pointer = open_head(head or b"", job=job.id).pointer
        name = pointer.save if pointer else None
    except ContractError:
        name = job.saved.save if job.saved else None
    if name is None:
        raise UserError(f"{job.id} has no committed save yet")
    return name


def _verified_folder(folder: Path) -> tuple[str, list[Damage]]:
    raw = Folder(folder).chunks(MANIFEST_FILE)
    if raw is None:
        raise UserError(f"{folder} holds no {MANIFEST_FILE}: it is no copy of a committed save")
    try:
        manifest = read_manifest(b"".join(raw))
    except ContractError as error:
        return folder.name, [Damage(MANIFEST_FILE, str(error))]
    return manifest.save, verify(Folder(folder), job=manifest.job, save=manifest.save)


class _Objects:
    """The objects under a prefix, as verification.Files."""

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self._client, self._bucket, self._prefix = client, bucket, prefix

    def chunks(self, path: str) -> Iterable[bytes] | None:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=f"{self._prefix}/{path}")
        except ClientError as error:
            if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
                return None
            raise
        return iter(lambda: answer["Body"].read(CHUNK), b"")


def saves_of(client: Any, bucket: str, job: Job) -> list[dict[str, Any]]:
    """Return the saves of the job, oldest first. Manifests are read; of the files only the sizes are looked at."""
    prefix = job_prefix(job.team, job.id)
    sizes = _sizes(client, bucket, f"{prefix}/saves/")
    head = _head(client, bucket, prefix, job)
    names = sorted(sizes, key=lambda name: (parse_save_name(name).attempt, parse_save_name(name).number))
    return [_save(client, bucket, prefix, job, name, sizes[name], head) for name in names]


def _save(
    client: Any, bucket: str, prefix: str, job: Job, name: str, files: Mapping[str, int], head: Head | None
) -> dict[str, Any]:
    committed = MANIFEST_FILE in files
    manifest = _judged(client, bucket, manifest_key(prefix, name), job, name, files) if committed else "none"
    pointers = {head.save: "newest", head.parent.save if head.parent else "": "parent"} if head else {}
    return {
        "save": name,
        "step": parse_save_name(name).step,
        "attempt": parse_save_name(name).attempt,
        "committed": committed,
        "size_bytes": sum(files.values()),
        "manifest": manifest,
        "head": pointers.get(name, ""),
    }


def _judged(client: Any, bucket: str, key: str, job: Job, name: str, files: Mapping[str, int]) -> str:
    """Return `ok`, or what is wrong with the manifest, or with the files that it names."""
    try:
        manifest = read_manifest(_read(client, bucket, key))
    except (Damaged, ContractError) as error:
        return str(error)
    if (manifest.job, manifest.save) != (job.id, name):
        return f"belongs to {manifest.job}, {manifest.save}"
    for file in manifest.files:
        if file.path not in files:
            return f"{file.path} is missing"
        if files[file.path] != file.size_bytes:
            return f"{file.path} has {files[file.path]} bytes, committed were {file.size_bytes}"
    return "ok"


def _sizes(client: Any, bucket: str, prefix: str) -> dict[str, dict[str, int]]:
    """Return file sizes by save name and path inside the save."""
    found: dict[str, dict[str, int]] = {}
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", []):
            name, _, path = item["Key"].removeprefix(prefix).partition("/")
            if SAVE_NAME.fullmatch(name) and path:
                found.setdefault(name, {})[path] = item["Size"]
    return found


def _head(client: Any, bucket: str, prefix: str, job: Job) -> Head | None:
    try:
        return open_head(_read(client, bucket, head_key(prefix)), job=job.id)
    except (Damaged, ContractError):
        return None
    except ClientError as error:
        if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
            return None
        raise


def _read(client: Any, bucket: str, key: str) -> bytes:
    return bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())


def _row(save: dict[str, Any]) -> tuple[str, ...]:
    return (
        save["save"],
        str(save["step"]),
        str(save["attempt"]),
        "yes" if save["committed"] else "no",
        size(save["size_bytes"]),
        save["manifest"],
        save["head"],
    )


def size(number: int) -> str:
    unit, name = next(((unit, name) for unit, name in UNITS if number >= unit), UNITS[-1])
    return f"{number / unit:.1f} {name}" if unit > 1 else f"{number} {name}"
