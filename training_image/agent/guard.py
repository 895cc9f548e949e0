"""Runs beside the agent: once the agent is gone, however it ended, no process of its ranks is left.

The parent-death signal reaches a rank, not what the rank started; the marker in the environment reaches both.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from agent.hygiene import end_marked


class Guard:
    """A process that waits for the end of a pipe which only the agent holds open."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agent.guard", str(root)], stdin=subprocess.PIPE, start_new_session=True
        )

    def close(self) -> None:
        """The ranks' processes are ended and so is the guard."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main(root: Path) -> None:
    """Returns once the agent's end of the pipe has closed and no marked process is left."""
    while sys.stdin.buffer.read(1):
        pass
    end_marked(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
