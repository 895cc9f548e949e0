"""While AWS advises to leave a machine it is looked where the gang would go; the next purchase goes by it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.application import notices
from holdfast.application.elsewhere import LOOKS_A_ROUND
from holdfast.application.launch import Launch
from holdfast.application.record import record
from holdfast.application.release import close_attempt, release_fleet
from holdfast.application.sweep import Sweep
from holdfast.domain import notices as rules
from holdfast.domain.catalogue import InstanceType, Offers
from holdfast.domain.errors import Rejected, Unavailable
from holdfast.domain.events import AttemptStarted, CapacityLooked, FleetLost
from holdfast.domain.job import Job
from holdfast.domain.phase import Phase
from holdfast.domain.placement import Cold, Pool, candidates
from holdfast.domain.purchase import Refusal, RefusalKind
from holdfast.domain.records import replace
from tests import builders as b
from tests.application.fakes import FakePorts

JOB = "demo-0123456789"
A, B = "us-east-1a", "us-east-1b"


@pytest.fixture
def ports() -> FakePorts:
    ports = FakePorts()
    ports.fleets.zones = (A, B)
    return ports


def training(ports: FakePorts, name: str = JOB, **fleet: Any) -> Job:
    """A gang of two spot nodes at work in zone a, asked for in any zone."""
    job = ports.holding(replace(b.a_running_job(report_s=10**7, run_s=10**8), id=name, fleet=f"{name}-1-0"))
    machines = (b.LEADER, b.OTHER) if name == JOB else (f"i-{name[-3:]}1", f"i-{name[-3:]}2")
    ports.owning(job, *machines)
    ports.workflow.executions[f"{name}-1"] = "RUNNING"
    body = asked_for(**fleet)
    ports.store.requests[name] = {"body": json.dumps(body)}
    return job


def asked_for(**fleet: Any) -> dict[str, Any]:
    body = json.loads(b.sample("sqs-job-requests.json")["Records"][0]["body"])
    usual = {"instance_types": ["c7i.large"], "nodes": 2, "market": "spot", "zones": "any"}
    return {**body, "fleet": {**usual, **fleet}}


def advised(ports: FakePorts) -> None:
    notices.advised(b.OTHER, ports)


def now(ports: FakePorts, name: str = JOB) -> Job:
    return ports.store.rows[name]


def looks(ports: FakePorts, name: str = JOB) -> list[CapacityLooked]:
    return [one for one in ports.store.events[name].values() if isinstance(one, CapacityLooked)]


def words(ports: FakePorts) -> str:
    found = now(ports).elsewhere
    assert found is not None
    return found.words


def test_after_advice_it_is_looked_where_the_gang_would_go_and_nothing_is_bought_or_ended(ports: FakePorts) -> None:
    training(ports)
    advised(ports)
    findings = Sweep(ports).run()
    assert (
        words(ports) == "2 c7i.large (spot) in us-east-1b; its own pool, c7i.large in us-east-1a (spot), is asked last"
    )
    assert [one.what for one in findings] == ["AWS advises to leave its machines"]
    assert (now(ports).phase, len(ports.fleets.live)) == (Phase.RUNNING, 2)
    assert (ports.fleets.calls, ports.fleets.made_groups, ports.fleets.made_templates) == ([], {}, {})


def test_it_is_looked_once_for_each_early_save_however_often_the_sweep_comes(ports: FakePorts) -> None:
    training(ports)
    advised(ports)
    for _ in range(5):
        advised(ports)
        Sweep(ports).run()
        ports.clock.step(60)
    assert len(looks(ports)) == 1
    ports.clock.step(rules.REBALANCE_COOL_DOWN_S)
    advised(ports)
    Sweep(ports).run()
    assert len(looks(ports)) == 2


def test_without_advice_nothing_is_looked_for(ports: FakePorts) -> None:
    training(ports)
    Sweep(ports).run()
    assert (looks(ports), now(ports).elsewhere) == ([], None)


def test_where_every_other_pool_is_cold_the_reason_and_the_way_out_are_told(ports: FakePorts) -> None:
    training(ports)
    cold = Pool(instance_type="c7i.large", zone=B, market="spot")
    ports.store.cool(Cold(pool=cold, until=b.NOW + 600, misses=1, code="InsufficientInstanceCapacity"))
    advised(ports)
    Sweep(ports).run()
    assert words(ports) == (
        "nothing else may be asked now: c7i.large in us-east-1b is left alone (InsufficientInstanceCapacity). "
        "It would wait for its own pool, c7i.large in us-east-1a (spot); "
        "allow more instance types, zones or on-demand in the next request"
    )


def test_addresses_are_checked_as_before_a_purchase(ports: FakePorts) -> None:
    training(ports)
    ports.fleets.free = {B: 1}
    advised(ports)
    Sweep(ports).run()
    assert "subnet subnet-b in us-east-1b has 1 free addresses, 2 are needed" in words(ports)


def test_the_quota_that_its_own_machines_use_is_free_when_they_are_taken(ports: FakePorts) -> None:
    kind = InstanceType(name="c7i.large", vcpus=2, memory_bytes=1)
    training(ports)
    for vcpus, told in (
        (4, "2 c7i.large (spot) in us-east-1b"),
        (3, "nothing else may be asked now: 2 c7i.large need"),
    ):
        ports.catalogue.known = Offers(types={"c7i.large": kind}, quotas={"L-34B43A08": float(vcpus)})
        ports.clock.step(rules.REBALANCE_COOL_DOWN_S)
        advised(ports)
        Sweep(ports).run()
        assert words(ports).startswith(told)


def test_a_silent_ec2_leaves_the_look_to_the_next_sweep_and_costs_nothing_else(
    ports: FakePorts, monkeypatch: pytest.MonkeyPatch
) -> None:
    training(ports)
    advised(ports)
    asked = now(ports)

    def silent() -> None:
        raise Unavailable("throttled")

    with monkeypatch.context() as patched:
        patched.setattr(ports.fleets, "subnets", silent)
        assert Sweep(ports).run() == []
    assert now(ports) == asked
    Sweep(ports).run()
    assert "us-east-1b" in words(ports)


def test_a_refusal_to_answer_is_what_the_look_found(ports: FakePorts) -> None:
    training(ports)
    ports.fleets.refused_first = Refusal(code="UnauthorizedOperation", kind=RefusalKind.PERMISSION)
    advised(ports)
    Sweep(ports).run()
    assert words(ports).startswith("not known: EC2 says UnauthorizedOperation; the launch role lacks a right")


def test_a_job_that_cannot_be_looked_for_keeps_no_other_from_its_look(ports: FakePorts) -> None:
    training(ports)
    training(ports, "other-0123456789")
    ports.store.requests[JOB] = {"body": "{"}
    advised(ports)
    notices.advised("i-7891", ports)
    with pytest.raises(Rejected) as told:
        Sweep(ports).run()
    assert told.value.__notes__[0].startswith(f"looking at statuses and elsewhere failed: {JOB}")
    assert now(ports, "other-0123456789").elsewhere is not None


def test_one_sweep_looks_for_a_bounded_number_of_jobs_and_the_next_for_the_others(ports: FakePorts) -> None:
    names = [f"job{number:03}-0123456{number:03}" for number in range(LOOKS_A_ROUND + 3)]
    for name in names:
        training(ports, name)
        notices.advised(f"i-{name[-3:]}1", ports)
    for found in (LOOKS_A_ROUND, LOOKS_A_ROUND + 3):
        Sweep(ports).run()
        assert sum(now(ports, name).elsewhere is not None for name in names) == found


# -- the next purchase -------------------------------------------------------------------------------------------------


def lost_all(ports: FakePorts, attempt: int = 1) -> None:
    """Every machine is gone, and the attempt is closed."""
    for machine in list(ports.fleets.live):
        ports.fleets.kill(machine)
    record(FleetLost(at=ports.clock(), attempt=attempt, instances=(b.LEADER, b.OTHER)), JOB, ports)
    release_fleet(JOB, attempt, ports)
    close_attempt(JOB, attempt, ports)


def bought_again(ports: FakePorts, attempt: int = 2, *types: str) -> list[tuple[str, str]]:
    """(type, zone) of every place that was asked, in the order of asking."""
    before = len(ports.fleets.purchases)
    record(AttemptStarted(at=ports.clock(), attempt=attempt), JOB, ports)
    asked = candidates(instance_types=types or ("c7i.large",), market="spot", zones=(), nodes=2)
    Launch(ports).run(JOB, attempt, candidates=asked, prefix="p", time_left_s=120)
    return [(one.instance_type, place.zone) for one in ports.fleets.purchases[before:] for place in one.places]


def test_the_next_purchase_asks_the_pool_under_advice_last(ports: FakePorts) -> None:
    training(ports)
    advised(ports)
    Sweep(ports).run()
    lost_all(ports)
    ports.fleets.short = 0
    asked = bought_again(ports, 2, "c7i.large", "m7i.large")
    assert asked == [("c7i.large", B), ("m7i.large", A), ("m7i.large", B), ("c7i.large", A)]


def test_a_pool_under_advice_is_left_alone_by_no_other_job(ports: FakePorts) -> None:
    training(ports)
    advised(ports)
    Sweep(ports).run()
    assert ports.store.colds == {}


def test_once_it_has_bought_elsewhere_the_pool_is_one_like_any_other(ports: FakePorts) -> None:
    training(ports)
    advised(ports)
    Sweep(ports).run()
    lost_all(ports)
    assert bought_again(ports) == [("c7i.large", B)]
    assert now(ports).elsewhere is None


def test_a_look_is_forgotten_with_the_advice_that_it_was_made_for(ports: FakePorts) -> None:
    training(ports)
    advised(ports)
    Sweep(ports).run()
    ports.clock.step(rules.ADVICE_HOLDS_S)
    lost_all(ports)
    assert bought_again(ports) == [("c7i.large", A), ("c7i.large", B)]


@pytest.mark.parametrize("later", ["interrupted", "lost"])
def test_a_look_that_comes_after_the_loss_changes_nothing(ports: FakePorts, later: str) -> None:
    training(ports)
    advised(ports)
    if later == "interrupted":
        notices.interrupted(b.OTHER, ports, deadline_at=b.NOW + 120)
    else:
        lost_all(ports)
    before = now(ports)
    record(CapacityLooked(at=b.NOW + 1, attempt=1, asked_at=b.NOW, outcome="elsewhere"), JOB, ports)
    assert now(ports) == before
