"""What AWS asks for machines and allows of them, read right before a purchase: for its cost and its quotas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.application.ports import Ports
from holdfast.domain.catalogue import prices_of
from holdfast.domain.errors import Unavailable
from holdfast.domain.placement import MIXED, ON_DEMAND, SPOT, Candidate, Prices


@dataclass(frozen=True, kw_only=True)
class Terms:
    """`prices`: US dollars of a node-hour, as far as they are known."""

    prices: Prices = field(default_factory=dict)


ReadTerms = Callable[[Sequence[Candidate], Ports], Terms]


def unread(candidates: Sequence[Candidate], ports: Ports) -> Terms:
    """Nothing is known."""
    return Terms()


def terms(candidates: Sequence[Candidate], ports: Ports) -> Terms:
    """Return what can be read now; no purchase waits for what cannot."""
    prices: dict[tuple[str, str, str], float] = {}
    for market in (SPOT, ON_DEMAND):
        kinds = sorted({one.instance_type for one in candidates if one.market in (market, MIXED)})
        try:
            offers = ports.catalogue.offers(kinds, market) if kinds else None
        except Unavailable:
            continue
        if offers is not None:
            prices |= prices_of(offers, market)
    return Terms(prices=prices)
