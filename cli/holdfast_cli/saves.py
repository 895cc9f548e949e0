"""`holdfast checkpoints`: what the bucket holds of a job, and whether it can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import boto3
from botocore.exceptions import ClientError

from holdfast.domain.job import Job
from holdfast_cli import show
from holdfast_cli.errors import told
from holdfast_cli.options import AsJson, JobId, StackName, known
from holdfast_cli.stack import CONFIG, Stack
from job_contract.checkpoint_layout import (
    MANIFEST_FILE,
    SAVE_NAME,
    Damaged,
    Head,
    head_key,
    job_prefix,
    manifest_key,
    open_head,
    parse_save_name,
    read_manifest,
)
from job_contract.version import ContractError

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
