"""NVIDIA's Xid errors in the kernel log, and what each asks of a gang. One table for nodes and supervisor.

Policy: the health check of AWS's distributed-training samples, which follows NVIDIA's catalogue for driver branch 590.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

REPLACE_XIDS: Mapping[int, str] = {
    48: "double-bit ECC error",
    54: "auxiliary power is missing",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timed out",
    110: "security fault",
    119: "GPU system processor timed out",
    120: "GPU system processor error",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "GPU initialisation failed",
    151: "key rotation error",
    155: "NVLink software error",
    156: "resource retirement",
    158: "GPU fatal timeout",
    165: "the driver asks for another GPU",
    168: "the GPU needs a reboot",
}
"""The driver's errors after which a gang replaces the node: a reset or a reboot costs more than another machine."""

PROGRAM_XIDS = frozenset({13, 31, 43, 45, 94, 126})
"""Errors that a program causes on healthy hardware: the log says which, and the node is kept."""

TOLD_BY_TEXT_XID = 154
"""`GPU recovery action changed`: the text of the line says what the driver wants."""

XID = re.compile(r"Xid \(PCI:([^)]*)\):\s*(\d+)\b.*")
NEEDS_REPLACING = re.compile(r"Node Reboot Required|GPU Reset Required", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Xid:
    """One error: of which GPU (PCI address), its number, the line, and why the node must go (empty: it may stay)."""

    gpu: str
    number: int
    line: str
    replace: str = ""


def xids_in(lines: Iterable[str]) -> Iterator[Xid]:
    """Yield the errors of these lines of a kernel log, in order."""
    for line in lines:
        if found := XID.search(line):
            number = int(found[2])
            told = number == TOLD_BY_TEXT_XID and NEEDS_REPLACING.search(found[0])
            why = REPLACE_XIDS.get(number, "the driver wants a reset" if told else "")
            yield Xid(gpu=found[1], number=number, line=found[0].strip(), replace=why)
