"""Tells Step Functions that the attempt's nodes are alive, with the token of the state that watches the training."""

from __future__ import annotations

from typing import Any

from agent.cloud import CLOUD_ERRORS, OrdersTable, error_code
from agent.journal import Journal
from agent.threads import Loop
from job_contract.orders import Wait, WaitItem, wait_key
from job_contract.version import decode

# Answers to a token whose state has been left or was started anew; the item then holds another one, or will.
DEAD_TOKEN = frozenset({"TaskDoesNotExist", "TaskTimedOut", "InvalidToken"})
# Seconds until the next look while the waiting state has left no token yet.
NO_TOKEN_S = 1.0


class Heartbeat:
    """Beats for one attempt between `begin` and `end`."""

    def __init__(self, sfn: Any, table: OrdersTable, job: str, journal: Journal, *, interval_s: float) -> None:
        self._sfn, self._table, self._job, self._journal = sfn, table, job, journal
        self._interval_s = interval_s
        self._attempt: int | None = None
        self._known: tuple[int, str] | None = None
        self.loop = Loop("heartbeat", self._round, journal)

    def begin(self, attempt: int) -> None:
        self._attempt = attempt
        self.loop.poke()

    def end(self) -> None:
        self._attempt = None

    def _round(self) -> float:
        attempt = self._attempt
        if attempt is None:
            return self._interval_s
        try:
            return self._interval_s if self.beat(attempt) else NO_TOKEN_S
        except CLOUD_ERRORS as error:
            self._journal.note("heartbeat_unsent", error=error_code(error))
            return NO_TOKEN_S

    def beat(self, attempt: int) -> bool:
        """Return whether a living token of this attempt has been beaten with."""
        if self._known and self._known[0] == attempt and self._accepted(self._known[1]):
            return True
        self._known = None
        token = self._read_token(attempt)
        if token is None or not self._accepted(token):
            return False
        self._known = attempt, token
        return True

    def _accepted(self, token: str) -> bool:
        try:
            self._sfn.send_task_heartbeat(taskToken=token)
        except CLOUD_ERRORS as error:
            if error_code(error) not in DEAD_TOKEN:
                raise
            self._journal.note("token_dead", error=error_code(error))
            return False
        return True

    def _read_token(self, attempt: int) -> str | None:
        item = self._table.read(wait_key(self._job, Wait.TRAINING))
        wait = item and decode(WaitItem, item)
        return wait.token if wait and wait.attempt == attempt else None
