"""`holdfast report`: the page of a run that has ended, from the bucket to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import boto3
import typer
from botocore.exceptions import ClientError

from holdfast.messages.result_message import REPORT_DATA, REPORT_PAGE
from holdfast_cli import show
from holdfast_cli.errors import UserError, told
from holdfast_cli.options import AsJson, JobId, StackName, known
from holdfast_cli.stack import CONFIG, Stack
from job_contract.checkpoint_layout import job_prefix

Out = Annotated[Path | None, typer.Option("--out", help="file to write; JOB.html in this folder when left out")]


@told
def report(job: JobId, out: Out = None, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Bring the report of a run that has ended: loss, speed, attempts, interruptions, saves, cost, on one page."""
    target = Stack(stack)
    row = known(target, job).job
    if not row.over:
        raise UserError(f"{job} is {row.phase.value}; its report is written when it is over: holdfast watch {job}")
    bucket, prefix = target.output("CheckpointBucketName"), job_prefix(row.team, row.id)
    if as_json:
        show.as_json(json.loads(_brought(bucket, f"{prefix}/{REPORT_DATA}")))
        return
    file, body = out or Path(f"{job}.html"), _brought(bucket, f"{prefix}/{REPORT_PAGE}")
    try:
        file.write_bytes(body)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error}; name another file with --out") from error
    print(f"{file}: open it in a browser; --json gives the same to programs")


def _brought(bucket: str, key: str) -> bytes:
    try:
        body: bytes = boto3.client("s3", config=CONFIG).get_object(Bucket=bucket, Key=key)["Body"].read()
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("NoSuchKey", "404"):
            raise
        raise UserError(f"s3://{bucket}/{key} is not there yet; it follows the end of a job within a minute") from error
    return body
