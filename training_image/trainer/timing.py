"""Where the time of a step goes: waiting for data, waiting for other ranks, and the rank's own work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import distributed as dist

STEPS = 10

# The collectives of FSDP2, by their names in several releases of torch; it looks them up in torch.distributed.
SHARDING = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")

PROBE_EVERY_S = 30.0
PROBE_SIDE, PROBE_REPEATS = 4096, 50


class StepTimes:
    """Means over the last steps, in milliseconds; None before the first.

    On a CPU every collective is waited for where it is called, so what is left of a step is the rank's own. On a GPU
    the host only queues it: there `comm_ms` is None, and `own_ms` is the time of a fixed piece of work.
    """

    def __init__(self, device: torch.device) -> None:
        self._probe = Probe(device) if device.type == "cuda" else None
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=STEPS)
        self._data_s = self._wait_s = 0.0
        self._handed_over_at: float | None = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The time inside counts as waiting for data."""
        began = time.perf_counter()
        yield
        self._data_s += time.perf_counter() - began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The time inside counts as waiting for other ranks."""
        began = time.perf_counter()
        yield
        self._wait_s += time.perf_counter() - began

    def handed_over(self) -> None:
        """The last gradients of this rank are on their way; until `arrived` it waits for those of the others."""
        self._handed_over_at = time.perf_counter()

    def arrived(self) -> None:
        if self._handed_over_at is not None:
            self._wait_s += time.perf_counter() - self._handed_over_at
            self._handed_over_at = None

    def finish(self, seconds: float) -> None:
        """A step of so many seconds is over."""
        self._steps.append((seconds, self._data_s, self._wait_s))
        self._data_s = self._wait_s = 0.0
        if self._probe:
            self._probe.look()

    @property
    def step_ms(self) -> float | None:
        return self._mean(lambda step: step[0])

    @property
    def data_wait_ms(self) -> float | None:
        return self._mean(lambda step: step[1])

    @property
    def last_data_wait_ms(self) -> float:
        """Return what the last step waited for data, before it and in it; 0 before the first."""
        return round(1000 * self._steps[-1][1], 2) if self._steps else 0.0

    @property
    def comm_ms(self) -> float | None:
        return None if self._probe else self._mean(lambda step: step[2])

    @property
    def own_ms(self) -> float:
        """Return what compares this rank with others, 0 while it is not known."""
        if self._probe:
            return self._probe.ms
        return self._mean(lambda step: step[0] - step[2]) or 0.0

    def _mean(self, part: Callable[[tuple[float, float, float]], float]) -> float | None:
        if not self._steps:
            return None
        return round(1000 * sum(map(part, self._steps)) / len(self._steps), 2)


class Probe:
    """The time of a fixed piece of work on this device alone, taken every half minute; `ms` is the newest."""

    def __init__(self, device: torch.device, *, side: int = PROBE_SIDE, repeats: int = PROBE_REPEATS) -> None:
        self.ms = 0.0
        self._factor = torch.randn(side, side, device=device, dtype=torch.bfloat16)
        self._repeats, self._next_at = repeats, 0.0

    def look(self) -> None:
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + PROBE_EVERY_S
        self._work(1)
        began = time.perf_counter()
        self._work(self._repeats)
        self.ms = round(1000 * (time.perf_counter() - began), 2)

    def _work(self, repeats: int) -> None:
        for _ in range(repeats):
            product = self._factor @ self._factor
        float(product[0, 0])  # waits for the device


def time_sharding(times: StepTimes) -> None:
    """What FSDP2 waits for in its collectives counts as waiting for other ranks. For ranks on CPUs only."""
    for name in SHARDING:
        if hasattr(dist, name):
            setattr(dist, name, _timed(getattr(dist, name), times))


def _timed(collective: Callable[..., Any], times: StepTimes) -> Callable[..., Any]:
    @wraps(collective)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with times.waiting():
            return collective(*args, **kwargs)

    return timed
