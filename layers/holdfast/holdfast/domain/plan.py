"""A request against what AWS offers -> what it would run on, at what price, and what speaks against it.

A plan refuses what cannot work: every refusal stands on a fact, or on an estimate that is a bound. What is only likely
is a warning. A fact that is not known is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.domain.catalogue import ADDRESSES_PER_NODE, InstanceType, Offers
from holdfast.domain.estimate import LARGE_PARAMETERS, SAVES_ON_DISK, parameters
from holdfast.domain.plan_checks import CHECKS, LOOKS
from holdfast.domain.sizing import Note, Option, PlanRequest, Sized

EASY_SHARE = 0.8
"""`auto` takes the mode with the least traffic whose replica fits into this share of the memory of what holds it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`options` are in the order in which they are tried; `refusal` None = the job can be queued."""

    parameters: int
    parallel: str
    options: tuple[Option, ...] = ()
    warnings: tuple[Note, ...] = ()
    refusal: Note | None = None


def plan(asked: PlanRequest, offers: Offers, *, now: float) -> Plan:
    """Return what the request would run on; the same for the same arguments."""
    weights = parameters(asked.model)
    warnings = [Note("fact_unknown", text) for text in offers.unread]
    parallel = _parallel(asked, offers)
    whole = _first(asked, offers, _WHOLE)
    if whole is not None:
        return Plan(parameters=weights, parallel=parallel, warnings=tuple(warnings), refusal=whole)
    options, dropped = [], []
    for name in asked.instance_types:
        kind = offers.types.get(name) if offers.types is not None else None
        if kind is None:
            options.append(_unknown(asked, name, parallel))
            continue
        sized = Sized(asked, offers, kind, parallel, now)
        fault = next((found for check in CHECKS if (found := check(sized)) is not None), None)
        if fault is not None:
            dropped.append((name, fault))
            continue
        options.append(sized.option())
        warnings += [found for look in LOOKS if (found := look(sized)) is not None]
    if not options:
        return Plan(
            parameters=weights, parallel=parallel, warnings=tuple(_distinct(warnings)), refusal=_all_dropped(dropped)
        )
    warnings += [Note("candidate_dropped", f"{name} is left out: {fault.text}") for name, fault in dropped]
    warnings += _whole_warnings(asked, offers)
    return Plan(parameters=weights, parallel=parallel, options=tuple(options), warnings=tuple(_distinct(warnings)))


def _parallel(asked: PlanRequest, offers: Offers) -> str:
    """Return ddp, hsdp or fsdp, one for all candidates: the spec of a job is the same wherever it runs."""
    if asked.parallel != "auto":
        return asked.parallel
    kinds = _kinds(asked, offers)
    if not kinds or len(kinds) < len(asked.instance_types):
        return "fsdp"
    if all(_fits_easily(Sized(asked, offers, kind, "ddp", 0.0)) for kind in kinds):
        return "ddp"
    # With one rank a node a replica is a rank's, which is DDP; with one node it is the gang's, which is FSDP.
    inside = asked.nodes > 1 and all(kind.ranks > 1 for kind in kinds)
    return "hsdp" if inside and all(_fits_easily(Sized(asked, offers, kind, "hsdp", 0.0)) for kind in kinds) else "fsdp"


def _fits_easily(on: Sized) -> bool:
    """Return whether a replica fits the devices that hold it, a copy of it the host's memory, and its saves the disk.

    The disk of one node holds the saves of a whole replica when the other nodes are about to end.
    """
    return (
        on.memory_need_bytes <= EASY_SHARE * on.memory_bytes
        and on.host_need_bytes <= on.kind.memory_bytes
        and SAVES_ON_DISK * on.staged_bytes + on.asked.brought_bytes <= on.disk_bytes
    )


def _types_exist(asked: PlanRequest, offers: Offers) -> Note | None:
    if offers.types is None:
        return None
    unknown = [name for name in asked.instance_types if name not in offers.types]
    if not unknown:
        return None
    names = ", ".join(unknown)
    return Note("unknown_instance_type", f"EC2 knows no {names} in this region; correct fleet.instance_types")


def _kinds_are_one(asked: PlanRequest, offers: Offers) -> Note | None:
    kinds = {kind.name: kind.accelerator for kind in _kinds(asked, offers)}
    if len(set(kinds.values())) < 2:
        return None
    told = ", ".join(f"{name} ({accelerator or 'no accelerator'})" for name, accelerator in kinds.items())
    return Note("mixed_accelerators", f"fleet.instance_types mixes kinds of machines: {told}; keep those of one kind")


def _zones_have_subnets(asked: PlanRequest, offers: Offers) -> Note | None:
    if not asked.zones or offers.addresses is None or set(asked.zones) & set(offers.addresses):
        return None
    return Note(
        "no_subnet_in_zone",
        f"the stack has no subnet in {', '.join(asked.zones)}; it has some in {', '.join(sorted(offers.addresses))}: "
        'name those in fleet.zones, or say "any"',
    )


_WHOLE = (_types_exist, _kinds_are_one, _zones_have_subnets)


def _first(
    asked: PlanRequest, offers: Offers, checks: Sequence[Callable[[PlanRequest, Offers], Note | None]]
) -> Note | None:
    return next((found for check in checks if (found := check(asked, offers)) is not None), None)


def _kinds(asked: PlanRequest, offers: Offers) -> list[InstanceType]:
    known = offers.types or {}
    return [known[name] for name in asked.instance_types if name in known]


def _whole_warnings(asked: PlanRequest, offers: Offers) -> list[Note]:
    notes = []
    weights = parameters(asked.model)
    if asked.nodes > 1 and weights < LARGE_PARAMETERS:
        notes.append(
            Note(
                "small_model_many_nodes",
                f"the model has {weights / 1e6:,.0f} million parameters; below 1 billion one node is usually faster "
                f"than {asked.nodes}: set fleet.nodes to 1, with a larger type if need be",
            )
        )
    models = sorted({kind.gpu_name for kind in _kinds(asked, offers) if kind.gpus})
    if len(models) > 1:
        told = ", ".join(models)
        notes.append(Note("several_gpu_models", f"attempts may run on {told}; keep one for results equal to the bit"))
    if asked.attempts == 1:
        notes.append(
            Note("one_attempt", "limits.attempts is 1: the first crash ends the job; interruptions are not counted")
        )
    return notes


def _unknown(asked: PlanRequest, name: str, parallel: str) -> Option:
    return Option(
        instance_type=name,
        market=asked.market,
        zones=asked.zones,
        parallel=parallel,
        addresses=asked.nodes * ADDRESSES_PER_NODE,
        reasons=("nothing is known of this type here",),
    )


def _all_dropped(dropped: Sequence[tuple[str, Note]]) -> Note:
    """Return the first choice's fault, with those of the others behind it."""
    first = dropped[0][1]
    others = "; ".join(f"{name}: {fault.text}" for name, fault in dropped[1:])
    return Note(first.code, f"{first.text}. And {others}" if others else first.text)


def _distinct(notes: Sequence[Note]) -> list[Note]:
    return list(dict.fromkeys(notes))
