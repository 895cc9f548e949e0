"""`holdfast dlq`: what failed and waits for a person, in five queues."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import boto3
import typer

from holdfast_cli import show
from holdfast_cli.errors import UserError, told
from holdfast_cli.options import AsJson, StackName
from holdfast_cli.stack import CONFIG, Stack

BATCH = 10
# Long enough to answer for one batch, short enough that the next look sees the messages again.
LOOK_S = 30


@dataclass(frozen=True)
class Letters:
    """One queue of failures. `source` is the output of the queue that its messages came from, where there is one."""

    output: str
    source: str | None
    holds: str


QUEUES = {
    "requests": Letters("RequestDeadLettersUrl", "RequestQueueUrl", "requests that could not be taken in"),
    "control": Letters("ControlDeadLettersUrl", "ControlQueueUrl", "wishes that could not be obeyed"),
    "reports": Letters("NodeReportDeadLettersUrl", "NodeReportQueueUrl", "reports that could not be recorded"),
    "calls": Letters("FailedCallsUrl", None, "events and stream batches that failed in their function"),
    "rules": Letters("RuleDeadLettersUrl", None, "events that did not reach their target"),
}

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help=f"One of {', '.join(QUEUES)}.")]
Message = Annotated[str | None, typer.Option("--id", help="Only the message of this id, as show prints it.")]

dlq = typer.Typer(name="dlq", help="Look at what failed, send it again, or drop it.", no_args_is_help=True)


@dlq.command("list")
@told
def list_queues(as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Show how many messages wait in each queue of failures."""
    target = Stack(stack)
    counts = {name: _count(target.output(letters.output)) for name, letters in QUEUES.items()}
    if as_json:
        show.as_json(counts)
    else:
        show.table(("QUEUE", "MESSAGES", "HOLDS"), [(name, str(counts[name]), QUEUES[name].holds) for name in QUEUES])


