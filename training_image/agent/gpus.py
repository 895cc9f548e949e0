"""Figures of this node's GPUs through NVML, where `nvidia-ml-py` is installed and a driver is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """One GPU, in the order of the PCI bus. Utilization also reads 100 % in a collective that hangs."""

    address: str
    utilization_percent: int
    memory_used_bytes: int
    memory_bytes: int
    power_w: float
    temperature_c: int

    def __str__(self) -> str:
        used, whole = self.memory_used_bytes / 1e9, self.memory_bytes / 1e9
        return (
            f"{self.address} {self.utilization_percent} % {used:.1f} of {whole:.1f} GB "
            f"{self.power_w:.0f} W {self.temperature_c} C"
        )


def open_gpus() -> Callable[[], tuple[GpuFigures, ...]]:
    """Return what reads the figures; without library or driver there are none."""
    try:
        import pynvml
    except ImportError:
        return tuple
    return reader(pynvml)


def reader(nvml: Any) -> Callable[[], tuple[GpuFigures, ...]]:
    """Return what reads the figures with this module of NVML's functions."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return tuple

    def read() -> tuple[GpuFigures, ...]:
        try:
            return tuple(sorted(_all(nvml), key=lambda gpu: gpu.address))
        except nvml.NVMLError:  # a GPU that fell off the bus answers nothing
            return ()

    return read


def _all(nvml: Any) -> list[GpuFigures]:
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        memory, address = nvml.nvmlDeviceGetMemoryInfo(device), nvml.nvmlDeviceGetPciInfo(device).busId
        found.append(
            GpuFigures(
                address=address.decode() if isinstance(address, bytes) else address,
                utilization_percent=nvml.nvmlDeviceGetUtilizationRates(device).gpu,
                memory_used_bytes=memory.used,
                memory_bytes=memory.total,
                power_w=nvml.nvmlDeviceGetPowerUsage(device) / 1000,
                temperature_c=nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
            )
        )
    return found
