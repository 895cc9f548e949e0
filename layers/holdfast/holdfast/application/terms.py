"""What AWS asks for machines and allows of them, read right before a purchase: for its cost and its quotas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.application.ports import Ports
from holdfast.domain import catalogue
from holdfast.domain.catalogue import Room, prices_of, quota_code
from holdfast.domain.errors import PurchaseRefused, Unavailable
from holdfast.domain.placement import MIXED, ON_DEMAND, SPOT, Candidate, Prices


@dataclass(frozen=True, kw_only=True)
class Terms:
    """As far as it is known: `prices` in US dollars of a node-hour, `quotas` by (instance type, market)."""

    prices: Prices = field(default_factory=dict)
    quotas: Mapping[tuple[str, str], Room] = field(default_factory=dict)


ReadTerms = Callable[[Sequence[Candidate], Ports], Terms]


def unread(candidates: Sequence[Candidate], ports: Ports) -> Terms:
    """Nothing is known."""
    return Terms()


def terms(candidates: Sequence[Candidate], ports: Ports, *, without: str | None = None) -> Terms:
    """Return what can be read now; no purchase waits for what cannot. Machines of the job `without` use no quota."""
    prices: dict[tuple[str, str, str], float] = {}
    limits: dict[str, int] = {}
    for market in (SPOT, ON_DEMAND):
        kinds = sorted({one.instance_type for one in candidates if one.market in (market, MIXED)})
        offers = _offers(kinds, market, ports) if kinds else None
        if offers is not None:
            prices |= prices_of(offers, market)
            limits |= {code: int(vcpus) for code, vcpus in offers.quotas.items()}
    used = _used(ports, without) if limits else {}
    asked = {(one.instance_type, market) for one in candidates for market in (SPOT, ON_DEMAND)}
    coded = {key: code for key in asked if (code := quota_code(*key)) in limits and code is not None}
    quotas = {key: Room(code=code, vcpus=limits[code], used=used.get(code, 0)) for key, code in coded.items()}
    return Terms(prices=prices, quotas=quotas)


def _offers(kinds: Sequence[str], market: str, ports: Ports) -> catalogue.Offers | None:
    try:
        return ports.catalogue.offers(kinds, market)
    except Unavailable:
        return None


def _used(ports: Ports, without: str | None) -> dict[str, int]:
    """vCPUs of this stack's machines by the quota that counts them. What else the account runs, only EC2 knows."""
    try:
        live = [one for one in ports.fleets.of_stack() if one.live and (without is None or one.job != without)]
        machines = ports.fleets.machine_types({one.instance_type for one in live}) if live else {}
    except (Unavailable, PurchaseRefused):
        return {}
    used: dict[str, int] = {}
    for one in live:
        code, machine = quota_code(one.instance_type, one.market or ON_DEMAND), machines.get(one.instance_type)
        if code is not None and machine is not None:
            used[code] = used.get(code, 0) + machine.vcpus
    return used
