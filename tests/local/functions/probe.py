"""Functions that say what reached them: a row each in the table named by PROBE_TABLE."""

import json
import os
import time
import uuid

import boto3

_dynamodb = boto3.client("dynamodb")


class Boom(Exception):
    """The error a test looks for by name."""


def note(topic: str, fact) -> None:
    key = {"topic": {"S": topic}, "at": {"S": f"{time.time():.6f}-{uuid.uuid4().hex[:6]}"}}
    _dynamodb.put_item(TableName=os.environ["PROBE_TABLE"], Item={**key, "fact": {"S": json.dumps(fact)}})


def boom(event, context):
    note("boom", event)
    raise Boom("on purpose")


def echo(event, context):
    note(event.get("detail-type", "echo"), event)
    return event


def token(event, context):
    note(f"token-{event['id']}", event["token"])
    if event.get("fail"):
        raise Boom("the step cannot be done")


def queue(event, context):
    for record in event["Records"]:
        note("queue", {"body": record["body"], "sender": record["attributes"]["SenderId"]})


def stream(event, context):
    names = [record["dynamodb"]["Keys"]["name"]["S"] for record in event["Records"]]
    note("stream", names)
    bad = [
        record["dynamodb"]["SequenceNumber"]
        for record in event["Records"]
        if record["dynamodb"]["Keys"]["name"]["S"].startswith("poison")
    ]
    return {"batchItemFailures": [{"itemIdentifier": number} for number in bad]}


def environment(event, context):
    return {name: os.environ.get(name, "") for name in event["names"]} | {"greeting": _greeting()}


def _greeting():
    from greeting import TEXT

    return TEXT
