"""Watches the node's own metadata: for the notice that it will be ended, and for warnings of less."""

from __future__ import annotations

import contextlib

from agent.imds import Imds, ImdsUnavailable, Notice, read_notice, read_warnings
from agent.journal import Journal
from agent.threads import Loop


class NoticePoller:
    """Keeps the newest notice of this node; a poll that fails says so once and is repeated."""

    def __init__(self, imds: Imds, journal: Journal, *, interval_s: float) -> None:
        self._imds, self._journal, self._interval_s = imds, journal, interval_s
        self._latest: Notice | None = None
        self._silent = False
        self.loop = Loop("metadata", self._round, journal)

    def latest(self) -> Notice | None:
        return self._latest

    def _round(self) -> float:
        try:
            self._latest = read_notice(self._imds) or self._latest
            self._silent = False
        except ImdsUnavailable as error:
            if not self._silent:
                self._journal.note("metadata_silent", error=str(error))
            self._silent = True
        return self._interval_s


class WarningPoller:
    """Keeps the warnings that stand: rebalance advice and dates of maintenance; a poll that fails is repeated."""

    def __init__(self, imds: Imds, journal: Journal, *, interval_s: float) -> None:
        self._imds, self._interval_s = imds, interval_s
        self._latest: tuple[Notice, ...] = ()
        self.loop = Loop("warnings", self._round, journal)

    def latest(self) -> tuple[Notice, ...]:
        return self._latest

    def _round(self) -> float:
        # The notice's own poll says so when the service is silent.
        with contextlib.suppress(ImdsUnavailable):
            self._latest = read_warnings(self._imds)
        return self._interval_s
