"""The lines of the kernel log that say something about this machine: GPU errors, memory killer, broken disks."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

KMSG = Path("/dev/kmsg")
KEPT_LINES = 200
TOLD = re.compile(r"NVRM: Xid|oom-kill:|Out of memory: Killed process|I/O error, dev|critical medium error")


class KernelLog:
    """What was written since `mark`. Without /dev/kmsg, or the right to read it, nothing is known."""

    def __init__(self, read: Callable[[], Sequence[str]] | None = None) -> None:
        self._read = read or _follow()
        self._lines: list[str] = []
        self.mark()

    def mark(self) -> None:
        """What was written up to now is forgotten."""
        self._read()
        self._lines.clear()

    def lines(self) -> tuple[str, ...]:
        """Return the lines that matter, oldest first."""
        self._lines += [line for line in self._read() if TOLD.search(line)]
        del self._lines[:-KEPT_LINES]
        return tuple(self._lines)


def message_of(record: str) -> str:
    """Return the text of a record of /dev/kmsg: `6,1234,98765,-;text`, further lines hold pairs of key and value."""
    return record.partition(";")[2].partition("\n")[0]


def _follow() -> Callable[[], Sequence[str]]:
    try:
        log = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(log, 0, os.SEEK_END)
    except OSError:
        return lambda: ()

    def read() -> Sequence[str]:
        found = []
        # EAGAIN: no more for now.
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    found.append(message_of(os.read(log, 8192).decode(errors="replace")))
                except BrokenPipeError:  # the kernel overwrote what was not read yet; the next read goes on after it
                    continue
        return found

    return read
