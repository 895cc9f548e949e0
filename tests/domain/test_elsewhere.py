"""Where a gang would go: the pool under advice is asked last, nothing is lost or doubled, and it is said in words."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from holdfast.domain.elsewhere import NAMED, WORDS_CHARACTERS, Choice, in_order, in_pool, in_words
from holdfast.domain.job import Pool
from holdfast.domain.placement import Candidate, candidates, ranked, spread

TYPES, ZONES = ["p5.48xlarge", "p4d.24xlarge", "g6.12xlarge"], ["us-east-1a", "us-east-1b", "us-east-1c"]
HERE = Pool(instance_type="p5.48xlarge", zone="us-east-1a", market="spot")


def some(seed: int) -> tuple[tuple[Candidate, ...], list[str], Pool]:
    """Any request, subnets, and a pool that may be or not be of the request."""
    dice = random.Random(seed)
    market, nodes = dice.choice(["spot", "on_demand", "mixed"]), dice.randint(1, 4)
    kinds, zones = dice.sample(TYPES, dice.randint(1, 3)), dice.sample(ZONES, dice.randint(1, 3))
    asked = candidates(
        instance_types=kinds,
        market=market,
        zones=dice.choice([(), tuple(dice.sample(ZONES, 2))]),
        nodes=nodes,
        fewest=dice.choice([None, 1]),
        on_demand_floor=dice.choice([None, 0.5, 1.0]),
        reservation=dice.choice([None, None, "cr-1"]),
    )
    pool = Pool(instance_type=dice.choice(TYPES), zone=dice.choice(ZONES), market=dice.choice(["spot", market]))
    return asked, zones, pool


def places(asked: Sequence[Candidate]) -> Counter[tuple[str, str, int, str, str]]:
    """Every single place that the candidates may land in."""
    return Counter(
        (one.instance_type, one.market, one.minimum, one.reservation, zone) for one in asked for zone in one.zones
    )


@pytest.mark.parametrize("seed", range(300))
def test_any_order_loses_no_place_doubles_none_and_has_the_avoided_pool_last(seed: int) -> None:
    asked, zones, pool = some(seed)
    order = in_order(asked, zones, pool)
    chosen = [one for _, one in order]
    assert places(chosen) == places(spread(asked, zones))
    numbers = [number for number, _ in order]
    assert len(set(numbers)) == len(numbers)
    steps = [(not one.reservation, bool(one.fewest), in_pool(one, pool)) for one in chosen]
    assert all(before <= after for before, after in pairwise(steps))
    assert [one for one in chosen if in_pool(one, pool) and one.zones != (pool.zone,)] == []


@pytest.mark.parametrize("seed", range(50))
def test_what_is_not_in_the_avoided_pool_keeps_its_number(seed: int) -> None:
    asked, zones, pool = some(seed)
    wanted, order = dict(enumerate(spread(asked, zones))), dict(in_order(asked, zones, pool))
    assert wanted.keys() <= order.keys()
    assert all(order[number] == one for number, one in wanted.items() if not in_pool(one, pool))


@pytest.mark.parametrize("seed", range(50))
def test_with_nothing_to_avoid_the_order_is_the_usual_one(seed: int) -> None:
    asked, zones, _ = some(seed)
    assert in_order(asked, zones, None) == ranked(spread(asked, zones))


def choices(*types: str, zones: Sequence[str] = ZONES, closed: str = "", nodes: int = 2) -> list[Choice]:
    asked = candidates(instance_types=types, market="spot", zones=(), nodes=nodes)
    return [
        Choice(candidate=one, zones=() if closed else one.zones, why_not=(f"{one.instance_type} {closed}",))
        for _, one in in_order(asked, zones, HERE)
    ]


def test_the_choices_are_named_in_their_order_and_the_own_pool_last() -> None:
    assert in_words(choices("p5.48xlarge", "p4d.24xlarge", zones=ZONES[:2]), HERE) == (
        "2 p5.48xlarge (spot) in us-east-1b, else 2 p4d.24xlarge (spot) in us-east-1a or us-east-1b; "
        "its own pool, p5.48xlarge in us-east-1a (spot), is asked last"
    )


def test_where_nothing_else_may_be_asked_it_says_why_and_what_helps() -> None:
    words = in_words(choices("p5.48xlarge", "p4d.24xlarge", zones=ZONES[:2], closed="is left alone (ICE)"), HERE)
    assert words == (
        "nothing else may be asked now: p5.48xlarge is left alone (ICE); p4d.24xlarge is left alone (ICE). "
        "It would wait for its own pool, p5.48xlarge in us-east-1a (spot); "
        "allow more instance types, zones or on-demand in the next request"
    )


def test_a_request_that_allows_one_pool_only_is_told_so() -> None:
    words = in_words(choices("p5.48xlarge", zones=ZONES[:1]), HERE)
    assert words.startswith("nothing else may be asked now: its request allows no other instance type, zone or market.")
    assert words.endswith("allow more instance types, zones or on-demand in the next request")


def test_the_words_are_bounded_whatever_the_request_allows() -> None:
    many = [f"p{number}.48xlarge" for number in range(500)]
    for closed in ("", "is left alone (InsufficientInstanceCapacity)" * 50):
        assert len(in_words(choices(*many, closed=closed), HERE)) < 2 * WORDS_CHARACTERS
    assert f"else {500 - NAMED} more" in in_words(choices(*many), HERE)
