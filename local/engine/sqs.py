"""A queue names its sender as AWS does (ROLEID:instance for a node), in messages and in the events made of them.
Reports of chosen kinds can be lost on the way, while the sender is told they arrived."""

import contextvars
import hashlib
import json
import re
from collections.abc import Callable

from ministack.core import responses, router
from ministack.services import lambda_svc
from ministack.services import sqs as stock

NEEDS = {
    "ministack.services.sqs": ("_HANDLERS", "handle_request", "_get_q", "_queue_by_arn"),
    "ministack.services.lambda_svc": ("_execute_function",),
    "ministack.core.router": ("extract_access_key_id",),
}

ROLE_ID = "AROAHOLDFASTNODE"
_INSTANCE_KEY = re.compile(r"i-[0-9a-f]{17}")
_caller: contextvars.ContextVar[str] = contextvars.ContextVar("caller", default="")


def apply(muted_kinds: set[str]) -> None:
    """Senders are named; bodies whose JSON `kind` is in `muted_kinds` (which may change later) get lost."""
    stock.handle_request = _remembering(stock.handle_request)
    send, send_batch = stock._HANDLERS["SendMessage"], stock._HANDLERS["SendMessageBatch"]
    stock._HANDLERS["SendMessage"] = lambda data, url: _send(send, muted_kinds, data, url)
    stock._HANDLERS["SendMessageBatch"] = lambda data, url: _send_batch(send_batch, muted_kinds, data, url)
    lambda_svc._execute_function = _named(lambda_svc._execute_function)


def _remembering(handle: Callable) -> Callable:
    async def handle_request(method, path, headers, body, query_params):
        _caller.set(router.extract_access_key_id(headers, query_params))
        return await handle(method, path, headers, body, query_params)

    return handle_request


def _send(send: Callable, muted: set[str], data: dict, url: str) -> dict:
    if _kind(data.get("MessageBody", "")) in muted:
        return _lost(data["MessageBody"])
    answer = send(data, url)
    _name_sender(data.get("QueueUrl", url), {answer["MessageId"]})
    return answer


def _send_batch(send_batch: Callable, muted: set[str], data: dict, url: str) -> dict:
    entries = data.get("Entries", [])
    lost = [one for one in entries if _kind(one.get("MessageBody", "")) in muted]
    kept = [one for one in entries if one not in lost]
    answer = send_batch({**data, "Entries": kept}, url) if kept or not lost else {"Successful": [], "Failed": []}
    _name_sender(data.get("QueueUrl", url), {one["MessageId"] for one in answer.get("Successful", [])})
    answer["Successful"] = answer.get("Successful", []) + [
        {"Id": one["Id"], **_lost(one["MessageBody"])} for one in lost
    ]
    return answer


def _kind(body: str) -> str | None:
    try:
        message = json.loads(body)
    except ValueError:
        return None
    return message.get("kind") if isinstance(message, dict) else None


def _lost(body: str) -> dict:
    return {"MessageId": responses.new_uuid(), "MD5OfMessageBody": hashlib.md5(body.encode()).hexdigest()}


def _name_sender(url: str, message_ids: set[str]) -> None:
    if _INSTANCE_KEY.fullmatch(_caller.get()):
        for message in stock._get_q(url)["messages"]:
            if message["id"] in message_ids:
                message["sys"]["SenderId"] = f"{ROLE_ID}:{_caller.get()}"


def _named(execute: Callable) -> Callable:
    """The event source writes the account as SenderId whatever the message says; the message is asked again."""

    def execute_function(func: dict, event: dict) -> dict:
        records = event.get("Records") if isinstance(event, dict) else None
        if records and records[0].get("eventSource") == "aws:sqs":
            queue = stock._queue_by_arn(records[0]["eventSourceARN"]) or {"messages": []}
            senders = {message["id"]: message["sys"].get("SenderId") for message in list(queue["messages"])}
            for record in records:
                sender = senders.get(record["messageId"])
                record["attributes"]["SenderId"] = sender or record["attributes"]["SenderId"]
        return execute(func, event)

    return execute_function
