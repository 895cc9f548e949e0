"""Which machines are asked for, in which order, and how often."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.domain.placement import (
    CALLS_AN_HOUR,
    EVERY_POOL,
    HOUR_S,
    LONGEST_COOL_S,
    SPREAD_S,
    Candidate,
    Patience,
    Pool,
    ask_again_at,
    candidates,
    coldest,
    cooled,
    jitter_of,
    pools_of,
    quota_pool,
    ranked,
    spread,
)
from tests.builders import NOW

ZONES = ["us-east-1b", "us-east-1a"]
POOL = Pool(instance_type="p5.48xlarge", zone="us-east-1a", market="spot")


def asked(market: str = "spot", **more: object) -> tuple[Candidate, ...]:
    return candidates(
        instance_types=["p5.48xlarge", "p4d.24xlarge"], market=market, zones=(), nodes=8, **more  # type: ignore[arg-type]
    )  # fmt: skip


def test_the_order_of_types_is_the_users() -> None:
    order = [candidate.instance_type for _, candidate in ranked(spread(asked(), ZONES))]
    assert order == ["p5.48xlarge", "p4d.24xlarge"]


def test_one_call_lets_ec2_choose_among_the_zones_that_are_allowed() -> None:
    assert [one.zones for one in spread(asked(), ZONES)] == [("us-east-1a", "us-east-1b")] * 2
    only = candidates(instance_types=["p5.48xlarge"], market="spot", zones=["us-east-1b"], nodes=8)
    assert [one.zones for one in spread(only, ZONES)] == [("us-east-1b",)]


def test_a_mixed_gang_is_one_call_a_zone() -> None:
    mixed = spread(asked("mixed", on_demand_floor=0.5), ZONES)
    assert [(one.instance_type, one.zones, one.on_demand_nodes) for one in mixed] == [
        ("p5.48xlarge", ("us-east-1a",), 4),
        ("p5.48xlarge", ("us-east-1b",), 4),
        ("p4d.24xlarge", ("us-east-1a",), 4),
        ("p4d.24xlarge", ("us-east-1b",), 4),
    ]


@pytest.mark.parametrize(("floor", "on_demand"), [(None, 1), (0.0, 1), (0.01, 1), (0.5, 4), (0.51, 5)])
def test_the_on_demand_floor_rounds_up_and_always_covers_the_leader(floor: float | None, on_demand: int) -> None:
    assert asked("mixed", on_demand_floor=floor)[0].on_demand_nodes == on_demand


def test_a_floor_of_one_is_an_on_demand_gang() -> None:
    assert {one.market for one in asked("mixed", on_demand_floor=1.0)} == {"on_demand"}


def test_a_reservation_is_asked_first_and_the_markets_candidates_follow() -> None:
    order = [one for _, one in ranked(spread(asked(reservation="cr-1"), ["us-east-1a"]))]
    assert [(one.reservation, one.market) for one in order] == [
        ("cr-1", "on_demand"), ("cr-1", "on_demand"), ("", "spot"), ("", "spot"),
    ]  # fmt: skip


def test_fewer_nodes_are_asked_for_after_every_whole_gang() -> None:
    elastic = spread(asked(fewest=4), ZONES)
    assert [(one.nodes, one.minimum) for _, one in ranked(elastic)] == [(8, 8), (8, 8), (8, 4), (8, 4)]


def test_o09_a_pool_is_left_alone_longer_with_each_refusal_in_a_row_up_to_a_limit() -> None:
    now, cold, delays = NOW, None, []
    for _ in range(8):
        cold = cooled(POOL, cold, code="x", base_s=60, now=now, jitter=0.0)
        delays.append(cold.until - now)
        now = cold.until
    assert delays == [60, 120, 240, 480, LONGEST_COOL_S, LONGEST_COOL_S, LONGEST_COOL_S, LONGEST_COOL_S]


def test_jitter_only_ever_makes_it_longer_by_at_most_half() -> None:
    waits = [cooled(POOL, None, code="x", base_s=60, now=NOW, jitter=part / 10).until - NOW for part in range(10)]
    assert waits[0] == 60
    assert waits == sorted(waits)
    assert waits[-1] < 90


def test_two_jobs_refused_in_one_moment_are_one_refusal() -> None:
    first = cooled(POOL, None, code="x", base_s=60, now=NOW, jitter=0.0)
    assert cooled(POOL, first, code="x", base_s=60, now=NOW + 1, jitter=0.9) == first
    assert cooled(POOL, first, code="y", base_s=3600, now=NOW + 1, jitter=0.0).misses == 1


def test_a_pool_that_nobody_asked_for_long_starts_anew() -> None:
    old = cooled(POOL, None, code="x", base_s=60, now=NOW, jitter=0.0)
    assert cooled(POOL, replace(old, misses=9), code="x", base_s=60, now=NOW + 2 * HOUR_S, jitter=0.0).misses == 1


def test_a_refusal_in_a_cluster_group_says_nothing_of_the_pool_without_one() -> None:
    candidate = Candidate(instance_type="p5.48xlarge", market="spot", nodes=2, zones=("us-east-1a",))
    grouped = replace(POOL, group="cluster")
    cold = {grouped: cooled(grouped, None, code="x", base_s=60, now=NOW, jitter=0.0)}
    assert coldest(pools_of(candidate, "us-east-1a", "cluster"), cold, NOW) is not None
    assert coldest(pools_of(candidate, "us-east-1a", ""), cold, NOW) is None


@pytest.mark.parametrize("closing", [POOL, quota_pool("p4d.24xlarge", "spot"), EVERY_POOL])
def test_a_candidate_is_kept_back_by_its_pool_its_quota_and_by_throttling(closing: Pool) -> None:
    candidate = Candidate(instance_type="p5.48xlarge", market="spot", nodes=2, zones=("us-east-1a",))
    cold = {closing: cooled(closing, None, code="x", base_s=60, now=NOW, jitter=0.0)}
    assert coldest(pools_of(candidate, "us-east-1a", ""), cold, NOW) is not None
    assert coldest(pools_of(candidate, "us-east-1a", ""), cold, NOW + 61) is None


def test_a_mixed_gang_is_kept_back_by_either_of_its_markets() -> None:
    mixed = Candidate(instance_type="p5.48xlarge", market="mixed", nodes=2, zones=("us-east-1a",), on_demand_nodes=1)
    for market in ("spot", "on_demand"):
        pool = replace(POOL, market=market)
        cold = {pool: cooled(pool, None, code="x", base_s=60, now=NOW, jitter=0.0)}
        assert coldest(pools_of(mixed, "us-east-1a", ""), cold, NOW) is not None


def test_o09_a_job_makes_no_more_than_its_calls_in_any_hour() -> None:
    now, patience, calls = NOW, Patience(), []
    for _ in range(4 * CALLS_AN_HOUR):
        now = max(now + 1, patience.free_at(now))
        patience = patience.asking(now)
        calls.append(now)
    for at in calls:
        assert sum(at - HOUR_S < call <= at for call in calls) <= CALLS_AN_HOUR
    assert len(patience.asked_at) <= CALLS_AN_HOUR


def test_a_job_asks_again_at_the_first_thaw_a_little_apart_from_the_others() -> None:
    again = [ask_again_at(NOW, [NOW + 500, NOW + 90], Patience(), jitter_of(f"job-{n}")) for n in range(50)]
    assert min(again) >= NOW + 90
    assert max(again) <= NOW + 90 + SPREAD_S
    assert len(set(again)) == 50
