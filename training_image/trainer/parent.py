"""No rank outlives the agent that started it. Standard library only: it runs before torch is imported."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def parent_is(pid: int) -> bool:
    """Return whether the parent is still the process that wrote `pid` down; 0 stands for a start by hand.

    The signal covers only deaths after it was set, so a parent that died earlier has to be noticed like this.
    """
    return pid in (0, os.getppid())
