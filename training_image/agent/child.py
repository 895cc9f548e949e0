"""Becomes the command it is given, with SIGKILL promised for the moment its agent dies.

Run as `python -I -S child.py <agent pid> <command...>`. A preexec_fn would do the same between fork and exec, where a
process with threads may hang; the promise survives exec. It hangs on the *thread* that forked: the agent's main one.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(agent_pid: int, command: list[str]) -> None:
    """Never returns."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent_pid:  # the agent died before the promise was made
        os._exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
