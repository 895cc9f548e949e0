"""Processes of one cloud: found by their marker, ended together, and never outliving the process that started them."""

import ctypes
import os
import queue
import signal
import subprocess
import threading
import time
from concurrent.futures import Future
from pathlib import Path

CLOUD_MARKER = "HOLDFAST_LOCAL_CLOUD"
NODE_MARKER = "HOLDFAST_NODE"
FORKER_THREAD = "forker"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def marked(name: str, value: str) -> list[int]:
    """Process ids, this one excepted, whose start environment holds `name=value`. Zombies have none and don't count."""
    wanted = f"{name}={value}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path("/proc", entry, "environ").read_bytes()
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
        if wanted in environment.split(b"\0"):
            found.append(int(entry))
    return found


def kill_marked(name: str, value: str, *, within_s: float = 2.0) -> list[int]:
    """No process with the marker is left, those forked meanwhile included; what survived SIGKILL for `within_s`."""
    deadline = time.monotonic() + within_s
    while (left := marked(name, value)) and time.monotonic() < deadline:
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        time.sleep(0.01)
    return left


def send_signal(pid: int, number: int) -> None:
    """The process has the signal, or is gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


class Forker:
    """Forks children that get SIGKILL when this process dies.

    PR_SET_PDEATHSIG fires when the forking *thread* ends, so one thread that lives as long as the process forks all.
    """

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=FORKER_THREAD, daemon=True).start()

    def popen(self, *args, **options) -> subprocess.Popen:
        """A child started with the arguments of subprocess.Popen; raises what Popen raises."""
        future: Future = Future()
        self._requests.put((future, args, options))
        return future.result()

    def _serve(self) -> None:
        parent = os.getpid()
        while True:
            future, args, options = self._requests.get()
            try:
                future.set_result(subprocess.Popen(*args, preexec_fn=lambda: die_with(parent), **options))
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                future.set_exception(error)


def die_with(parent: int) -> None:
    """This process gets SIGKILL when the thread that forked it ends; it ends at once if that was already so."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died between fork and prctl
        os._exit(1)
