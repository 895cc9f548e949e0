"""The agent's outermost loops: whatever a round raises is written down, and the next round comes."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

from agent.journal import Journal


class Loop:
    """A daemon thread that calls `step` until closed; `step` returns the seconds until its next call."""

    def __init__(self, name: str, step: Callable[[], float], journal: Journal, *, after_error_s: float = 1.0) -> None:
        self._step, self._journal, self._after_error_s = step, journal, after_error_s
        self._closed, self._poked = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poke(self) -> None:
        """The next call of `step` comes now."""
        self._poked.set()

    @property
    def closed(self) -> threading.Event:
        return self._closed

    def close(self, *, wait_s: float = 0.0) -> None:
        """No further call of `step` begins; the running one is waited for at most `wait_s`."""
        self._closed.set()
        self._poked.set()
        if wait_s and self._thread.is_alive():
            self._thread.join(wait_s)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._poked.clear()
            self._poked.wait(guarded(self._step, self._journal, self._thread.name, self._after_error_s))


def guarded(step: Callable[[], float], journal: Journal, name: str, after_error_s: float) -> float:
    """Return what `step` returned, `after_error_s` when it raised; the error is in the journal."""
    try:
        return step()
    except Exception as error:  # noqa: BLE001 - the one place where an agent outlives its own fault
        journal.note("agent_error", where=name, error=repr(error), trace=traceback.format_exc(limit=-4))
        return after_error_s
