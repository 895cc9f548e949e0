"""What this machine has: driver, EFA provider, a name of its hardware, the way from GPUs to NUMA nodes and cards.

All of it comes from /proc, /sys and one run of `fi_info`, so none of it needs a library; on a CPU machine all is None.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agent.imds import Imds

FI_INFO = ("fi_info", "-p", "efa", "-t", "FI_EP_RDM")
FI_INFO_S = 20.0
NVIDIA_VENDOR = "0x10de"
# PCI classes of a GPU: VGA controller, and 3D controller, which has no display.
GPU_CLASSES = ("0x0300", "0x0302")

# `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build ...`
_DRIVER = re.compile(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", re.MULTILINE)
_UUID = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU in the order of the PCI bus, which is the order of local ranks. `numa` is -1 where there is one node.

    `cpus` are the nearest ones as the kernel writes a list (`0-47,96-143`); `cards` the EFA devices nearest to it.
    """

    address: str
    numa: int
    cpus: str
    cards: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.address} numa {self.numa} cpus {self.cpus} efa {' '.join(self.cards) or 'none'}"


@dataclass(frozen=True, kw_only=True)
class Host:
    """None = not known. `efa_provider` is empty where libfabric was asked and has none."""

    driver: str | None = None
    efa_provider: str | None = None
    placement_group: str | None = None
    name: str | None = None
    gpus: tuple[Gpu, ...] = ()

    def cpus_of(self, local_rank: int) -> str:
        """Return the CPUs to pin a local rank to, empty where pinning gains nothing."""
        if len({gpu.numa for gpu in self.gpus}) < 2 or local_rank >= len(self.gpus):
            return ""
        return self.gpus[local_rank].cpus


def read_host(
    imds: Imds,
    *,
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
    fi_info: Callable[[], str | None] | None = None,
) -> Host:
    """Raises ImdsUnavailable."""
    uuids = gpu_uuids(proc)
    return Host(
        driver=driver_version(proc),
        efa_provider=(fi_info or efa_provider)(),
        placement_group=imds.read("placement/group-name"),
        # A GPU's UUID stays with the hardware; the id of a host is told on dedicated hosts only.
        name=f"gpu-{digest(uuids)}" if uuids else imds.read("placement/host-id"),
        gpus=topology(sys),
    )


def driver_version(proc: Path) -> str | None:
    """Return the version of NVIDIA's kernel module, None where there is none."""
    found = _DRIVER.search(_text(proc / "driver/nvidia/version"))
    return found[1] if found else None


def gpu_uuids(proc: Path) -> tuple[str, ...]:
    files = sorted((proc / "driver/nvidia/gpus").glob("*/information"))
    return tuple(sorted(found[1] for file in files if (found := _UUID.search(_text(file)))))


def digest(names: tuple[str, ...]) -> str:
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]


def efa_provider() -> str | None:
    """Return what libfabric finds: `efa`, empty for nothing, None where it is not installed or does not answer."""
    if shutil.which(FI_INFO[0]) is None:
        return None
    try:
        done = subprocess.run(FI_INFO, capture_output=True, text=True, timeout=FI_INFO_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return provider_in(done.stdout)


def provider_in(printed: str) -> str:
    """Return the provider that `fi_info` printed, empty when it printed none."""
    found = re.search(r"^\s*provider:\s*(\S+)", printed, re.MULTILINE)
    return found[1] if found else ""


def topology(sys: Path) -> tuple[Gpu, ...]:
    """Return the GPUs of a /sys tree, each with the EFA devices that share most of its way to the processor."""
    cards = {card.name: (card / "device").resolve() for card in sorted((sys / "class/infiniband").glob("*"))}
    found = []
    for device in sorted((sys / "bus/pci/devices").glob("*")):
        if _text(device / "vendor") != NVIDIA_VENDOR or not _text(device / "class").startswith(GPU_CLASSES):
            continue
        numa = int(_text(device / "numa_node") or -1)
        near = {name: _shared(device.resolve(), path) for name, path in cards.items() if _numa(path) == numa}
        closest = tuple(name for name, shared in near.items() if shared == max(near.values()))
        found.append(Gpu(address=device.name, numa=numa, cpus=_text(device / "local_cpulist"), cards=closest))
    return tuple(found)


def memory_free_bytes(proc: Path = Path("/proc")) -> int | None:
    """Return what the kernel says can be had without swapping."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def disk_free_bytes(folder: Path) -> int | None:
    """Return what is free on the folder's disk, None where it cannot be asked."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _numa(device: Path) -> int:
    return int(_text(device / "numa_node") or -1)


def _shared(one: Path, other: Path) -> int:
    """Return how many bridges two devices have in common."""
    same = [left == right for left, right in zip(one.parts, other.parts, strict=False)]
    return same.index(False) if False in same else len(same)


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
