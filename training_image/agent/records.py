"""What an attempt leaves on its node for the next one, and for whoever asks what happened."""

from __future__ import annotations

import shutil
from pathlib import Path

from agent.attempt import Attempt
from agent.settings import Settings

RECORDS = ("metrics.jsonl", "evaluations.jsonl", "events.jsonl", "logs", "outcome")
PAST_ATTEMPTS = 5


def keep_newest(attempt: Attempt, settings: Settings) -> None:
    """The attempt's newest committed save lies in the kept directory, alone; the run directory may be cleared."""
    newest: str | None = attempt.saves.newest
    source: Path = settings.run_dir / "saves" / str(newest)
    if newest is None or not source.is_dir():
        return
    shutil.rmtree(settings.kept_dir, ignore_errors=True)
    settings.kept_dir.mkdir(parents=True)
    source.rename(settings.kept_dir / newest)


def keep_records(attempt: Attempt, settings: Settings) -> None:
    """What the ranks of the attempt wrote of themselves lies in the past directory, with that of the last few others;
    the run directory may be cleared.
    """
    target = settings.past_dir / f"attempt-{attempt.number:04d}"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in RECORDS:
        if (settings.run_dir / name).exists():
            (settings.run_dir / name).rename(target / name)
    for folder in sorted(settings.past_dir.iterdir())[:-PAST_ATTEMPTS]:
        shutil.rmtree(folder, ignore_errors=True)
