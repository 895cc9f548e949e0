"""Keeps ports.Outbox: our bus, and the FIFO result queue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.domain.errors import Unavailable

SOURCE = "holdfast"


class AwsOutbox:
    def __init__(self, events: Any, sqs: Any, *, bus: str, result_queue_url: str) -> None:
        self.events, self.sqs, self.bus, self.result_queue_url = events, sqs, bus, result_queue_url

    def publish(self, news_id: str, detail_type: str, detail: Mapping[str, Any]) -> None:
        answer = self.events.put_events(
            Entries=[
                {"EventBusName": self.bus, "Source": SOURCE, "DetailType": detail_type, "Detail": json.dumps(detail)}
            ]
        )
        if answer["FailedEntryCount"]:
            raise Unavailable(f"{news_id} was not taken by the bus: {answer['Entries'][0].get('ErrorCode')}")

    def result(self, dedup_id: str, group: str, message: Mapping[str, Any]) -> None:
        # A FIFO queue forgets an id after five minutes: a consumer that must not act twice drops repeats by `id`.
        self.sqs.send_message(
            QueueUrl=self.result_queue_url,
            MessageBody=json.dumps({"id": dedup_id, **message}),
            MessageDeduplicationId=dedup_id,
            MessageGroupId=group,
        )
