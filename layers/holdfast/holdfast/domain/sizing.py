"""A request on one instance type: what it needs, and what there is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from holdfast.domain.catalogue import ADDRESSES_PER_NODE, InstanceType, Offers, quota_code
from holdfast.domain.estimate import (
    GIB,
    HOST_RESERVE_BYTES,
    NETWORK_USE,
    ROOT_FREE_BYTES,
    SAVES_ON_DISK,
    Pace,
    activation_bytes,
    flops_per_token,
    pace,
    parameters,
    save_bytes_per_node,
    staged_bytes_per_node,
    state_bytes,
)
from job_contract.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a request says that a plan asks for; `zones` () = any, `min_nodes` = `nodes` where not asked for.

    `brought_bytes` is what a node keeps of data on its disk.
    """

    nodes: int
    min_nodes: int
    instance_types: tuple[str, ...]
    market: str
    zones: tuple[str, ...]
    model: ModelSpec
    steps: int
    global_batch: int
    sequence_length: int
    micro_batch: int | None
    parallel: str
    precision: str
    interval_steps: int | None
    interval_s: float | None
    attempts: int
    run_s: int
    budget_usd: float | None = None
    finish_by_at: float | None = None
    own_image: bool = False
    checkpointing: str = "none"
    trained: int | None = None
    brought_bytes: int = 0


