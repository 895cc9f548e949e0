"""Orders to the ranks: read from control.json on each node, agreed between all ranks at every micro-step.

Each rank may see an order at another moment, or not at all (a doomed node starts its checkpoint alone). What counts is
the maximum over all ranks: one int64, so that a later generation always wins.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed as dist

from job_contract.node_files import Control, ControlKind, read_message
from trainer.metrics import Journal

KINDS = (ControlKind.NONE, ControlKind.CHECKPOINT, ControlKind.CHECKPOINT_STOP, ControlKind.STOP)
ENDS = (ControlKind.CHECKPOINT_STOP, ControlKind.STOP)


@dataclass(frozen=True)
class Order:
    """What all ranks have agreed to do; `doomed` are the node ranks that any of them knows to be under notice."""

    generation: int
    kind: ControlKind
    doomed: tuple[int, ...] = ()


class ControlFile:
    """control.json of this node. Looking costs one stat while it has not changed."""

    def __init__(self, run_dir: Path, attempt: int, journal: Journal) -> None:
        self.path, self.attempt, self.journal = run_dir / "control.json", attempt, journal
        self._seen: tuple[int, int] | None = None
        self._control = Control(attempt=attempt, generation=0)

    def read(self) -> Control:
        """Return the newest order for this attempt; an empty one before the first."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return self._control
        version = (status.st_ino, status.st_mtime_ns)
        if version != self._seen:
            self._seen = version
            self._take(read_message(self.path, Control))
        return self._control

    def _take(self, control: Control | None) -> None:
        if control is None or control.attempt != self.attempt or value_of(control) <= value_of(self._control):
            return
        self._control = control
        if control.kind is not ControlKind.NONE:
            self.journal.event("signal", generation=control.generation, kind=control.kind.value)


def value_of(control: Control) -> int:
    """Return the order as one number: of two, the larger is the one to follow."""
    return control.generation * len(KINDS) + KINDS.index(control.kind)


class Agreement:
    """The ranks' common answer to «is there an order?». Every rank calls `start` and `finish` in turn."""

    def __init__(self, control: ControlFile, group: dist.ProcessGroup, nodes: int, node_rank: int = 0) -> None:
        self.control, self.group, self.nodes, self.node_rank = control, group, nodes, node_rank
        self.answered = 0
        self.save_due = False
        self.data_lacking = False
        self.node_ms: tuple[float, ...] = (0.0,) * nodes
        self._flags = torch.zeros(3 + nodes, dtype=torch.int64)

    def start(self, *, save_due: bool = False, data_lacking: bool = False, own_ms: float = 0.0) -> None:
        """The exchange of what each rank knows is under way, beside the training's own traffic."""
        self._flags.zero_()
        self._flags[0] = value_of(self.control.read())
        self._flags[1], self._flags[2] = int(save_due), int(data_lacking)
        # The maximum over all ranks leaves the slowest rank of each node in the node's own place.
        self._flags[3 + self.node_rank] = round(1000 * own_ms)
        self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def finish(self) -> Order | None:
        """Return an order that was not answered yet; `save_due` and `data_lacking` hold if they do for any rank.

        `node_ms` is the own time of each node's slowest rank, as the ranks gave it to `start`.
        """
        self._work.wait()
        value, due, lacking, *node_us = self._flags.tolist()
        self.node_ms = tuple(us / 1000 for us in node_us)
        self.save_due, self.data_lacking = bool(due), bool(lacking)
        kind = KINDS[value % len(KINDS)]
        if value <= self.answered or kind is ControlKind.NONE:
            return None
        self.answered = value
        return Order(generation=value // len(KINDS), kind=kind, doomed=self._doomed())

    def now(self, *, data_lacking: bool = False) -> Order | None:
        """Return what all ranks agree on at once."""
        self.start(data_lacking=data_lacking)
        return self.finish()

    def _doomed(self) -> tuple[int, ...]:
        known = torch.zeros(self.nodes, dtype=torch.int64)
        known[[node for node in self.control.read().doomed if node < self.nodes]] = 1
        dist.all_reduce(known, op=dist.ReduceOp.MAX, group=self.group)
        return tuple(known.nonzero().flatten().tolist())
