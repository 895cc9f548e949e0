"""How much host memory is free for staged saves. Linux only, from the kernel's own files."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
# A tenth stays for what grows besides: data loading, page tables, the writer's own buffers.
USABLE = 0.9


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return what can be allocated without swapping: of the machine, and of the container where that is less."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    free = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        # Clean page cache counts as used by the container, and goes as soon as memory is asked for.
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        reclaimable = int(statistics.get("inactive_file", 0))
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, int(limit) - used + reclaimable)


def staging_fits(needed_bytes: int, free_bytes: int) -> bool:
    """Return whether a second copy of this node's share of the state may be held in host memory."""
    return needed_bytes <= USABLE * free_bytes
