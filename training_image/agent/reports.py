"""Sends reports to the supervisor's queue, in order; one that cannot be sent is sent again until the agent ends."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

from agent.cloud import CLOUD_ERRORS, error_code
from agent.journal import Journal
from agent.threads import Loop
from job_contract.reports import Report, encode_report

# Seconds between tries while the queue cannot be reached.
RETRY_S = 1.0


class Reporter:
    """`say` never waits for the queue."""

    def __init__(self, sqs: Any, queue_url: str, journal: Journal) -> None:
        self._sqs, self._queue_url, self._journal = sqs, queue_url, journal
        self._waiting: deque[Report] = deque()
        self.loop = Loop("reports", self._round, journal)

    def say(self, report: Report) -> None:
        self._waiting.append(report)
        self.loop.poke()

    def flush(self, *, within_s: float) -> bool:
        """Return whether everything said before has been sent."""
        deadline = time.monotonic() + within_s
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self._waiting

    def _round(self) -> float:
        while self._waiting:
            report = self._waiting[0]
            try:
                self._sqs.send_message(QueueUrl=self._queue_url, MessageBody=json.dumps(encode_report(report)))
            except CLOUD_ERRORS as error:
                self._journal.note("report_unsent", kind=report.kind, error=error_code(error))
                return RETRY_S
            self._waiting.popleft()
            self._journal.note(
                "report", kind=report.kind, attempt=report.attempt, took_s=round(time.time() - report.at, 3)
            )
        return 60.0
