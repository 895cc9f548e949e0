"""What the agent did, with times: a line on stdout for people, a JSON line in `<root>/events.jsonl` for programs."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Journal:
    """Usable from every thread. The file belongs to the node, so it outlives attempts."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)
        self._clock = clock
        self._lock = threading.Lock()

    def note(self, event: str, **fields: Any) -> None:
        """The event is in the file with its time, and on stdout."""
        shown = " ".join(f"{name}={value}" for name, value in fields.items())
        # A full disk or a closed stdout must not end the loop that wanted to say something.
        with self._lock, contextlib.suppress(OSError):
            at = self._clock()
            self._file.write(json.dumps({"at": at, "event": event, **fields}, default=str) + "\n")
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1000):03d}Z"
            print(stamp, event, shown, file=sys.stdout, flush=True)
