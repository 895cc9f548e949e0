"""Where a job's gang would go if its machines were taken: its own candidates, the pool under advice last.

What EC2 has free is not for sale as a fact: a pool that may be asked may still refuse. GetSpotPlacementScores is no
better guide for one instance type a call; AWS scores fewer than three types low whatever there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from holdfast.domain.failure import failure_class
from holdfast.domain.job import Pool
from holdfast.domain.placement import Candidate, ranked, spread

WORDS_CHARACTERS = 600
"""It stands in the row, which is written whole with every change."""

NAMED = 3
"""So many choices, and so many reasons, are named."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate with the zones in which it may be asked now; none = it may not, `why_not` says why."""

    candidate: Candidate
    zones: tuple[str, ...] = ()
    why_not: tuple[str, ...] = ()


def in_order(asked: Sequence[Candidate], zones: Iterable[str], avoided: Pool | None) -> list[tuple[int, Candidate]]:
    """Return (number, candidate) in the order to ask, as `ranked` has them, the avoided pool behind all others.

    It is never left out, only asked last; what starts with fewer nodes still comes after what starts whole. Zones of
    the avoided pool become candidates of their own, numbered after all others, so no other number changes.
    """
    wanted = spread(asked, zones)
    kept, behind = [], []
    for one in wanted:
        others = tuple(zone for zone in one.zones if avoided is None or zone != avoided.zone)
        split = in_pool(one, avoided) and bool(others)
        kept.append(replace(one, zones=others) if split else one)
        behind += [replace(one, zones=(avoided.zone,))] if split and avoided is not None else []
    order = ranked([*kept, *behind])
    return sorted(order, key=lambda one: (not one[1].reservation, bool(one[1].fewest), in_pool(one[1], avoided)))


def in_pool(candidate: Candidate, pool: Pool | None) -> bool:
    """True when the candidate may land in the pool; a reservation's machines are of no pool that others share."""
    return (
        pool is not None
        and not candidate.reservation
        and (candidate.instance_type, candidate.market) == (pool.instance_type, pool.market)
        and pool.zone in candidate.zones
    )


def in_words(choices: Sequence[Choice], pool: Pool) -> str:
    """Return where the gang would go without the pool, in the order of asking; why nowhere, and what would help.

    `choices` are those of `in_order`; the ones in the pool are what is left when no other takes the gang.
    """
    others = [one for one in choices if not in_pool(one.candidate, pool)]
    may = [one for one in others if one.zones]
    own = f"its own pool, {pool}"
    if may:
        named = ", else ".join(_told(one) for one in may[:NAMED])
        more = f", else {len(may) - NAMED} more" if len(may) > NAMED else ""
        return _clipped(f"{named}{more}; {own}, is asked last")
    if not others:
        why = "its request allows no other instance type, zone or market"
    else:
        reasons = list(dict.fromkeys(reason for one in others for reason in one.why_not))
        more = f"; and {len(reasons) - NAMED} more reasons" if len(reasons) > NAMED else ""
        why = "; ".join(reasons[:NAMED]) + more
    return f"{_clipped(f'nothing else may be asked now: {why}')}. It would wait for {own}; " + _help()


def _help() -> str:
    return f"{failure_class('capacity').advice} in the next request"


def _told(choice: Choice) -> str:
    one = choice.candidate
    market = f"reserved in {one.reservation}" if one.reservation else one.market
    return f"{one.nodes} {one.instance_type} ({market}) in {' or '.join(choice.zones)}"


def _clipped(text: str) -> str:
    return text if len(text) <= WORDS_CHARACTERS else f"{text[:WORDS_CHARACTERS]}..."
