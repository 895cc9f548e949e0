"""The first thing the ranks do together: an all-reduce of fixed size, so that a bad network is told before training."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from job_contract.node_files import NetworkCheck, write_message
from trainer.endings import NetworkFailed
from trainer.parallel import START_TIMEOUT, Ranks

# NCCL connects its peers in the first collective, which takes tens of seconds on many nodes.
CHECK_TIMEOUT = timedelta(seconds=120)
BYTES = {"cpu": 4 << 20, "cuda": 512 << 20}
REPEATS = 3

# What gloo, the store and NCCL say of peers that never answered; a peer that closed its connection died of something.
UNREACHABLE_TEXTS = ("timed out", "timeout", "no route to host", "network is unreachable")


def check_network(ranks: Ranks, run_dir: Path) -> NetworkCheck:
    """Return how the ranks reached each other; the first rank of each node has written it. Raises NetworkFailed."""
    dist.distributed_c10d._set_pg_timeout(CHECK_TIMEOUT, dist.group.WORLD)
    size_bytes = BYTES[ranks.device.type]
    ones = torch.ones(size_bytes // 4, device=ranks.device)
    began = time.perf_counter()
    dist.all_reduce(ones)
    if not bool((ones == ranks.world_size).all()):
        raise NetworkFailed(f"the sum of ones over {ranks.world_size} ranks came back as {float(ones[0])}")
    timed = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(ones.zero_())
    float(ones[0])
    ended = time.perf_counter()
    check = NetworkCheck(
        backend="nccl" if ranks.device.type == "cuda" else "gloo",
        world_size=ranks.world_size,
        seconds=round(ended - began, 3),
        bandwidth_gbps=round(bus_gbps(size_bytes, ranks.world_size, (ended - timed) / REPEATS), 3),
    )
    dist.distributed_c10d._set_pg_timeout(START_TIMEOUT, dist.group.WORLD)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        write_message(run_dir / "network.json", check)
    return check


def bus_gbps(size_bytes: int, world_size: int, seconds: float) -> float:
    """Return the Gbit/s that a node sends in an all-reduce: 2 (n - 1) / n of the data, as nccl-tests counts it."""
    return 8 * size_bytes * 2 * (world_size - 1) / world_size / seconds / 1e9


@contextmanager
def reachable() -> Iterator[None]:
    """Peers that never answer raise NetworkFailed; everything else passes as it is."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one
        if not any(text in str(error).lower() for text in UNREACHABLE_TEXTS):
            raise
        raise NetworkFailed(f"the ranks do not reach each other: {error}") from error
