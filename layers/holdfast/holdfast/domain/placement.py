"""Which machines to ask for, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CAPACITY_RETRY_S = 60
"""How long a job waits after every candidate was refused."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One CreateFleet call: one instance type and market, one zone of those allowed, all nodes or none."""

    instance_type: str
    market: str
    nodes: int
    zones: tuple[str, ...] = ()


def candidates(
    *, instance_types: Sequence[str], market: str, zones: Sequence[str], nodes: int
) -> tuple[Candidate, ...]:
    """Return the candidates in the user's order of types. No zones = any zone of the stack's subnets."""
    return tuple(
        Candidate(instance_type=kind, market=market, nodes=nodes, zones=tuple(zones)) for kind in instance_types
    )


def fleet_name(job: str, attempt: int, candidate: int) -> str:
    """Return the name under which a candidate is bought: tag, owner and idempotency token at once."""
    return f"{job}-{attempt}-{candidate}"
