"""Finds and ends every process of this node's ranks, whoever its parent is: writer daemons outlive the rank they serve.

Standard library only and nothing of the agent: the guard runs it after the agent is gone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

ATTEMPT_MARKER = "HOLDFAST_ATTEMPT"
NODE_MARKER = "HOLDFAST_NODE_ROOT"
_ATTEMPT = f"{ATTEMPT_MARKER}=".encode()


def marked(root: Path) -> list[int]:
    """Return the processes that were started for an attempt on the node with this root."""
    node = f"{NODE_MARKER}={root}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            variables = _environment(int(entry))
            if node in variables and any(line.startswith(_ATTEMPT) for line in variables):
                found.append(int(entry))
    return found


def end_marked(root: Path, *, within_s: float = 2.0) -> list[int]:
    """No such process is left, those forked meanwhile included. Return what survived SIGKILL for `within_s`."""
    deadline = time.monotonic() + within_s
    while (left := marked(root)) and time.monotonic() < deadline:
        signal_all(left, signal.SIGKILL)
        time.sleep(0.01)
    return left


def signal_all(processes: Iterable[int], number: int) -> None:
    """Each process that still exists has the signal."""
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def _environment(process: int) -> list[bytes]:
    # A zombie's environment is empty, so it counts as ended.
    try:
        return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
