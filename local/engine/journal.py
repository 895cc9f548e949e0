"""Append-only JSON lines in the state directory; a line is on disk when `write` returns."""

import json
import threading
import time
from pathlib import Path


class Journal:
    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, **facts) -> float:
        """One line with `at` (epoch seconds, UTC) and the facts; returns `at`."""
        at = time.time()
        line = json.dumps({"at": at, **facts}, default=str) + "\n"
        with self._lock:
            self._file.write(line)
        return at
