"""What the ranks' first collective showed of the network: who carried it, and between which nodes it failed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from job_contract.orders import Roster

NCCL_LOGS = "nccl.*"
NCCL_LOG_BYTES = 1 << 20

# Releases of aws-ofi-nccl differ: `Selected Provider is efa (found`, `Selected provider is efa, fabric is`.
_PROVIDERS = (
    (re.compile(r"NET/OFI Selected provider is (\S+?)[,\s]", re.IGNORECASE), None),
    (re.compile(r"Using network (?:AWS )?Libfabric", re.IGNORECASE), "efa"),
    (re.compile(r"Using network IB\b", re.IGNORECASE), "ib"),
    (re.compile(r"Using network Socket", re.IGNORECASE), "tcp"),
)


def carrier(backend: str, logs: Path) -> str:
    """Return what carried the collective: gloo; with NCCL the provider that its log names, empty when it names none."""
    return backend if backend != "nccl" else provider_in(_texts(logs.glob(NCCL_LOGS)))


def provider_in(log: str) -> str:
    """Return the network that an NCCL log names: efa, tcp, ib, another of libfabric's, or empty."""
    for pattern, name in _PROVIDERS:
        if found := pattern.search(log + "\n"):
            return name or found[1].lower()
    return ""


def silent_peers(log: str, roster: Roster, node_rank: int) -> tuple[str, ...]:
    """Return the other nodes whose address stands in the log of a rank that reached nobody."""
    mine = {node.ip for node in roster.nodes if node.node_rank == node_rank}
    named = {node.instance: node.ip for node in roster.nodes if node.ip not in mine}
    return tuple(instance for instance, ip in named.items() if re.search(rf"(?<![\d.]){re.escape(ip)}(?![\d.])", log))


def _texts(files: Iterable[Path]) -> str:
    texts = []
    for file in sorted(files):
        with file.open("rb") as log:
            texts.append(log.read(NCCL_LOG_BYTES).decode(errors="replace"))
    return "\n".join(texts)
