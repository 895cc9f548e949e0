"""How a rank ends without success, as exit codes that the agent reads: see `job_contract.node_files.EXIT_CODES`."""

from __future__ import annotations

import torch
from torch import distributed as dist

from job_contract.node_files import EXIT_CODES

CODE_OF = {name: code for code, name in EXIT_CODES.items()}
CRASH = 1

# gloo raises a plain RuntimeError for a lost peer, so its text is all there is to go by (torch 2.13).
PEER_LOST_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "Socket Timeout",
)


# How torch's CPU allocator says so, in a plain RuntimeError (torch 2.13).
NO_MEMORY_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
WAYS_OUT = (
    "use more nodes (fleet.nodes), a bigger type (fleet.instance_types), "
    "training.activation_checkpointing full, or a smaller training.micro_batch"
)


class Ending(Exception):
    """An expected end without success; the text is for the user."""

    name = ""


class BadCheckpoint(Ending):
    """No save that the job was told to resume from could be restored."""

    name = "bad_checkpoint"


class Diverged(Ending):
    """The loss or the gradient stayed non-finite."""

    name = "diverged"


class NetworkFailed(Ending):
    """The ranks did not reach each other when they started."""

    name = "network"


class UserError(Ending):
    """The spec asks for what cannot be done, or does not fit the save it is resumed from."""

    name = "user_error"


def out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the host had too little memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY_TEXTS)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code that tells the agent what `error` means; 1 for everything unexpected."""
    if isinstance(error, Ending):
        return CODE_OF[error.name]
    if out_of_memory(error):
        return CODE_OF["out_of_memory"]
    if isinstance(error, dist.DistError):
        return CODE_OF["peer_lost"]
    if isinstance(error, RuntimeError) and any(text in str(error) for text in PEER_LOST_TEXTS):
        return CODE_OF["peer_lost"]
    return CRASH
