"""Becomes the command it is given, near its GPU, with SIGKILL promised for the moment its agent dies.

Run as `python -I -S child.py <agent pid> <cpus> <command...>`; `<cpus>` is a kernel's list (`0-47,96-143`), or empty.
A preexec_fn would do the same between fork and exec, where a process with threads may hang; the promise survives exec.
It hangs on the *thread* that forked: the agent's main one.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(agent_pid: int, cpus: str, command: list[str]) -> None:
    """Never returns."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent_pid:  # the agent died before the promise was made
        os._exit(1)
    if cpus:
        with contextlib.suppress(OSError, ValueError):  # a container may not be given them; then all will do
            os.sched_setaffinity(0, cpus_in(cpus))
    os.execvp(command[0], command)


def cpus_in(text: str) -> set[int]:
    """Return the numbers of a list as the kernel writes it."""
    ranges = (part.partition("-") for part in text.split(","))
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
