"""The stack that the verbs work on: its outputs, read once, and the table and queues that they name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from holdfast.adapters.items import from_item, to_item
from holdfast.adapters.job_table import JobTable
from holdfast.application.reporting import asked_steps
from holdfast.domain.job import Job
from holdfast.domain.ownership import Node
from holdfast_cli.errors import UserError
from job_contract.version import build

OUTPUTS_FILE = "HOLDFAST_OUTPUTS"
CONFIG = Config(connect_timeout=3, read_timeout=20, retries={"mode": "standard", "total_max_attempts": 4})
# A sweep of thousands of machines answers late, and asking again would sweep twice.
SLOW = Config(connect_timeout=3, read_timeout=130, retries={"total_max_attempts": 1})
# What one call of BatchGetItem takes.
BATCH_KEYS = 100


@dataclass(frozen=True, kw_only=True)
class Sight:
    """A job as it can be seen now: its row, the steps it was asked for, the machines of its fleet."""

    job: Job
    steps: int | None = None
    nodes: tuple[Node, ...] = ()

    @property
    def step(self) -> int:
        """The newest step that the row or a node of this attempt knows."""
        return max([self.job.step, *(node.step for node in self.nodes)])


class Stack:
    """One deployed stack, on AWS or on the embedded cloud that AWS_ENDPOINT_URL names."""

    def __init__(self, name: str) -> None:
        self.name = name

    def output(self, key: str) -> str:
        """Return one output of the stack. Raises UserError when the stack has none of that name."""
        value = outputs(self.name).get(key)
        if not value:
            raise UserError(f"stack {self.name!r} has no output {key}; deploy the template of this release")
        return value

    @cached_property
    def table(self) -> JobTable:
        return JobTable(self._dynamodb, jobs=self.output("JobsTableName"), orders=self.output("OrdersTableName"))

    @cached_property
    def _dynamodb(self) -> Any:
        return boto3.client("dynamodb", config=CONFIG)

    def send(self, queue: str, body: str) -> str:
        """The message is on the queue that this output names; returns its id."""
        sqs = boto3.client("sqs", config=CONFIG)
        return str(sqs.send_message(QueueUrl=self.output(queue), MessageBody=body)["MessageId"])

    def invoke(self, function: str, event: Mapping[str, Any]) -> dict[str, Any]:
        """Call the function that this output names and return its answer. Raises UserError when it failed."""
        name = self.output(function)
        answer = boto3.client("lambda", config=SLOW).invoke(FunctionName=name, Payload=json.dumps(event).encode())
        body = json.loads(answer["Payload"].read() or b"null")
        if answer.get("FunctionError") or not isinstance(body, dict):
            why = body.get("errorMessage", "") if isinstance(body, dict) else body
            raise UserError(f"{name} failed: {why}; its log says more")
        return body

    def item(self, pk: str, sk: str) -> dict[str, Any] | None:
        """Return an item of the jobs table as plain data."""
        key = to_item({"pk": pk, "sk": sk})
        found = self._dynamodb.get_item(TableName=self.output("JobsTableName"), Key=key, ConsistentRead=True).get(
            "Item"
        )
        return from_item(found) if found else None

    def put(self, item: Mapping[str, Any]) -> None:
        """The item is in the jobs table."""
        self._dynamodb.put_item(TableName=self.output("JobsTableName"), Item=to_item(item))

    def delete(self, pk: str, sk: str) -> bool:
        """The item is gone; False when there was none."""
        answer = self._dynamodb.delete_item(
            TableName=self.output("JobsTableName"), Key=to_item({"pk": pk, "sk": sk}), ReturnValues="ALL_OLD"
        )
        return bool(answer.get("Attributes"))

    def scan(self, prefix: str) -> list[dict[str, Any]]:
        """Return the items whose partition begins so; reads the whole jobs table for it."""
        pages = self._dynamodb.get_paginator("scan").paginate(
            TableName=self.output("JobsTableName"),
            FilterExpression="begins_with(pk, :prefix)",
            ExpressionAttributeValues=to_item({":prefix": prefix}),
        )
        return [from_item(item) for page in pages for item in page["Items"]]

    def jobs(self, ids: Iterable[str]) -> list[Job]:
        """Return the rows that exist, read strongly."""
        wanted = list(dict.fromkeys(ids))
        rows = [self._batch(wanted[start : start + BATCH_KEYS]) for start in range(0, len(wanted), BATCH_KEYS)]
        return [build(Job, row) for batch in rows for row in batch]

    def see(self, job_id: str) -> Sight | None:
        """Return the job with its progress, None when there is no such job."""
        job = self.table.load(job_id)
        if job is None:
            return None
        fleet = self.table.intent(job.fleet) if job.fleet and job.attempt_open else None
        nodes = self.table.nodes(fleet.instances) if fleet and fleet.instances else []
        mine = tuple(sorted((node for node in nodes if node.attempt == job.attempt), key=lambda node: node.instance))
        return Sight(job=job, steps=asked_steps(self.table.request(job_id)), nodes=mine)

    def _batch(self, ids: list[str]) -> list[dict[str, Any]]:
        name = self.output("JobsTableName")
        keys = [to_item({"pk": f"JOB#{job}", "sk": "ROW"}) for job in ids]
        wanted: Any = {name: {"Keys": keys, "ConsistentRead": True}}
        rows: list[dict[str, Any]] = []
        while wanted:
            answer = self._dynamodb.batch_get_item(RequestItems=wanted)
            rows += [from_item(item) for item in answer["Responses"].get(name, [])]
            wanted = answer.get("UnprocessedKeys")
        return rows


@cache
def outputs(stack: str) -> Mapping[str, str]:
    """Return the outputs of the stack, or of the JSON file that HOLDFAST_OUTPUTS names; once a process."""
    path = os.environ.get(OUTPUTS_FILE)
    return _from_file(Path(path)) if path else _from_cloudformation(stack)


def _from_file(path: Path) -> Mapping[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{OUTPUTS_FILE} names {path}, which cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{OUTPUTS_FILE} names {path}, which must hold one JSON object of output names and values")
    return found


def _from_cloudformation(stack: str) -> Mapping[str, str]:
    client = boto3.client("cloudformation", config=CONFIG)
    try:
        found = client.describe_stacks(StackName=stack)["Stacks"]
    except ClientError as error:
        # CloudFormation has no code of its own for a stack that it does not know.
        if error.response["Error"]["Code"] != "ValidationError":
            raise
        raise UserError(_no_stack(stack, client.meta.region_name)) from error
    if not found:
        raise UserError(_no_stack(stack, client.meta.region_name))
    return {output["OutputKey"]: output["OutputValue"] for output in found[0].get("Outputs", [])}


def _no_stack(stack: str, region: str) -> str:
    return f"there is no stack {stack!r} in {region}; name yours with --stack or HOLDFAST_STACK, or set AWS_REGION"
