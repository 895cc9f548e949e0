"""What a rank writes down while it runs: events of every rank, metrics and progress of global rank 0."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from job_contract.node_files import RankProgress, write_message

PROGRESS_EVERY_S = 0.5


class Journal:
    """Appends to events.jsonl and metrics.jsonl and replaces progress.json in the run directory."""

    def __init__(self, run_dir: Path, rank: int, attempt: int) -> None:
        self.run_dir, self.rank, self.attempt = run_dir, rank, attempt
        self._shown: tuple[str, bool] | None = None
        self._shown_at = 0.0

    def event(self, name: str, **fields: Any) -> None:
        """The event is in events.jsonl, with the time and this rank."""
        self._append("events.jsonl", {"event": name, "at": time.time(), "rank": self.rank, **fields})

    def step(self, **line: float) -> None:
        """The finished optimizer step is in metrics.jsonl; steps count from 1. Only global rank 0 writes.

        `seconds` is the step itself; `data_wait_s` what this rank waited for data before and in it.
        """
        if self.rank == 0:
            self._append("metrics.jsonl", {**line, "attempt": self.attempt, "at": time.time()})

    def evaluation(self, **line: float) -> None:
        """The evaluation after a step is in evaluations.jsonl. Only global rank 0 writes."""
        if self.rank == 0:
            self._append("evaluations.jsonl", {**line, "attempt": self.attempt, "at": time.time()})

    def progress(self, progress: RankProgress, *, always: bool = False) -> None:
        """progress.json is at most half a second behind; a new state is there at once. Only global rank 0 writes."""
        shown, now = (progress.state, progress.started), time.monotonic()
        if self.rank == 0 and (always or shown != self._shown or now - self._shown_at >= PROGRESS_EVERY_S):
            self._shown, self._shown_at = shown, now
            write_message(self.run_dir / "progress.json", progress)

    def _append(self, file: str, line: dict[str, Any]) -> None:
        # One write of a whole line to a file opened for appending: ranks of one node share events.jsonl.
        with (self.run_dir / file).open("a") as stream:
            stream.write(json.dumps(line) + "\n")
