"""What a rank writes down while it runs: events of every rank, metrics and progress of global rank 0."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, TextIO

from job_contract.node_files import RankProgress, write_message

# Replacing a file costs some tenths of a millisecond; at this rate they stay far under a thousandth of the time.
PROGRESS_EVERY_S = 1.0


class Journal:
    """Appends to events.jsonl and metrics.jsonl and replaces progress.json in the run directory."""

    def __init__(self, run_dir: Path, rank: int, attempt: int) -> None:
        self.run_dir, self.rank, self.attempt = run_dir, rank, attempt
        self._shown: tuple[str, bool] | None = None
        self._shown_at = 0.0
        self._metrics: TextIO | None = None

    def event(self, name: str, **fields: Any) -> None:
        """The event is in events.jsonl, with the time and this rank."""
        self._append("events.jsonl", {"event": name, "at": time.time(), "rank": self.rank, **fields})

    def step(self, **line: float) -> None:
        """The finished optimizer step is in metrics.jsonl; steps count from 1. Only global rank 0 writes.

        `seconds` is the step itself; `data_wait_ms` what this rank waited for data before and in it.
        """
        if self.rank == 0:
            if self._metrics is None:
                # Opening it anew at every step would cost ten times the write.
                self._metrics = (self.run_dir / "metrics.jsonl").open("a", buffering=1)
            self._metrics.write(json.dumps({**line, "attempt": self.attempt, "at": time.time()}) + "\n")

    def evaluation(self, **line: float) -> None:
        """The evaluation after a step is in evaluations.jsonl. Only global rank 0 writes."""
        if self.rank == 0:
            self._append("evaluations.jsonl", {**line, "attempt": self.attempt, "at": time.time()})

    def progress_is_due(self, state: str, started: bool) -> bool:
        """Return whether progress.json is to be replaced, by rank 0: for a new state at once, else every second."""
        now, shown = time.monotonic(), (state, started)
        if self.rank != 0 or (shown == self._shown and now - self._shown_at < PROGRESS_EVERY_S):
            return False
        self._shown, self._shown_at = shown, now
        return True

    def progress(self, progress: RankProgress) -> None:
        """progress.json holds this."""
        write_message(self.run_dir / "progress.json", progress)

    def _append(self, file: str, line: dict[str, Any]) -> None:
        # One write of a whole line to a file opened for appending: ranks of one node share events.jsonl.
        with (self.run_dir / file).open("a") as stream:
            stream.write(json.dumps(line) + "\n")
