"""One stack on moto, with the supervisor's own hand on its rows, for tests of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import boto3
from typer.testing import CliRunner

from holdfast.adapters.job_table import JobTable
from holdfast.domain.events import (
    AllReady,
    AttemptClosed,
    AttemptStarted,
    CheckpointSaved,
    Event,
    FleetBought,
    FleetIntended,
    TrainingFinished,
    TrainingStarted,
)
from holdfast.domain.job import Job
from holdfast.domain.keys import dedup_key
from holdfast.domain.transitions import advance
from holdfast.messages.acceptance import read_acceptance
from holdfast_cli import main
from job_contract.checkpoint_layout import SavePointer

SAMPLE = Path(__file__).parents[2] / "events/job-request.json"
JOB = "tiny-llama-on-the-standard-li-fcea9e2ede"
NODE = "i-0a1b2c3d4e5f60001"
FLEET = f"{JOB}-1-0"
SAVE = SavePointer(save="step-00000025.a0001.s01", manifest_sha256="ab" * 32)
BUCKET = "saves"
LETTERS = ("RequestDeadLetters", "ControlDeadLetters", "NodeReportDeadLetters", "FailedCalls", "RuleDeadLetters")
AT = 1_796_058_005.0
INDEXES = {
    "waiting": ("waiting_team", "waiting_rank"),
    "alive": ("alive_shard", "pk"),
    "ended": ("ended_team", "ended_at"),
}
NUMBERS = {"waiting_rank", "alive_shard", "ended_at"}


class Cloud:
    """Tables and queues of one stack, with the supervisor's own hand on the rows."""

    def __init__(self, folder: Path) -> None:
        self.sqs = boto3.client("sqs")
        dynamodb = boto3.client("dynamodb")
        _create_jobs_table(dynamodb)
        dynamodb.create_table(
            TableName="orders",
            KeySchema=[{"AttributeName": "key", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "key", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
        self.store = JobTable(dynamodb, jobs="jobs", orders="orders")
        self.outputs = {
            "JobsTableName": "jobs",
            "OrdersTableName": "orders",
            "RequestQueueUrl": self.sqs.create_queue(QueueName="requests")["QueueUrl"],
            "ControlQueueUrl": self.sqs.create_queue(QueueName="control")["QueueUrl"],
            "CheckpointBucketName": BUCKET,
            "StateMachineArn": "arn:aws:states:us-east-1:111122223333:stateMachine:mine-run-attempt",
            "SweepFunctionName": "mine-Sweep",
        }
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        for name in (
            "RequestDeadLetters",
            "ControlDeadLetters",
            "NodeReportDeadLetters",
            "FailedCalls",
            "RuleDeadLetters",
        ):
            self.outputs[f"{name}Url"] = self.sqs.create_queue(QueueName=name)["QueueUrl"]
        self.outputs_file = folder / "outputs.json"
        self.outputs_file.write_text(json.dumps(self.outputs))

    def sent(self, queue: str) -> list[dict[str, Any]]:
        answer = self.sqs.receive_message(QueueUrl=self.outputs[queue], MaxNumberOfMessages=10)
        return [json.loads(message["Body"]) for message in answer.get("Messages", [])]

    def accept(self, **changes: Any) -> Job:
        body = json.dumps({**json.loads(SAMPLE.read_text()), **changes})
        order = read_acceptance(body, now=AT)
        assert self.store.create(order.job, order.request, order.spec)
        return order.job

    def happens(self, job_id: str, *events: Event) -> Job:
        for event in events:
            before = self.store.load(job_id)
            assert before is not None
            self.store.save(before, advance(before, event), event, dedup_key(event))
        after = self.store.load(job_id)
        assert after is not None
        return after

    def run(self, job_id: str) -> Job:
        return self.happens(
            job_id,
            AttemptStarted(at=AT + 1, attempt=1),
            FleetIntended(at=AT + 2, attempt=1, fleet=FLEET),
            FleetBought(
                at=AT + 3,
                attempt=1,
                fleet=FLEET,
                instance_type="c7i.large",
                zone="us-east-1a",
                market="spot",
                nodes=2,
                node_usd_h=0.036,
            ),
            AllReady(at=AT + 4, attempt=1, roster_id="r"),
            TrainingStarted(at=AT + 5, attempt=1, step=1),
            CheckpointSaved(at=AT + 30, attempt=1, pointer=SAVE),
        )

    def end(self, job_id: str) -> Job:
        return self.happens(
            job_id,
            TrainingFinished(at=AT + 60, attempt=1, step=120),
            AttemptClosed(at=AT + 61, attempt=1),
        )


def _create_jobs_table(dynamodb: Any) -> None:
    names = {"pk", "sk", *(name for pair in INDEXES.values() for name in pair)}
    dynamodb.create_table(
        TableName="jobs",
        KeySchema=[{"AttributeName": "pk", "KeyType": "HASH"}, {"AttributeName": "sk", "KeyType": "RANGE"}],
        AttributeDefinitions=[
            {"AttributeName": name, "AttributeType": "N" if name in NUMBERS else "S"} for name in sorted(names)
        ],
        GlobalSecondaryIndexes=[
            {
                "IndexName": index,
                "KeySchema": [
                    {"AttributeName": hashed, "KeyType": "HASH"},
                    {"AttributeName": ranged, "KeyType": "RANGE"},
                ],
                "Projection": {"ProjectionType": "KEYS_ONLY"},
            }
            for index, (hashed, ranged) in INDEXES.items()
        ],
        BillingMode="PAY_PER_REQUEST",
    )


def holdfast(*words: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(main.app, list(words), input=stdin)
