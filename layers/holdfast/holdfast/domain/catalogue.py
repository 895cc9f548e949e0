"""What AWS offers, as data handed in: instance types, prices, quotas, free addresses. None of it is known by heart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NO_ACCELERATOR, NVIDIA = "", "nvidia"
EVERY_ZONE = "*"

ADDRESSES_PER_NODE = 1
"""A node takes one address: its EFA interfaces are of type efa-only, which have none."""


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """One type as EC2 describes it; `gpu_memory_bytes` is one GPU's, prices are US dollars an instance and hour.

    `zones` None = not known where it is offered. `spot_usd` is by zone. `network_gbps` is one card's without bursts.
    """

    name: str
    vcpus: int
    memory_bytes: int
    arch: str = "x86_64"
    accelerator: str = NO_ACCELERATOR
    gpus: int = 0
    gpu_name: str = ""
    gpu_memory_bytes: int = 0
    instance_store_bytes: int = 0
    efa_max: int = 0
    network_gbps: float = 0.0
    network_peak_gbps: float = 0.0
    markets: tuple[str, ...] = ("spot", "on_demand")
    zones: tuple[str, ...] | None = None
    spot_usd: Mapping[str, float] = field(default_factory=dict)
    on_demand_usd: float | None = None

    @property
    def ranks(self) -> int:
        """Ranks that a node runs: one a GPU, and one where there is none."""
        return max(1, self.gpus)

    def price(self, market: str, zones: Sequence[str] = ()) -> float | None:
        """Return the lowest price an hour in these zones (none = any), None when it is not known.

        Of a mixed gang that is the spot price: no node of it costs less.
        """
        if market == "on_demand":
            return self.on_demand_usd
        return min((usd for zone, usd in self.spot_usd.items() if not zones or zone in zones), default=None)


@dataclass(frozen=True, kw_only=True)
class Offers:
    """One look at AWS. `types` and `addresses` None = could not be read; `unread` says in words what and why.

    `quotas` holds vCPUs by quota code, where known; `addresses` the free ones by zone of the stack's subnets.
    """

    types: Mapping[str, InstanceType] | None = None
    quotas: Mapping[str, float] = field(default_factory=dict)
    addresses: Mapping[str, int] | None = None
    unread: tuple[str, ...] = ()

    def quota(self, code: str | None) -> float | None:
        return self.quotas.get(code) if code else None


def prices_of(offers: Offers, market: str) -> dict[tuple[str, str, str], float]:
    """Return US dollars of a node-hour by (instance type, zone, market); an on-demand price holds in EVERY_ZONE."""
    types = (offers.types or {}).values()
    if market == "spot":
        return {(kind.name, zone, market): usd for kind in types for zone, usd in kind.spot_usd.items()}
    return {(kind.name, EVERY_ZONE, market): kind.on_demand_usd for kind in types if kind.on_demand_usd is not None}


@dataclass(frozen=True, kw_only=True)
class Room:
    """One vCPU quota of the account, and what this stack uses of it."""

    code: str
    vcpus: int
    used: int = 0

    @property
    def free(self) -> int:
        return max(0, self.vcpus - self.used)


_QUOTAS: Mapping[tuple[str, str], str] = {
    ("standard", "on_demand"): "L-1216C47A",
    ("standard", "spot"): "L-34B43A08",
    ("g", "on_demand"): "L-DB2E81BA",
    ("g", "spot"): "L-3819A6DF",
    ("p", "on_demand"): "L-417A185B",
    ("p2-p4", "spot"): "L-7212CCBC",
    ("p5", "spot"): "L-C4BD4855",
}
_STANDARD = frozenset({"a", "c", "d", "h", "i", "m", "r", "t", "z", "im", "is"})


def quota_code(instance_type: str, market: str) -> str | None:
    """Return the code of the EC2 quota that counts this type's vCPUs, None where it is not known (P6 on spot).

    The quotas' own names list the families: "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests".
    """
    match = re.match(r"([a-z]+)(\d*)", instance_type)
    letters, number = match.groups() if match else ("", "")
    if market not in ("spot", "on_demand"):
        # A mixed gang, or a reservation, is counted by no single quota.
        return None
    if letters in _STANDARD:
        return _QUOTAS[("standard", market)]
    if letters in ("g", "gr", "vt"):
        return _QUOTAS[("g", market)]
    if letters == "p" and market == "spot":
        return _QUOTAS.get(("p5" if number == "5" else "p2-p4" if number in ("2", "3", "4") else "", market))
    return _QUOTAS[("p", market)] if letters == "p" else None
