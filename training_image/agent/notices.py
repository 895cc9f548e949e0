"""Watches the node's own metadata for the notice that it will be ended."""

from __future__ import annotations

from agent.imds import Imds, ImdsUnavailable, Notice, read_notice
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
