"""Ctrl-C in the middle of the story."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from local.processes import marked

pytestmark = [pytest.mark.cloud, pytest.mark.ranks]
REPOSITORY = Path(__file__).resolve().parents[2]
PROMPT_S = 5.0


def test_ctrl_c_ends_everything_promptly_and_the_next_cloud_starts(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": ".:layers/holdfast"}
    for folder in (tmp_path / "first", tmp_path / "second"):
        command = [sys.executable, "-m", "local.story", "--out", str(folder)]
        story = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
            preexec_fn=heed_ctrl_c,
        )
        nodes = wait_for_ranks(folder)
        assert all(marked("HOLDFAST_NODE", node) for node in nodes)
        interrupted_at = time.monotonic()
        os.killpg(story.pid, signal.SIGINT)
        output, _ = story.communicate(timeout=30)
        assert time.monotonic() - interrupted_at < PROMPT_S
        assert story.returncode == 130
        assert "nothing is left running" in output
        assert [pid for node in nodes for pid in marked("HOLDFAST_NODE", node)] == []
        assert [pid for pid in everybody() if str(folder) in environment_of(pid)] == []


def heed_ctrl_c() -> None:
    """A shell starts background jobs with SIGINT ignored, and children inherit that; a terminal's programs do not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_ranks(folder: Path) -> list[str]:
    """The ranks of two nodes have been started."""
    give_up_at = time.monotonic() + 90
    while time.monotonic() < give_up_at:
        started = [path.parents[1].name for path in folder.glob("nodes/*/run/job.json")]
        if len(started) == 2:
            return started
        time.sleep(0.1)
    raise AssertionError("the ranks were not started")


def everybody() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def environment_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
