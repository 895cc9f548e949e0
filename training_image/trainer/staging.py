"""The copy that a save writes from while the training goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Stager:
    """Copies in host memory, in buffers that live as long as the process: allocating them anew for each save costs
    more than the copy.

    The training calls `begin` when the state is to be saved and `fence` before it changes the state; the writer calls
    `copy` in between, in its own thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: dict[str, Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self) -> None:
        """The state as of now is what `copy` will copy; until `release` nothing may change it past `fence`."""
        self._copied.clear()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, tensors: dict[str, Tensor], names: Iterable[str]) -> None:
        """This rank's shards of the tensors named are in host memory, and the training may go past the fence."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for name in names:
                source = local(tensors[name]).detach()
                target = self.tensors.get(name)
                if target is None or target.shape != source.shape or target.dtype != source.dtype:
                    target = torch.empty(source.shape, dtype=source.dtype, pin_memory=self._stream is not None)
                    self.tensors[name] = target
                target.copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        self.release()

    def release(self) -> None:
        """Nobody waits at the fence: the copy is made, or will not be."""
        self._copied.set()

    @property
    def copying(self) -> bool:
        return not self._copied.is_set()

    def fence(self) -> None:
        """The state may be changed."""
        self._copied.wait()
