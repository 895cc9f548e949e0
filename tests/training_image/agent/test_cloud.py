"""The agent's use of AWS against moto: conditional writes, strong reads, heartbeats, the queue."""

import json
import time
from decimal import Decimal

import boto3
import pytest
from boto3.dynamodb.types import TypeSerializer
from botocore.exceptions import ClientError
from moto import mock_aws

from agent.cloud import Bucket, OrdersTable, Refused, clients
from agent.heartbeat import Heartbeat
from agent.journal import Journal
from agent.orders import OrdersPoller
from agent.reports import Reporter
from job_contract.orders import Wait, WaitItem, orders_key, roster_key, spec_key, wait_key
from job_contract.reports import Unfit
from job_contract.version import encode


@pytest.fixture
def aws(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        yield clients("us-east-1")


@pytest.fixture
def table(aws):
    key = {"AttributeName": "key"}
    aws.dynamodb.create_table(
        TableName="orders",
        KeySchema=[{**key, "KeyType": "HASH"}],
        AttributeDefinitions=[{**key, "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    return OrdersTable(aws.dynamodb, "orders")


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "events.jsonl")


def put(aws, key, message):
    plain = json.loads(json.dumps({"key": key, **encode(message)}), parse_float=Decimal)
    item = {name: TypeSerializer().serialize(value) for name, value in plain.items()}
    aws.dynamodb.put_item(TableName="orders", Item=item)


def test_the_bucket_refuses_a_second_manifest_and_a_head_that_changed(aws, tmp_path):
    aws.s3.create_bucket(Bucket="bucket")
    bucket = Bucket(aws.s3, "bucket")
    assert bucket.get("manifest") is None
    bucket.put_new("manifest", b"first")
    with pytest.raises(Refused):
        bucket.put_new("manifest", b"second")
    etag = bucket.get("manifest").etag
    bucket.replace("manifest", b"third", etag=etag)
    with pytest.raises(Refused):
        bucket.replace("manifest", b"fourth", etag=etag)
    with pytest.raises(Refused):
        bucket.replace("never", b"fifth", etag=etag)
    assert bucket.get("manifest").body == b"third"
    (tmp_path / "file").write_bytes(b"bytes")
    bucket.upload(tmp_path / "file", "folder/file")
    assert bucket.keys("folder/") == ["folder/file"]
    assert b"".join(bucket.stream("folder/file")) == b"bytes"


def test_orders_come_with_the_spec_and_the_roster_they_name(aws, table, journal, play):
    poller = OrdersPoller(table, play.job, journal, interval_s=lambda: 1.0)
    assert poller.poll() is None
    seen = play.seen("run", 3, deadline_at=12.5)
    put(aws, orders_key(play.job), seen.orders)
    put(aws, spec_key(play.job, "spec-1"), seen.spec)
    assert poller.poll() is None, "the roster is missing"
    put(aws, roster_key(play.job, "roster-1"), seen.roster)
    assert poller.poll() == seen


def test_a_spec_without_a_number_of_ranks_means_one_a_gpu(aws, table, journal, play):
    seen = play.seen("run", 3, spec=play.spec(ranks_per_node=0))
    put(aws, orders_key(play.job), seen.orders)
    put(aws, spec_key(play.job, "spec-1"), seen.spec)
    put(aws, roster_key(play.job, "roster-1"), seen.roster)
    pollers = [OrdersPoller(table, play.job, journal, interval_s=lambda: 1.0, gpus=gpus) for gpus in (0, 8)]
    assert [poller.poll().spec.ranks_per_node for poller in pollers] == [1, 8]


def test_a_heartbeat_reads_a_new_token_after_the_old_one_died(aws, table, journal, play):
    beats = []

    class Sfn:
        def send_task_heartbeat(self, *, taskToken):
            if taskToken == "dead":
                raise ClientError({"Error": {"Code": "TaskTimedOut"}}, "SendTaskHeartbeat")
            beats.append(taskToken)

    heartbeat = Heartbeat(Sfn(), table, play.job, journal, interval_s=10.0)
    assert not heartbeat.beat(1), "no wait item yet"
    wait = WaitItem(job=play.job, attempt=1, wait=Wait.TRAINING, token="dead")
    put(aws, wait_key(play.job, Wait.TRAINING), wait)
    assert not heartbeat.beat(1)
    put(aws, wait_key(play.job, Wait.TRAINING), WaitItem(job=play.job, attempt=1, wait=Wait.TRAINING, token="new"))
    assert heartbeat.beat(1)
    assert not heartbeat.beat(2), "the token is of another attempt"
    assert beats == ["new"]


def test_reports_are_sent_in_order_and_again_after_an_error(aws, journal, play):
    url = aws.sqs.create_queue(QueueName="reports")["QueueUrl"]
    reporter = Reporter(aws.sqs, "https://sqs.us-east-1.amazonaws.com/123456789012/missing", journal)
    for reason in ("first", "second"):
        reporter.say(Unfit(job=play.job, attempt=1, instance="i-0", at=time.time(), reason=reason))
    reporter._round()
    assert not reporter.flush(within_s=0.0)
    reporter._queue_url = url
    reporter._round()
    assert reporter.flush(within_s=0.0)
    messages = boto3.client("sqs", region_name="us-east-1").receive_message(QueueUrl=url, MaxNumberOfMessages=10)
    bodies = [json.loads(message["Body"]) for message in messages["Messages"]]
    assert [body["reason"] for body in bodies] == ["first", "second"]
    assert bodies[0]["kind"] == "unfit"
