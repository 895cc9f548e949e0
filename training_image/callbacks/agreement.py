"""What the ranks agree on, over a group of its own, so that no collective of the framework is in its way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed as dist

from job_contract.rank import Agree


def agreement() -> Agree:
    """Return an Agree of all ranks of torch's default process group. Every rank calls it, once that group is there."""
    group = dist.new_group(backend="gloo")

    def agree(numbers: Sequence[int]) -> list[int]:
        flags = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        return [int(number) for number in flags]

    return agree
