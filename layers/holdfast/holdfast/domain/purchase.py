"""One CreateFleet call in all that its client token stands for, what EC2 answered, and what follows from a refusal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast.domain.network_cards import MachineType
from holdfast.domain.placement import (
    CLUSTER,
    EVERY_POOL,
    MIXED,
    ON_DEMAND,
    SPOT,
    Candidate,
    Patience,
    Pool,
    quota_pool,
    reserved,
)

SOON_TRIES = 4
"""A template or profile that was just made is found within a minute: so often a job asks again before it fails."""

SOON_S = 20.0
UNKNOWN_TRIES = 5
"""Codes that no release knows may be passing: so often in a row a job waits before it fails with the code named."""


# -- what is asked ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Subnet:
    """A subnet of the stack; `free` addresses, None where EC2 does not say."""

    id: str
    zone: str
    free: int | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the gang may land: one override of the call."""

    subnet: str
    zone: str
    group: str = ""


class ReservationKind(StrEnum):
    CAPACITY_BLOCK = "capacity_block"
    ON_DEMAND = "on_demand_reservation"
    INTERRUPTIBLE = "interruptible_reservation"


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A capacity reservation as EC2 describes it; `group` is the placement group that it was made in."""

    id: str
    kind: ReservationKind
    instance_type: str
    zone: str
    state: str
    free: int
    starts_at: float | None = None
    ends_at: float | None = None
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class Template:
    """A launch template, its version pinned, and the machine image that it names now."""

    id: str
    version: str
    image: str = ""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What every node of the gang must find itself to be. Zero or empty = nothing is known to compare with."""

    instance_type: str
    zones: tuple[str, ...] = ()
    group: str = ""
    gpus: int = 0
    efas: int = 0
    efa_gbps: float = 0.0
    driver: str = ""


@dataclass(frozen=True, kw_only=True)
class Purchase:
    """Everything that one call says: the same purchase under the same fleet name is the same request.

    `image` is the job's own container image, empty for the stack's.
    """

    fleet: str
    job: str
    instance_type: str
    market: str
    nodes: int
    minimum: int
    places: tuple[Place, ...]
    template: Template
    on_demand_nodes: int = 0
    reservation: str = ""
    reservation_kind: str = ""
    image: str = ""
    expected: Expected | None = None

    @property
    def what(self) -> str:
        market = f"reserved in {self.reservation}" if self.reservation else self.market
        return f"{self.nodes} {self.instance_type} ({market})"


def cluster_group_wanted(candidate: Candidate, machine: MachineType, reservation: Reservation | None) -> bool:
    """True when the gang talks over EFA and is free to land anywhere: a reservation lies where it was made."""
    return candidate.nodes > 1 and bool(machine.efas) and reservation is None


STACK_IMAGE_DRIVER = "580.65.06"
"""What CUDA 13 in the stack's own GPU image needs at least (NVIDIA's CUDA 13.0 release notes)."""


def expectation(machine: MachineType, places: Sequence[Place], nodes: int, *, image: str = "") -> Expected:
    """Return what the gate compares the nodes with; a single node needs no EFA.

    What driver a job's own `image` needs is not known.
    """
    together = nodes > 1
    groups = {place.group for place in places}
    return Expected(
        instance_type=machine.name,
        zones=tuple(sorted({place.zone for place in places if place.zone})),
        group=groups.pop() if len(groups) == 1 else "",
        gpus=machine.gpus,
        efas=machine.efas if together else 0,
        efa_gbps=machine.efa_gbps if together else 0.0,
        driver="" if image or not machine.gpus else STACK_IMAGE_DRIVER,
    )


# -- what EC2 answered ------------------------------------------------------------------------------------------------


class RefusalKind(StrEnum):
    """What an error code of EC2 asks of us; the codes are in adapters/aws_errors.py."""

    POOL_COLD = "pool_cold"
    NEXT_SUBNET = "next_subnet"
    QUOTA = "quota"
    DROP_MAX_PRICE = "drop_max_price"
    CONFIGURATION = "config_error"
    RETRY_SOON = "retry_soon"
    PERMISSION = "permission"
    SERVICE_LINKED_ROLE = "service_linked_role"
    THROTTLED = "throttled"
    MISMATCH = "mismatch"
    UNKNOWN = "unknown"


FATAL = frozenset({RefusalKind.CONFIGURATION, RefusalKind.PERMISSION, RefusalKind.SERVICE_LINKED_ROLE})

ADVICE = {
    RefusalKind.CONFIGURATION: "the stack or the request names something that EC2 does not take; correct it",
    RefusalKind.PERMISSION: (
        "the launch role lacks a right, or a policy of the organization forbids it; CloudTrail has the encoded message "
        "(aws sts decode-authorization-message)"
    ),
    RefusalKind.SERVICE_LINKED_ROLE: (
        "this account has never bought spot; deploy once with CreateSpotServiceLinkedRole=true"
    ),
    RefusalKind.RETRY_SOON: "it was asked for again and again and never appeared; look at template and profile",
    RefusalKind.UNKNOWN: "this release does not know the code; look it up, and report it",
}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One error: of the whole call, or of one pool where `subnet` or `zone` say which."""

    code: str
    kind: RefusalKind
    cool_s: float = 60.0
    subnet: str = ""
    zone: str = ""
    market: str = ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One element of the answer: instances of one type in one zone and market."""

    instances: tuple[str, ...]
    instance_type: str = ""
    zone: str = ""
    market: str = ""


