"""Synchronous code in virtual time: what would wait gives way to whatever is due first.

A fiber is a thread, but only one of all ever runs, so the code in it is interleaved where it sleeps and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from bench.world.agenda import Agenda

STACK_BYTES = 512 * 1024


class Fibers:
    """`agenda` moves time on; work begun by `spawn` may call `sleep`."""

    def __init__(self, agenda: Agenda) -> None:
        self.agenda = agenda
        self._main = threading.Semaphore(0)
        self._idle: list[_Fiber] = []
        self._running: _Fiber | None = None
        self.failures: list[BaseException] = []

    def spawn(self, work: Callable[[], object], delay_s: float = 0.0) -> None:
        """The work begins `delay_s` from now."""
        self.agenda.after(delay_s, lambda: self._begin(work))

    def sleep(self, seconds: float) -> None:
        """The fiber that calls goes on so much later. Anything else that calls goes on at once."""
        fiber = self._running
        if fiber is None:
            return
        self.agenda.after(max(0.0, seconds), lambda: self._resume(fiber))
        self._main.release()
        fiber.baton.acquire()

    def close(self) -> None:
        """Idle threads end."""
        for fiber in self._idle:
            fiber.work = None
            fiber.baton.release()
        self._idle.clear()

    def _begin(self, work: Callable[[], object]) -> None:
        fiber = self._idle.pop() if self._idle else _Fiber(self._finished)
        fiber.work = work
        self._resume(fiber)

    def _resume(self, fiber: _Fiber) -> None:
        self._running = fiber
        fiber.baton.release()
        self._main.acquire()
        self._running = None

    def _finished(self, fiber: _Fiber, failure: BaseException | None) -> None:
        if failure is not None:
            self.failures.append(failure)
        self._idle.append(fiber)
        self._main.release()


class _Fiber:
    def __init__(self, finished: Callable[[_Fiber, BaseException | None], None]) -> None:
        self.baton = threading.Semaphore(0)
        self.work: Callable[[], object] | None = None
        self._finished = finished
        before = threading.stack_size(STACK_BYTES)
        threading.Thread(target=self._run, daemon=True).start()
        threading.stack_size(before)

    def _run(self) -> None:
        while True:
            self.baton.acquire()
            if self.work is None:
                return
            failure: BaseException | None = None
            try:
                self.work()
            except BaseException as error:  # noqa: BLE001 the thread must hand the baton back, whatever it was
                failure = error
            self._finished(self, failure)


class Slots:
    """At most `limit` at a time; others are told no."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0

    def take(self) -> bool:
        if self.used >= self.limit:
            return False
        self.used += 1
        return True

    def give_back(self) -> None:
        self.used -= 1
