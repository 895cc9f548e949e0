"""Whether a node may take part in another attempt: nothing of the last one is left, and the machine is whole."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from agent.gpus import GpuFigures
from agent.hygiene import end_marked
from job_contract.xids import xids_in

SHARED_MEMORY = Path("/dev/shm")
CLOCK_LIMIT_S = 2.0
"""Deadlines of notices are compared across nodes; the supervisor's gate has the same limit."""

IDLE_GPU_BYTES = 2 << 30
"""Driver and firmware keep up to about one GiB of a large GPU for themselves."""

# torch names its segments torch_<pid>_..., Python's multiprocessing psm_ with no pid, NCCL nccl-XXXXXX with none.
_OF_PROCESS = re.compile(r"torch_(\d+)_")


def unfit(
    *,
    root: Path,
    pids: Collection[int],
    gpus: Sequence[GpuFigures],
    kernel: Iterable[str],
    clock_offset_s: float,
    shared_memory: Path = SHARED_MEMORY,
) -> str | None:
    """Return why the node is not fit for another attempt, None when it is. `pids` were the ranks of the last one."""
    left = end_marked(root)
    if left:
        return f"{len(left)} processes of the last attempt cannot be ended: {', '.join(map(str, left[:5]))}"
    stuck = clear_shared_memory(shared_memory, pids)
    if stuck:
        return f"shared memory of the last attempt cannot be freed: {', '.join(stuck[:5])}"
    broken = next((xid for xid in xids_in(kernel) if xid.replace), None)
    if broken:
        return f"GPU {broken.gpu}: Xid {broken.number} ({broken.replace})"
    held = next((gpu for gpu in gpus if gpu.memory_used_bytes > IDLE_GPU_BYTES), None)
    if held:
        return f"GPU {held.address} holds {held.memory_used_bytes / 1e9:.1f} GB though no rank runs"
    if abs(clock_offset_s) > CLOCK_LIMIT_S:
        return f"the clock is {clock_offset_s:+.0f} s off; deadlines need it within {CLOCK_LIMIT_S:.0f} s"
    return None


def clear_shared_memory(folder: Path, pids: Collection[int]) -> list[str]:
    """No segment of these processes is left; return the names of those that could not be removed."""
    stuck = []
    for file in sorted(folder.glob("torch_*")):
        found = _OF_PROCESS.match(file.name)
        if found is None or int(found[1]) not in pids:
            continue
        try:
            file.unlink(missing_ok=True)
        except OSError:
            stuck.append(file.name)
    return stuck