@dlq.command("show")
@told
def show_messages(
    queue: Queue,
    most: Annotated[int, typer.Option("--most", min=1, max=100, help="Show at most so many.")] = 10,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Print messages of a queue; they stay where they are, and are hidden from others for half a minute."""
    url = Stack(stack).output(_letters(queue).output)
    found = [_told(message) for message in _messages(url, most)]
    if as_json:
        return show.as_json(found)
    for message in found:
        print(show.clean(f"{message['id']}  sent {show.clock_time(message['sent_at'])} UTC  {message['why']}".rstrip()))
        print(show.clean(f"  {message['body']}"))
    if not found:
        print(f"nothing to see in {queue}")
    return None


@dlq.command()
@told
def replay(queue: Queue, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Send the messages of a queue to where they came from again. Doing so twice does no harm: repeats are known."""
    target, letters = Stack(stack), _letters(queue)
    url = target.output(letters.output)
    if letters.source is not None:
        task = _sqs().start_message_move_task(SourceArn=_arn(url), MaxNumberOfMessagesPerSecond=10)
        told_of: dict[str, Any] = {"queue": queue, "task": task["TaskHandle"]}
        sentence = f"the messages of {queue} move back, ten a second; `holdfast dlq list` shows the rest"
    else:
        sent, kept = _replay_calls(url, queue)
        told_of = {"queue": queue, "sent": sent, "kept": kept}
        sentence = f"{sent} sent again" + (f"; {kept} kept: they carry no event, drop them" if kept else "")
    if as_json:
        show.as_json(told_of)
    else:
        print(sentence)


@dlq.command()
@told
def drop(
    queue: Queue,
    message: Message = None,
    everything: Annotated[bool, typer.Option("--all", help="All messages of the queue.")] = False,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Delete one message of a queue, or all of them. There is no way back."""
    if (message is None) is not everything:
        raise UserError("say which: --id ID for one message (as `holdfast dlq show` prints it), or --all")
    url = Stack(stack).output(_letters(queue).output)
    dropped = 0
    for found in _messages(url, None):
        if everything or found["MessageId"] == message:
            _sqs().delete_message(QueueUrl=url, ReceiptHandle=found["ReceiptHandle"])
            dropped += 1
    if not dropped and message is not None:
        raise UserError(f"{queue} has no message {message} in sight; look again in {LOOK_S} s with `holdfast dlq show`")
    if as_json:
        show.as_json({"queue": queue, "dropped": dropped})
    else:
        print(f"{dropped} dropped")


def _letters(queue: str) -> Letters:
    if queue not in QUEUES:
        raise UserError(f"there is no queue {queue!r}; name one of {', '.join(QUEUES)}")
    return QUEUES[queue]


def _sqs() -> Any:
    return boto3.client("sqs", config=CONFIG)


def _count(url: str) -> int:
    wanted = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    attributes = _sqs().get_queue_attributes(QueueUrl=url, AttributeNames=wanted)["Attributes"]
    return sum(int(value) for value in attributes.values())


def _arn(url: str) -> str:
    answer = _sqs().get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
    return str(answer["Attributes"]["QueueArn"])


def _messages(url: str, most: int | None) -> Iterable[Mapping[str, Any]]:
    """Return messages, each once; a short poll may miss some, so it ends with the first empty answer of a long one."""
    seen: set[str] = set()
    while most is None or len(seen) < most:
        answer = _sqs().receive_message(
            QueueUrl=url,
            MaxNumberOfMessages=BATCH if most is None else min(BATCH, most - len(seen)),
            VisibilityTimeout=LOOK_S,
            WaitTimeSeconds=1,
            AttributeNames=["SentTimestamp"],
            MessageAttributeNames=["All"],
        )
        new = [message for message in answer.get("Messages", []) if message["MessageId"] not in seen]
        if not new:
            return
        seen.update(message["MessageId"] for message in new)
        yield from new


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    attributes = {name: one.get("StringValue", "") for name, one in message.get("MessageAttributes", {}).items()}
    why = " ".join(attributes[name] for name in ("ERROR_CODE", "ERROR_MESSAGE", "RULE_ARN") if name in attributes)
    return {
        "id": message["MessageId"],
        "sent_at": int(message["Attributes"]["SentTimestamp"]) / 1000,
        "why": why or _why(message["Body"]),
        "body": message["Body"],
    }


def _why(body: str) -> str:
    """Return which function failed and how, from what Lambda writes beside a failed call."""
    context = _call(body).get("requestContext", {})
    error = _call(body).get("responsePayload") or {}
    function = str(context.get("functionArn", "")).rsplit(":function:", 1)[-1]
    return " ".join(filter(None, (function, str(context.get("condition", "")), str(error.get("errorMessage", "")))))


def _call(body: str) -> dict[str, Any]:
    try:
        call = json.loads(body)
    except ValueError:
        return {}
    return call if isinstance(call, dict) else {}


def _replay_calls(url: str, queue: str) -> tuple[int, int]:
    """Call each function again with its event; return how many were sent, and how many carry none."""
    sent, kept = 0, 0
    for message in _messages(url, None):
        function, event = _target(message, queue)
        if function is None or event is None:
            kept += 1
            continue
        if ":sqs:" in function:
            sqs = _sqs()
            name = function.rsplit(":", 1)[-1]
            sqs.send_message(QueueUrl=sqs.get_queue_url(QueueName=name)["QueueUrl"], MessageBody=event)
        else:
            client = boto3.client("lambda", config=CONFIG)
            client.invoke(FunctionName=function, InvocationType="Event", Payload=event.encode())
        _sqs().delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        sent += 1
    return sent, kept


def _target(message: Mapping[str, Any], queue: str) -> tuple[str | None, str | None]:
    if queue == "rules":
        attributes = message.get("MessageAttributes", {})
        return attributes.get("TARGET_ARN", {}).get("StringValue"), message["Body"]
    call = _call(message["Body"])
    # A stream batch names shard and sequence numbers only.
    event = call.get("requestPayload")
    return call.get("requestContext", {}).get("functionArn"), json.dumps(event) if event is not None else None
