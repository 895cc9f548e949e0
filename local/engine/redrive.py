"""What a person does with a dead-letter queue: list the queues it serves, move its messages back."""

import time

from ministack.core import responses
from ministack.services import sqs as stock

NEEDS = {
    "ministack.services.sqs": ("_HANDLERS", "_queues", "_get_q", "_queue_by_arn", "_Err"),
    "ministack.core.responses": ("new_uuid",),
}


def apply() -> None:
    """The three actions exist. A move is complete when its start is answered."""
    moves: dict[str, list[dict]] = {}
    stock._HANDLERS["StartMessageMoveTask"] = lambda data, url: _start(data, moves)
    stock._HANDLERS["ListMessageMoveTasks"] = lambda data, url: _list(data, moves)
    stock._HANDLERS["ListDeadLetterSourceQueues"] = lambda data, url: _sources(data.get("QueueUrl", url))


def _start(data: dict, moves: dict[str, list[dict]]) -> dict:
    source_arn = data["SourceArn"]
    source = stock._queue_by_arn(source_arn)
    if source is None:
        message = "The resource that you specified for the SourceArn parameter doesn't exist."
        raise stock._Err("ResourceNotFoundException", message, 404)
    now, moved = time.time(), 0
    for message in [one for one in source["messages"] if one["visible_at"] <= now]:
        target = _target(message, source_arn, data.get("DestinationArn"))
        if target is not None:
            source["messages"].remove(message)
            message.update(receive_count=0, first_receive_at=None, receipt_handle=None, visible_at=now)
            message["sys"].pop("DeadLetterQueueSourceArn", None)
            target["messages"].append(message)
            moved += 1
    task = {
        "TaskHandle": responses.new_uuid(),
        "Status": "COMPLETED",
        "SourceArn": source_arn,
        "ApproximateNumberOfMessagesMoved": moved,
        "ApproximateNumberOfMessagesToMove": moved,
        "StartedTimestamp": int(now * 1000),
    }
    moves.setdefault(source_arn, []).insert(0, task)
    return {"TaskHandle": task["TaskHandle"]}


def _target(message: dict, source_arn: str, destination_arn: str | None) -> dict | None:
    """The named queue, else the one the message came from, else one that sends its dead letters here."""
    if destination_arn:
        return stock._queue_by_arn(destination_arn)
    origin = stock._queue_by_arn(message["sys"].get("DeadLetterQueueSourceArn", ""))
    return origin or next(iter(_served(source_arn)), None)


def _list(data: dict, moves: dict[str, list[dict]]) -> dict:
    return {"Results": moves.get(data["SourceArn"], [])[: data.get("MaxResults", 1)]}


def _sources(url: str) -> dict:
    return {"queueUrls": [queue["url"] for queue in _served(stock._get_q(url)["attributes"]["QueueArn"])]}


def _served(arn: str) -> list[dict]:
    return [queue for queue in list(stock._queues.values()) if arn in queue["attributes"].get("RedrivePolicy", "")]
