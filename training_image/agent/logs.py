"""What the ranks printed and measured: to the bucket when an attempt is over, the curve with each save as well; what
they printed also to CloudWatch Logs, as it comes."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.cloud import CLOUD_ERRORS, Bucket, error_code
from agent.journal import Journal
from agent.secrets import without
from agent.threads import Loop

TAIL_BYTES = 256 << 10
MOST_LINES = 2_000
MEASURED = ("step", "attempt", "loss", "at")
TRIES = 3
RETRY_S = 1.0

# PutLogEvents takes 1 MB and 10,000 events a call, each event counted with 26 bytes more; these stay well below.
BATCH_BYTES, BATCH_LINES, LINE_CHARACTERS = 256 << 10, 2_000, 8_000


def log_key(prefix: str, attempt: int, name: str) -> str:
    """Return where the tail of a log of the attempt lies, beside the job's saves."""
    return f"{prefix}/logs/attempt-{attempt:04d}/{name}"


def tails(folder: Path, secrets: Mapping[str, str]) -> dict[str, bytes]:
    """Return the last 256 KiB of each rank's log by file name, whole lines, with no secret's value in them."""
    found = {}
    for file in sorted(folder.glob("rank-*.log")):
        cut = max(0, file.stat().st_size - TAIL_BYTES)
        with file.open("rb") as log:
            log.seek(cut)
            raw = log.read(TAIL_BYTES)
        # The rest of a line may be the rest of a secret.
        raw = raw[raw.find(b"\n") + 1 :] if cut else raw
        found[file.name] = without(raw.decode(errors="replace"), secrets).encode()
    return found


def curve(run_dir: Path, steady: Mapping[str, Any] | None = None) -> bytes:
    """Return what rank 0 measured, as lines of JSON: metrics gathered into at most MOST_LINES, the evaluations, and
    what steady steps took.

    A gathered line has the last step and the mean loss of the `steps` steps that it stands for, and the sums of their
    tokens and seconds. What is still being written is left out, and what a program of the user's own wrote otherwise.
    """
    steps = _lines(run_dir / "metrics.jsonl")
    size = -(-len(steps) // MOST_LINES) or 1
    told = [_gathered(steps[first : first + size]) for first in range(0, len(steps), size)]
    for line in _lines(run_dir / "evaluations.jsonl")[-MOST_LINES:]:
        told.append({name: line[name] for name in ("step", "attempt", "at")} | {"evaluation_loss": line["loss"]})
    told += [dict(steady)] if steady else []
    return b"".join(json.dumps(line).encode() + b"\n" for line in told)


def _gathered(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    last = lines[-1]
    return {
        **{name: last[name] for name in ("step", "attempt", "at")},
        "steps": len(lines),
        "loss": sum(line["loss"] for line in lines) / len(lines),
        **{name: sum(line.get(name, 0) for line in lines) for name in ("tokens", "seconds")},
    }


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    with file.open(errors="replace") as stream:
        return [found for line in stream if line.endswith("\n") and (found := _measured(line)) is not None]


def _measured(text: str) -> dict[str, Any] | None:
    """Return the line; None when it does not say step, attempt, loss and time in numbers."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict):
        return None
    told = [line.get(name) for name in MEASURED] + [line.get(name, 0) for name in ("tokens", "seconds")]
    return line if all(isinstance(value, (int, float)) for value in told) else None


class TailShipper:
    """Puts what it is given into the bucket, in a thread of its own; what fails three times is left out and noted."""

    def __init__(self, bucket: Bucket, journal: Journal) -> None:
        self._bucket, self._journal = bucket, journal
        self._waiting: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._busy = False
        self.loop = Loop("logs", self._round, journal)

    def ship(self, found: Mapping[str, bytes]) -> None:
        """Each body is on its way to its key."""
        for key, body in found.items():
            self._waiting.put((key, body))
        self.loop.poke()

    def flush(self, *, within_s: float) -> bool:
        """Return whether everything given before is in the bucket, or was given up."""
        deadline = time.monotonic() + within_s
        while not self._idle and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._idle

    @property
    def _idle(self) -> bool:
        return self._waiting.empty() and not self._busy

    def _round(self) -> float:
        while not self._waiting.empty():
            self._busy = True
            key, body = self._waiting.get()
            try:
                self._put(key, body)
            finally:
                self._busy = False
        return 60.0

    def _put(self, key: str, body: bytes) -> None:
        for number in range(1, TRIES + 1):
            try:
                self._bucket.put(key, body)
            except CLOUD_ERRORS as error:
                self._journal.note("log_unput", key=key, error=error_code(error), tried=number)
                self.loop.closed.wait(RETRY_S)
            else:
                return


class Follower:
    """Sends the ranks' new lines to CloudWatch Logs, a stream a rank; `read` is called with each look.

    At most 256 KiB a rank and look: a rank that prints more loses the middle of it here, and is told so in the stream.
    """

    def __init__(self, client: Any, group: str, journal: Journal) -> None:
        self._client, self._group, self._journal = client, group, journal
        self._read: dict[str, int] = {}
        self._made: set[str] = set()

    def look(self, job: str, attempt: int, folder: Path, secrets: Mapping[str, str]) -> None:
        """What was printed since the last look is sent, or noted as unsent and tried again. Whole lines only."""
        for file in sorted(folder.glob("rank-*.log")):
            stream = f"{job}/{attempt:04d}/{file.stem}"
            try:
                self._send(stream, file, secrets)
            except CLOUD_ERRORS as error:
                self._journal.note("log_unsent", stream=stream, error=error_code(error))
                return

    def _send(self, stream: str, file: Path, secrets: Mapping[str, str]) -> None:
        lines, end = self._new_lines(stream, file)
        if not lines:
            return
        if stream not in self._made:
            self._make(stream)
        at = round(time.time() * 1000)
        events = [{"timestamp": at, "message": without(line, secrets)[:LINE_CHARACTERS] or " "} for line in lines]
        self._client.put_log_events(logGroupName=self._group, logStreamName=stream, logEvents=events)
        self._read[stream] = end

    def _new_lines(self, stream: str, file: Path) -> tuple[list[str], int]:
        begin, size = self._read.get(stream, 0), file.stat().st_size
        left_out = max(0, size - begin - BATCH_BYTES)
        with file.open("rb") as log:
            log.seek(begin + left_out)
            raw = log.read(size - begin - left_out)
        whole = raw.rfind(b"\n") + 1
        lines = raw[:whole].decode(errors="replace").splitlines()
        dropped = max(0, len(lines) - BATCH_LINES)
        told = [f"... {left_out} bytes and {dropped} lines left out"] if left_out or dropped else []
        return [*told, *lines[dropped:]], begin + left_out + whole

    def _make(self, stream: str) -> None:
        try:
            self._client.create_log_stream(logGroupName=self._group, logStreamName=stream)
        except CLOUD_ERRORS as error:
            if error_code(error) != "ResourceAlreadyExistsException":
                raise
        self._made.add(stream)