@dataclass(frozen=True)
class Bought:
    """EC2's answer to one call: the instances it gave, and what it said of those it did not."""

    parts: tuple[Part, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    @property
    def instances(self) -> tuple[str, ...]:
        """Every id of every element."""
        return tuple(dict.fromkeys(instance for part in self.parts for instance in part.instances))

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(refusal.code for refusal in self.refusals))

    def market_of(self, instance: str) -> str:
        return next((part.market for part in self.parts if instance in part.instances), "")


@dataclass(frozen=True, kw_only=True)
class Gang:
    """What is kept of an answer; `extra` came too and is given back."""

    instances: tuple[str, ...]
    instance_type: str
    zone: str
    extra: tuple[str, ...] = ()


def gang_of(purchase: Purchase, bought: Bought) -> Gang | None:
    """Return the largest set of one type and zone if it is enough, None when the answer is a shortfall.

    Synchronous training goes at the pace of the slowest node, so types are never mixed, however many came.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for part in bought.parts:
        groups.setdefault((part.instance_type, part.zone), []).extend(part.instances)
    if not groups:
        return None
    (kind, zone), kept = max(groups.items(), key=lambda group: len(group[1]))
    if len(kept) < purchase.minimum or (kind and kind != purchase.instance_type):
        return None
    chosen = tuple(dict.fromkeys(kept))[: purchase.nodes]
    return Gang(
        instances=chosen,
        instance_type=kind or purchase.instance_type,
        zone=zone,
        extra=tuple(instance for instance in bought.instances if instance not in chosen),
    )


def shortfall(purchase: Purchase, bought: Bought) -> str:
    """Return what came and why it is not enough."""
    kinds = sorted({part.instance_type for part in bought.parts if part.instance_type})
    mixed = f" of {len(kinds)} types ({', '.join(kinds)})" if len(kinds) > 1 else ""
    return f"{len(bought.instances)}{mixed} of {purchase.what}: {', '.join(bought.errors) or 'no reason given'}"


# -- what follows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cooling:
    pool: Pool
    base_s: float
    code: str


@dataclass(frozen=True, kw_only=True)
class Consequence:
    """What a refused call means: pools to leave alone, the job's end, or an end of this round of asking."""

    patience: Patience
    cooling: tuple[Cooling, ...] = ()
    fatal: str | None = None
    stop: bool = False
    wait_s: float = 0.0
    quota: bool = False


def consequence(purchase: Purchase, refusals: Sequence[Refusal], patience: Patience) -> Consequence:
    """Return what follows from the errors of one call that brought no gang."""
    kinds = {refusal.kind for refusal in refusals}
    patience = replace(
        patience,
        soon=patience.soon + 1 if RefusalKind.RETRY_SOON in kinds else 0,
        unknown=patience.unknown + 1 if RefusalKind.UNKNOWN in kinds else 0,
    )
    cooling = tuple(_cooling(purchase, refusals))
    fatal = _fatal(refusals, kinds, patience)
    if fatal:
        return Consequence(patience=patience, cooling=cooling, fatal=fatal)
    soon = RefusalKind.RETRY_SOON in kinds
    wait_s = SOON_S * 2.0 ** (patience.soon - 1) if soon else SOON_S if RefusalKind.MISMATCH in kinds else 0.0
    return Consequence(
        patience=patience,
        cooling=cooling,
        stop=soon or bool(kinds & {RefusalKind.THROTTLED, RefusalKind.MISMATCH}),
        wait_s=wait_s,
        quota=RefusalKind.QUOTA in kinds,
    )


def _fatal(refusals: Sequence[Refusal], kinds: set[RefusalKind], patience: Patience) -> str | None:
    """Only when nothing else was said: a pool that was merely full shows that the rest of the call was understood."""
    if kinds and kinds <= FATAL:
        return _sentence(refusals[0])
    if kinds == {RefusalKind.RETRY_SOON} and patience.soon > SOON_TRIES:
        return _sentence(refusals[0])
    if kinds == {RefusalKind.UNKNOWN} and patience.unknown > UNKNOWN_TRIES:
        return _sentence(refusals[0])
    return None


def _sentence(refusal: Refusal) -> str:
    return f"EC2 refuses to launch: {refusal.code}; {ADVICE[refusal.kind]}"


def _cooling(purchase: Purchase, refusals: Iterable[Refusal]) -> Iterable[Cooling]:
    for refusal in refusals:
        match refusal.kind:
            case RefusalKind.THROTTLED:
                yield Cooling(pool=EVERY_POOL, base_s=refusal.cool_s, code=refusal.code)
            case RefusalKind.QUOTA:
                for market in _markets(purchase, refusal):
                    yield Cooling(
                        pool=quota_pool(purchase.instance_type, market), base_s=refusal.cool_s, code=refusal.code
                    )
            case RefusalKind.RETRY_SOON | RefusalKind.MISMATCH:
                pass
            case _:
                yield from (
                    Cooling(pool=pool, base_s=refusal.cool_s, code=refusal.code) for pool in _pools(purchase, refusal)
                )


def _pools(purchase: Purchase, refusal: Refusal) -> list[Pool]:
    places = [place for place in purchase.places if refusal.subnet == place.subnet]
    if not places:
        places = [place for place in purchase.places if refusal.zone == place.zone]
    return [
        Pool(
            instance_type=purchase.instance_type,
            zone=place.zone,
            market=market,
            group=CLUSTER if place.group and not purchase.reservation else "",
        )
        for place in places or purchase.places
        for market in _markets(purchase, refusal)
    ]


def _markets(purchase: Purchase, refusal: Refusal) -> tuple[str, ...]:
    if purchase.reservation:
        return (reserved(purchase.reservation),)
    if purchase.market != MIXED:
        return (purchase.market,)
    told = {"spot": SPOT, "on-demand": ON_DEMAND}.get(refusal.market)
    return (told,) if told else (SPOT, ON_DEMAND)
