"""Children that go on where their parent stands: a story is played once, and branches off at every point of it."""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import traceback
from collections.abc import Callable
from typing import Any

CHUNK = 1 << 16


class ChildFailed(Exception):
    """A child ended without a result; the text is its traceback."""


class Forks:
    """At most `slots` children at work; `results` by the name each was begun under. Use as a context manager."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.results: dict[Any, Any] = {}
        self._selector = selectors.DefaultSelector()
        self._pids: dict[int, int] = {}
        self._read: dict[int, bytes] = {}
        self._out: int | None = None

    @property
    def in_child(self) -> bool:
        return self._out is not None

    def branch(self, name: Any) -> bool:
        """Return True in a new child, which then owes `finish`; False in the parent, which may have waited for room."""
        while len(self._pids) >= self.slots:
            self._collect()
        inlet, outlet = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(inlet)
            self._out = outlet
            return True
        os.close(outlet)
        self._pids[inlet], self._read[inlet] = pid, b""
        self._selector.register(inlet, selectors.EVENT_READ, name)
        return False

    def run(self, name: Any, work: Callable[[], Any]) -> None:
        """The work is done in a child."""
        if self.branch(name):
            self.finish(work)

    def finish(self, work: Callable[[], Any]) -> None:
        """In a child: the result of the work is handed over, and the process ends. Never returns."""
        code = 1
        try:
            assert self._out is not None
            try:
                result: Any = work()
            except BaseException:  # noqa: BLE001 a child must never run on in its parent's frames
                result = ChildFailed(traceback.format_exc())
            _write(self._out, pickle.dumps(result))
            code = 0
        finally:
            os._exit(code)

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.in_child:
            return
        if kind is not None:
            for pid in self._pids.values():
                os.kill(pid, signal.SIGKILL)
        while self._pids:
            self._collect()

    def _collect(self) -> None:
        for key, _ in self._selector.select():
            inlet = key.fd
            chunk = os.read(inlet, CHUNK)
            self._read[inlet] += chunk
            if chunk:
                continue
            self._selector.unregister(inlet)
            os.close(inlet)
            os.waitpid(self._pids.pop(inlet), 0)
            raw = self._read.pop(inlet)
            self.results[key.data] = pickle.loads(raw) if raw else ChildFailed("it died without a word")


def _write(outlet: int, raw: bytes) -> None:
    view = memoryview(raw)
    while view:
        view = view[os.write(outlet, view) :]
