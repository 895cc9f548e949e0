"""What follows from what EC2 answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.domain.placement import CLUSTER, EVERY_POOL, Patience, Pool, quota_pool
from holdfast.domain.purchase import (
    FATAL,
    SOON_TRIES,
    UNKNOWN_TRIES,
    Bought,
    Consequence,
    Part,
    Place,
    Purchase,
    Refusal,
    RefusalKind,
    Template,
    consequence,
    gang_of,
    shortfall,
)

PURCHASE = Purchase(
    fleet="j-1-0", job="j", instance_type="p5.48xlarge", market="spot", nodes=8, minimum=8,
    places=(Place(subnet="subnet-a", zone="us-east-1a"), Place(subnet="subnet-b", zone="us-east-1b")),
    template=Template(id="lt-1", version="1"),
)  # fmt: skip


def part(count: int, kind: str = "p5.48xlarge", zone: str = "us-east-1a", market: str = "spot") -> Part:
    ids = tuple(f"{kind}-{zone}-{market}-{number}" for number in range(count))
    return Part(instances=ids, instance_type=kind, zone=zone, market=market)


def of(kind: RefusalKind, **more: str) -> Refusal:
    return Refusal(code=kind.value, kind=kind, **more)  # type: ignore[arg-type]


def follows(*refusals: Refusal, purchase: Purchase = PURCHASE, patience: Patience | None = None) -> Consequence:
    return consequence(purchase, refusals, patience or Patience())


def test_o16_every_id_of_every_element_counts() -> None:
    bought = Bought(parts=(part(3), part(3, zone="us-east-1b"), part(2, "p5e.48xlarge")))
    assert len(bought.instances) == 8


def test_o16_eight_machines_of_two_types_are_no_gang_of_eight() -> None:
    bought = Bought(parts=(part(5), part(3, "p5e.48xlarge")))
    assert gang_of(PURCHASE, bought) is None
    assert "8 of 2 types (p5.48xlarge, p5e.48xlarge) of 8 p5.48xlarge" in shortfall(PURCHASE, bought)


def test_o16_a_job_that_goes_on_with_fewer_keeps_the_largest_set_of_one_type_and_gives_back_the_rest() -> None:
    elastic = replace(PURCHASE, minimum=4)
    gang = gang_of(elastic, Bought(parts=(part(5), part(1, "p5e.48xlarge"))))
    assert gang is not None
    assert (len(gang.instances), len(gang.extra), gang.zone) == (5, 1, "us-east-1a")
    assert gang_of(elastic, Bought(parts=(part(3), part(3, "p5e.48xlarge")))) is None


def test_elements_of_both_markets_are_one_gang_and_each_machine_knows_its_own() -> None:
    mixed = replace(PURCHASE, market="mixed", on_demand_nodes=1)
    bought = Bought(parts=(part(7), part(1, market="on_demand")))
    gang = gang_of(mixed, bought)
    assert gang is not None
    assert len(gang.instances) == 8
    assert [bought.market_of(one) for one in gang.instances].count("on_demand") == 1


def test_a_half_filled_mixed_gang_is_a_shortfall() -> None:
    assert gang_of(replace(PURCHASE, market="mixed", on_demand_nodes=1), Bought(parts=(part(7),))) is None


def test_only_the_pool_that_refused_is_left_alone() -> None:
    cooling = follows(of(RefusalKind.POOL_COLD, subnet="subnet-b")).cooling
    assert [one.pool for one in cooling] == [Pool(instance_type="p5.48xlarge", zone="us-east-1b", market="spot")]


def test_an_error_that_names_no_pool_is_meant_for_all_of_them() -> None:
    assert {one.pool.zone for one in follows(of(RefusalKind.POOL_COLD)).cooling} == {"us-east-1a", "us-east-1b"}


def test_a_pool_in_a_cluster_group_is_remembered_as_such() -> None:
    grouped = replace(PURCHASE, places=(Place(subnet="subnet-a", zone="us-east-1a", group="s-j-us-east-1a"),))
    assert {one.pool.group for one in follows(of(RefusalKind.POOL_COLD), purchase=grouped).cooling} == {CLUSTER}


def test_in_a_mixed_gang_the_market_that_refused_is_left_alone() -> None:
    mixed = replace(PURCHASE, market="mixed", on_demand_nodes=1, places=PURCHASE.places[:1])
    pools = [one.pool for one in follows(of(RefusalKind.POOL_COLD, market="on-demand"), purchase=mixed).cooling]
    assert [pool.market for pool in pools] == ["on_demand"]


def test_a_quota_parks_the_whole_family_in_that_market() -> None:
    found = follows(of(RefusalKind.QUOTA))
    assert found.quota
    assert [one.pool for one in found.cooling] == [quota_pool("p4d.24xlarge", "spot")]


def test_throttling_ends_the_round_and_keeps_everybody_quiet() -> None:
    found = follows(of(RefusalKind.THROTTLED))
    assert (found.stop, [one.pool for one in found.cooling]) == (True, [EVERY_POOL])


@pytest.mark.parametrize("kind", sorted(FATAL))
def test_what_no_wait_can_cure_fails_the_job_with_the_code_and_the_way_out(kind: RefusalKind) -> None:
    found = follows(of(kind))
    assert found.fatal is not None
    assert kind.value in found.fatal
    assert len(found.fatal) > len(kind.value) + 40


def test_a_fault_of_one_pool_beside_a_full_one_fails_nobody() -> None:
    found = follows(of(RefusalKind.CONFIGURATION, subnet="subnet-a"), of(RefusalKind.POOL_COLD, subnet="subnet-b"))
    assert found.fatal is None
    assert {one.pool.zone for one in found.cooling} == {"us-east-1a", "us-east-1b"}


@pytest.mark.parametrize(
    ("kind", "tries"), [(RefusalKind.RETRY_SOON, SOON_TRIES), (RefusalKind.UNKNOWN, UNKNOWN_TRIES)]
)
def test_what_may_pass_is_tried_a_few_times_in_a_row_and_then_fails_with_its_code(
    kind: RefusalKind, tries: int
) -> None:
    patience = Patience()
    for _ in range(tries):
        found = follows(of(kind), patience=patience)
        assert found.fatal is None
        patience = found.patience
    last = follows(of(kind), patience=patience).fatal
    assert last is not None
    assert kind.value in last


def test_the_count_starts_anew_once_something_else_was_said() -> None:
    patience = follows(of(RefusalKind.POOL_COLD), patience=Patience(soon=3, unknown=3)).patience
    assert (patience.soon, patience.unknown) == (0, 0)


def test_every_kind_has_a_consequence_that_ends_or_waits() -> None:
    for kind in RefusalKind:
        found = follows(of(kind))
        assert found.fatal or found.cooling or found.wait_s, kind
