"""Whole tensors out of a committed save, to compare what two trainings hold bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from trainer.checkpoint import LoadPlanner, VerifiedReader, read_metadata


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every parameter and moment of the save, unsharded."""
    metadata = read_metadata(folder / ".metadata")
    tensors = {
        name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in metadata.state_dict_metadata.items()
    }
    dcp.load(tensors, storage_reader=VerifiedReader(folder, metadata), planner=LoadPlanner(), no_dist=True)
    return tensors


def state_sha256(folder: Path, part: str = "") -> str:
    """Return one digest over the bytes of all parameters and moments of the save whose names begin with `part`."""
    digest = hashlib.sha256()
    for name, tensor in sorted(whole_tensors(folder).items()):
        if not name.startswith(part):
            continue
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