@dataclass(frozen=True)
class Note:
    """One refusal or warning: a code of `domain.refusals`, and a sentence with the values and the way out."""

    code: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to run the job, for the whole gang. None = not known."""

    instance_type: str
    market: str
    zones: tuple[str, ...]
    parallel: str
    usd_per_h: float | None = None
    gpu_name: str = ""
    ranks: int | None = None
    vcpus: int | None = None
    quota_vcpus: float | None = None
    addresses: int = 0
    memory_need_bytes: int | None = None
    memory_bytes: int | None = None
    host_need_bytes: int | None = None
    host_bytes: int | None = None
    disk_need_bytes: int | None = None
    disk_bytes: int | None = None
    save_bytes: int | None = None
    save_s: float | None = None
    interval_s: float | None = None
    shortest_run_s: float | None = None
    usual_run_s: float | None = None
    usual_usd: float | None = None
    reasons: tuple[str, ...] = ()


class Sized:
    """A request on one instance type: what it needs and what there is."""

    def __init__(self, asked: PlanRequest, offers: Offers, kind: InstanceType, parallel: str, now: float) -> None:
        self.asked, self.offers, self.kind, self.parallel, self.now = asked, offers, kind, parallel, now
        self.ranks = asked.nodes * kind.ranks
        self.half = asked.precision == "bf16" or (asked.precision == "auto" and kind.gpus > 0)
        self.share = -(-asked.global_batch // self.ranks)
        self.micro_batch = min(asked.micro_batch or self.share, self.share)
        self.trained = parameters(asked.model) if asked.trained is None else asked.trained
        self.save_bytes = save_bytes_per_node(self.trained, asked.nodes)

    @cached_property
    def zones(self) -> tuple[str, ...]:
        """Zones that are allowed, have a subnet and offer the type, cheapest first; () = not known, so any."""
        known = self.offers.addresses
        allowed = self.asked.zones or (tuple(sorted(known)) if known is not None else ())
        here = [zone for zone in allowed if known is None or zone in known]
        offered = self.kind.zones
        if offered is not None:
            here = [zone for zone in (here or (sorted(offered) if not allowed else ())) if zone in offered]
        return tuple(sorted(here, key=lambda zone: (self.kind.spot_usd.get(zone, float("inf")), zone)))

    @property
    def memory_bytes(self) -> int:
        """What one rank may use: its GPU's, or the node's own less what the system needs."""
        if self.kind.gpus:
            return self.kind.gpu_memory_bytes
        return self.kind.memory_bytes - min(HOST_RESERVE_BYTES, self.kind.memory_bytes // 4)

    def state_bytes(self, nodes: int) -> int:
        sharing = self.kind.ranks * (1 if self.parallel == "hsdp" else nodes)
        return self.shared_state_bytes(self.parallel, sharing)

    def shared_state_bytes(self, parallel: str, ranks: int) -> int:
        """Return what one of the ranks that share a replica holds."""
        all_trained = self.asked.trained is None or self.asked.trained == parameters(self.asked.model)
        trained = None if all_trained else self.trained
        return state_bytes(self.asked.model, parallel, ranks, half=self.half, trained=trained)

    def activation_bytes(self, sequences: int, checkpointing: str | None = None) -> int:
        return activation_bytes(
            self.asked.model,
            self.asked.sequence_length,
            sequences,
            half=self.half,
            checkpointing=checkpointing or self.asked.checkpointing,
        )

    @property
    def memory_need_bytes(self) -> int:
        return self.state_bytes(self.asked.nodes) + self.activation_bytes(self.micro_batch)

    @property
    def staged_bytes(self) -> int:
        return staged_bytes_per_node(self.trained, self.parallel, self.asked.nodes)

    @property
    def host_need_bytes(self) -> int:
        """What a node needs so that saves are staged in host memory; without GPUs the training is there as well."""
        reserve = min(HOST_RESERVE_BYTES, self.kind.memory_bytes // 4)
        return self.staged_bytes + reserve + (0 if self.kind.gpus else self.memory_need_bytes)

    @property
    def disk_bytes(self) -> int:
        return self.kind.instance_store_bytes or ROOT_FREE_BYTES

    @property
    def disk_need_bytes(self) -> int:
        return SAVES_ON_DISK * self.save_bytes + self.asked.brought_bytes

    @cached_property
    def pace(self) -> Pace | None:
        kind = self.kind
        return pace(vcpus=kind.vcpus, gpus=kind.gpus, gpu_name=kind.gpu_name, nodes=self.asked.nodes)

    @property
    def step_flops(self) -> float:
        asked = self.asked
        return asked.global_batch * asked.sequence_length * flops_per_token(asked.model, asked.sequence_length)

    def step_s(self, rate: Callable[[Pace], float]) -> float | None:
        return self.step_flops / rate(self.pace) if self.pace else None

    def run_s(self, rate: Callable[[Pace], float]) -> float | None:
        step_s = self.step_s(rate)
        return None if step_s is None else step_s * self.asked.steps

    @property
    def shortest_run_s(self) -> float | None:
        return self.run_s(lambda pace: pace.best)

    @property
    def usual_run_s(self) -> float | None:
        return self.run_s(lambda pace: pace.usual)

    def interval_s(self, rate: Callable[[Pace], float]) -> float | None:
        """Seconds between periodic saves, where steps take as long as at this rate."""
        if self.asked.interval_steps is None:
            return self.asked.interval_s
        step_s = self.step_s(rate)
        return None if step_s is None else step_s * self.asked.interval_steps

    @property
    def save_s(self) -> float | None:
        """Seconds until a save is durable, at the share of the network that an upload usually reaches."""
        gbps = self.kind.network_gbps
        return self.save_bytes * 8 / (gbps * 1e9 * NETWORK_USE) if gbps else None

    @property
    def shortest_save_s(self) -> float | None:
        gbps = self.kind.network_peak_gbps or self.kind.network_gbps
        return self.save_bytes * 8 / (gbps * 1e9) if gbps else None

    @property
    def usd_per_h(self) -> float | None:
        price = self.kind.price(self.asked.market, self.zones)
        return None if price is None else price * self.asked.nodes

    def usd(self, seconds: float | None) -> float | None:
        return None if seconds is None or self.usd_per_h is None else self.usd_per_h * seconds / 3600

    @property
    def vcpus(self) -> int:
        return self.kind.vcpus * self.asked.nodes

    @property
    def quota(self) -> float | None:
        return self.offers.quota(quota_code(self.kind.name, self.asked.market))

    @property
    def gang(self) -> str:
        return f"{self.asked.nodes} x {self.kind.name}"

    def option(self) -> Option:
        return Option(
            instance_type=self.kind.name,
            market=self.asked.market,
            zones=self.zones,
            parallel=self.parallel,
            usd_per_h=self.usd_per_h,
            gpu_name=self.kind.gpu_name,
            ranks=self.ranks,
            vcpus=self.vcpus,
            quota_vcpus=self.quota,
            addresses=self.asked.nodes * ADDRESSES_PER_NODE,
            memory_need_bytes=self.memory_need_bytes,
            memory_bytes=self.memory_bytes,
            host_need_bytes=self.host_need_bytes,
            host_bytes=self.kind.memory_bytes,
            disk_need_bytes=self.disk_need_bytes,
            disk_bytes=self.disk_bytes,
            save_bytes=self.save_bytes * self.asked.nodes,
            save_s=self.save_s,
            interval_s=self.interval_s(lambda pace: pace.usual),
            shortest_run_s=self.shortest_run_s,
            usual_run_s=self.usual_run_s,
            usual_usd=self.usd(self.usual_run_s),
            reasons=tuple(self._reasons()),
        )

    def _reasons(self) -> list[str]:
        place = self.asked.instance_types.index(self.kind.name) + 1
        where = f"{self.kind.gpus} x {self.kind.gpu_name} a node" if self.kind.gpus else "no GPU: one rank a node, gloo"
        need, there = gib(self.memory_need_bytes), gib(self.memory_bytes)
        replica = gib(self._replica_bytes)
        why = f"a whole replica takes {replica} of {there}" if self.asked.parallel == "auto" else "as asked for"
        return [
            f"choice {place} of the request",
            where,
            f"{need} of {there} a rank",
            f"{self.parallel}: {why}",
            f"a node stages {gib(self.staged_bytes)} of a save in its memory, and has {gib(self.kind.memory_bytes)}",
        ]

    @property
    def _replica_bytes(self) -> int:
        return self.shared_state_bytes("ddp", 1) + self.activation_bytes(self.micro_batch)


def gib(size_bytes: float) -> str:
    """Return a size in words."""
    return f"{size_bytes / GIB:,.1f} GiB" if size_bytes >= GIB / 10 else f"{size_bytes / 1024**2:,.1f} MiB"


def length(seconds: float) -> str:
    """Return a length of time in words."""
    if seconds >= 2 * 86_400:
        return f"{seconds / 86_400:,.1f} days"
    if seconds >= 2 * 3_600:
        return f"{seconds / 3_600:,.1f} h"
    return f"{seconds / 60:,.1f} min" if seconds >= 120 else f"{seconds:,.1f} s"
