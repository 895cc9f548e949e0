"""Judges the fleet that checked in, and gives every node its rank."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.domain.ownership import Node, Ready
from holdfast.domain.placement import CLUSTER, MIXED, ON_DEMAND, SPOT, Pool, reserved
from holdfast.domain.purchase import Expected, Purchase
from job_contract.orders import Leader, Roster, RosterNode
from job_contract.version import canonical_json, encode

GATE_RETRY_S = 60
QUARANTINE_S = 4 * 3600.0
"""How long a machine that was found bad is refused when it comes back."""

BAD_POOL_COOL_S = 300.0
CLOCK_LIMIT_S = 2.0
"""Deadlines of notices and heartbeats are compared across nodes."""

DRIVER_FLOOR = (525, 60, 13)
"""Below it no CUDA 12 runs at all (NVIDIA's CUDA release notes, table of minor version compatibility)."""

DRIVER_FLOORS = {"p6": (570, 86)}
"""By family of instance types: the first branch of the driver that knows Blackwell GPUs."""

DISK_FLOOR_GB = 2
"""Less cannot hold the local copy of any checkpoint, nor the logs of the ranks."""

BANDWIDTH_FLOOR = 0.5
"""A short all-reduce reaches more than half of what the cards of a type can carry."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Why the ranks must not start. `bad` nodes are to be remembered; none where no single node is at fault.

    `failure` is the class that the attempt is charged to.
    """

    code: str
    sentence: str
    bad: tuple[str, ...] = ()
    failure: str = "capacity"


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """A machine that was found bad, by what AWS or its devices say of it; an instance id is gone with the instance."""

    host: str
    until: float
    reason: str


Checked = tuple[Node, Ready]


def judge(
    nodes: Sequence[Node], expected: Expected | None = None, quarantined: Mapping[str, Quarantined] | None = None
) -> Finding | None:
    """Return the first thing that is wrong with the topology, None when the ranks may start."""
    ready = [(node, node.ready) for node in nodes if node.ready is not None]
    checks: list[Callable[[], Finding | None]] = [
        lambda: _zones(ready, expected),
        lambda: _types(ready, expected),
        lambda: _groups(ready, expected),
        lambda: _gpus(ready, expected),
        lambda: _efas(ready, expected),
        lambda: _providers(ready, expected),
        lambda: _old_drivers(ready, expected),
        lambda: _drivers(ready),
        lambda: _disks(ready),
        lambda: _links(ready, expected),
        lambda: _clocks(ready),
        # Last: a machine that repeats its first report is told the same again, not that it is in quarantine by now.
        lambda: _hosts(ready, quarantined or {}),
    ]
    return next((found for check in checks if (found := check()) is not None), None)


def refusal(nodes: Sequence[Node]) -> str | None:
    """Return what is wrong with the topology as such, None when the ranks may start."""
    found = judge(nodes)
    return found.sentence if found else None


def judge_network(instance: str, provider: str, gbps: float | None, expected: Expected | None) -> Finding | None:
    """Return what is wrong with the network that the preflight group used, None when it is the one that was bought."""
    if expected is None or not expected.efas:
        return None
    if provider != "efa":
        return Finding(
            code="provider",
            sentence=(
                f"the nodes talk over {provider or 'an unknown provider'}, not EFA, though {expected.instance_type} "
                f"has {expected.efas} EFA devices; the image lacks libfabric's EFA provider or gets no devices"
            ),
            failure="hardware",
        )
    floor = expected.efa_gbps * BANDWIDTH_FLOOR
    if gbps is not None and gbps < floor:
        return Finding(
            code="bandwidth",
            sentence=(
                f"the preflight on {instance} reached {gbps:.0f} Gbps of {expected.efa_gbps:.0f}; "
                f"below {floor:.0f} a rail is broken or the nodes are far apart"
            ),
            bad=(instance,),
            failure="hardware",
        )
    return None


def pools_at_fault(purchase: Purchase, zone: str) -> list[Pool]:
    """Return the pools to leave alone after a bad node: the next instance may land on the same machine."""
    if purchase.reservation:
        return [Pool(instance_type=purchase.instance_type, zone=zone, market=reserved(purchase.reservation))]
    grouped = any(place.group for place in purchase.places if place.zone == zone)
    return [
        Pool(instance_type=purchase.instance_type, zone=zone, market=market, group=CLUSTER if grouped else "")
        for market in ((SPOT, ON_DEMAND) if purchase.market == MIXED else (purchase.market,))
    ]


def _zones(ready: Sequence[Checked], expected: Expected | None) -> Finding | None:
    zones = sorted({facts.zone for _, facts in ready})
    if len(zones) > 1:
        listed = ", ".join(zones)
        return Finding(code="zones", sentence=f"the nodes are in {len(zones)} zones ({listed}); a gang needs one")
    if expected and expected.zones and zones and zones[0] not in expected.zones:
        asked = ", ".join(expected.zones)
        return Finding(code="zone", sentence=f"the nodes are in {zones[0]}, asked for was {asked}")
    return None


def _types(ready: Sequence[Checked], expected: Expected | None) -> Finding | None:
    types = sorted({facts.instance_type for _, facts in ready})
    if len(types) > 1:
        listed = ", ".join(types)
        return Finding(code="types", sentence=f"the nodes are of {len(types)} types ({listed}); a gang needs one")
    if expected and types and types[0] != expected.instance_type:
        return Finding(code="type", sentence=f"the nodes are {types[0]}, asked for was {expected.instance_type}")
    return None


def _groups(ready: Sequence[Checked], expected: Expected | None) -> Finding | None:
    told = {facts.placement_group for _, facts in ready if facts.placement_group is not None}
    if len(told) > 1:
        listed = ", ".join(sorted(group or "none" for group in told))
        return Finding(code="groups", sentence=f"the nodes are in different placement groups ({listed})")
    if expected and expected.group and told and expected.group not in told:
        return Finding(
            code="group",
            sentence=f"the nodes are in placement group {told.pop() or 'none'}, asked for was {expected.group}",
        )
    return None


def _hosts(ready: Sequence[Checked], quarantined: Mapping[str, Quarantined]) -> Finding | None:
    known = [(node, quarantined[facts.host]) for node, facts in ready if facts.host and facts.host in quarantined]
    if not known:
        return None
    node, before = known[0]
    return Finding(
        code="quarantined",
        sentence=f"{node.instance} is a machine that was found bad before ({before.reason})",
        bad=tuple(node.instance for node, _ in known),
    )


def _gpus(ready: Sequence[Checked], expected: Expected | None) -> Finding | None:
    wanted = expected.gpus if expected else 0
    fewer = [(node, facts) for node, facts in ready if facts.gpus < wanted]
    if fewer:
        listed = ", ".join(f"{node.instance} sees {facts.gpus}" for node, facts in fewer[:5])
        return Finding(
            code="gpus_missing",
            sentence=f"{_of(ready)} has {wanted} GPUs, but {listed}; one fell off the bus or the driver is not up",
            bad=_odd_ones(fewer, ready),
            failure="hardware",
        )
    counts = sorted({facts.gpus for _, facts in ready})
    if len(counts) > 1:
        listed = ", ".join(map(str, counts))
        return Finding(
            code="gpus",
            sentence=f"the nodes see different numbers of GPUs ({listed}); one of them is broken",
            bad=tuple(node.instance for node, facts in ready if facts.gpus < counts[-1]),
            failure="hardware",
        )
    return None


def _efas(ready: Sequence[Checked], expected: Expected | None) -> Finding | None:
    wanted = expected.efas if expected else 0
    fewer = [(node, facts) for node, facts in ready if facts.efa_devices < wanted]
    if fewer:
        listed = ", ".join(f"{node.instance} has {facts.efa_devices}" for node, facts in fewer[:5])
        why = (
            "the launch template or the image's driver leaves them out"
            if len(fewer) == len(ready)
            else "one card did not come up"
        )
        return Finding(
            code="efa_missing",
            sentence=f"{_of(ready)} has {wanted} EFA devices, but {listed}; {why}",
            bad=_odd_ones(fewer, ready),
            failure="hardware",
        )
    counts = sorted({facts.efa_devices for _, facts in ready})
    if len(counts) > 1:
        listed = ", ".join(map(str, counts))
        return Finding(
            code="efas",
            sentence=f"the nodes have different numbers of EFA devices ({listed}); one card did not come up",
            bad=tuple(node.instance for node, facts in ready if facts.efa_devices < counts[-1]),
            failure="hardware",
        )
    return None


def _providers(ready: Sequence[Checked], expected: Expected | None) -> Finding | None:
    if expected is None or not expected.efas:
        return None
    without = [(node, facts) for node, facts in ready if facts.efa_provider not in (None, "efa")]
    if not without:
        return None
    listed = ", ".join(f"{node.instance} has {facts.efa_provider or 'none'}" for node, facts in without[:5])
    return Finding(
        code="efa_provider",
        sentence=f"libfabric must offer the provider efa, but {listed}; the image lacks the EFA installer's libfabric",
        bad=_odd_ones(without, ready),
        failure="hardware",
    )


def _old_drivers(ready: Sequence[Checked], expected: Expected | None) -> Finding | None:
    old = [
        (node, facts) for node, facts in ready if facts.driver and version(facts.driver) < driver_floor(facts, expected)
    ]
    if not old:
        return None
    listed = ", ".join(f"{node.instance} {facts.driver}" for node, facts in old[:5])
    floor = ".".join(f"{number:02d}" for number in driver_floor(old[0][1], expected))
    return Finding(
        code="driver_old",
        sentence=f"GPU drivers are too old: {listed}; {_of(ready)} needs {floor} or later: take a newer machine image",
        bad=_odd_ones(old, ready),
        failure="hardware",
    )


def driver_floor(facts: Ready, expected: Expected | None) -> tuple[int, ...]:
    """Return the oldest driver that the node's type, and the stack's image where it is used, can do with."""
    family = facts.instance_type.partition(".")[0].partition("-")[0]
    return max(DRIVER_FLOORS.get(family, DRIVER_FLOOR), version(expected.driver) if expected else ())


def version(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 580.95.05 is (580, 95, 5)."""
    return tuple(int(part) for part in re.match(r"[0-9.]{0,30}", text)[0].split(".") if part)  # type: ignore[index]


def _disks(ready: Sequence[Checked]) -> Finding | None:
    full = [(node, facts.disk_free_gb) for node, facts in ready if facts.disk_free_gb is not None]
    full = [(node, free) for node, free in full if free is not None and free < DISK_FLOOR_GB]
    if not full:
        return None
    listed = ", ".join(f"{node.instance} has {free} GB" for node, free in full[:5])
    return Finding(
        code="disk_full",
        sentence=(
            f"local disks are full: {listed} free, needed are {DISK_FLOOR_GB}; "
            "mount the instance store, or give the volume more room"
        ),
        bad=tuple(node.instance for node, _ in full) if len(full) < len(ready) else (),
        failure="hardware",
    )


def _drivers(ready: Sequence[Checked]) -> Finding | None:
    drivers = Counter(facts.driver for _, facts in ready if facts.driver)
    if len(drivers) < 2:
        return None
    usual = drivers.most_common(1)[0][0]
    return Finding(
        code="drivers",
        sentence=f"the nodes run different GPU drivers ({', '.join(sorted(drivers))}); one image serves all",
        bad=tuple(node.instance for node, facts in ready if facts.driver and facts.driver != usual),
        failure="hardware",
    )


def _links(ready: Sequence[Checked], expected: Expected | None) -> Finding | None:
    floor = expected.efa_gbps * BANDWIDTH_FLOOR if expected else 0.0
    slow = [(node, facts.bandwidth_gbps) for node, facts in ready if facts.bandwidth_gbps is not None]
    slow = [(node, gbps) for node, gbps in slow if gbps is not None and gbps < floor]
    if not slow:
        return None
    listed = ", ".join(f"{node.instance} {gbps:.0f}" for node, gbps in slow[:5])
    return Finding(
        code="links",
        sentence=f"links are slow: {listed} Gbps, expected are at least {floor:.0f}",
        bad=tuple(node.instance for node, _ in slow),
        failure="hardware",
    )


def _clocks(ready: Sequence[Checked]) -> Finding | None:
    off = [(node, facts) for node, facts in ready if abs(facts.clock_offset_s) > CLOCK_LIMIT_S]
    if not off:
        return None
    listed = ", ".join(f"{node.instance} {facts.clock_offset_s:+.0f} s" for node, facts in off[:5])
    return Finding(
        code="clocks",
        sentence=f"clocks are off: {listed}; deadlines need them within {CLOCK_LIMIT_S:.0f} s, so let chrony run",
        bad=_odd_ones(off, ready),
        failure="hardware",
    )


def _odd_ones(wrong: Sequence[Checked], ready: Sequence[Checked]) -> tuple[str, ...]:
    """The nodes to remember; none where all of several are wrong alike, which an image does and no machine."""
    return () if len(wrong) == len(ready) > 1 else tuple(node.instance for node, _ in wrong)


def _of(ready: Iterable[Checked]) -> str:
    return next((facts.instance_type for _, facts in ready), "the type")


def make_roster(job: str, attempt: int, nodes: Sequence[Node], before: Roster | None) -> Roster:
    """Return the roster of an attempt: survivors keep their ranks, the others take the vacant ones, on-demand first.

    So the leader of a mixed gang is on demand. The same nodes give the same roster, whoever makes it: its id is the
    digest of its content.
    """
    kept = {node.instance: before.rank_of(node.instance) for node in nodes} if before else {}
    taken = {rank for rank in kept.values() if rank is not None and rank < len(nodes)}
    vacant = iter(rank for rank in range(len(nodes)) if rank not in taken)
    ranked = {}
    for node in sorted(nodes, key=lambda node: (node.market != ON_DEMAND, node.instance)):
        rank = kept.get(node.instance)
        ranked[rank if rank in taken else next(vacant)] = node
    members, leader = [], None
    for rank, node in sorted(ranked.items()):
        if node.ready is None:
            raise ValueError(f"{node.instance} has not checked in")
        members.append(RosterNode(node_rank=rank, instance=node.instance, ip=node.ready.ip))
        leader = leader or Leader(ip=node.ready.ip, port=node.ready.port)
    if leader is None:
        raise ValueError(f"no nodes for {job}")
    draft = Roster(job=job, attempt=attempt, roster_id="", nodes=tuple(members), leader=leader)
    digest = hashlib.sha256(canonical_json(encode(draft))).hexdigest()[:12]
    return Roster(job=job, attempt=attempt, roster_id=f"{attempt}-{digest}", nodes=draft.nodes, leader=leader)
