"""What is in flight, used and held."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from holdfast.domain.ledger import ALL_TEAMS, HALF_LIFE_S, InFlight, Ledger, Reserved
from job_contract.version import build, plain
from tests import builders as b

EIGHT = Reserved(vcpus=192, gpus=8, nodes=1, market="spot")


def a_place(job: str = "j", **changes: object) -> InFlight:
    place = InFlight(
        job=job, team="research", priority=50, attempt=1, since_at=b.NOW, ends_at=b.NOW + 3600, running=True,
        reserved=EIGHT,
    )  # fmt: skip
    return replace(place, **changes)  # type: ignore[arg-type]


def started(reserved: Reserved | None = EIGHT) -> tuple[object, object]:
    before = b.a_job()
    return before, b.after(before, replace(b.started(), reserved=reserved))


def test_a_start_takes_a_place_and_the_closing_of_the_attempt_gives_it_back() -> None:
    job = b.a_job()
    running = b.after(job, replace(b.started(), reserved=EIGHT))
    ledger = Ledger().moved(job, running, b.NOW)
    assert (ledger.version, ledger.freed) == (1, 0)
    [place] = ledger.in_flight
    assert (place.job, place.team, place.reserved, place.running) == (job.id, "research", EIGHT, True)
    assert place.ends_at > b.NOW + job.run_s
    closing = b.after(running, b.finished())
    assert closing.reserved == EIGHT, "machines count until the attempt is closed"
    closed = b.after(closing, b.closed())
    assert closed.reserved is None
    ledger = ledger.moved(closing, closed, b.NOW + 60)
    assert (ledger.version, ledger.in_flight, ledger.freed) == (2, (), 1)


@pytest.mark.parametrize(
    "ending",
    [(b.failed("user_error"), b.closed()), (b.lost(), b.closed()), (b.closed(),), (b.cancelled(), b.closed())],
    ids=["failed", "lost", "closed", "cancelled"],
)
def test_no_way_to_end_keeps_the_place(ending: tuple[object, ...]) -> None:
    running = b.after(b.a_running_job(reserved=EIGHT))
    running = replace(running, reserved=EIGHT)
    assert b.after(running, *ending).reserved is None  # type: ignore[arg-type]


def test_use_is_the_same_however_often_it_is_counted() -> None:
    once = Ledger(in_flight=(a_place(),), usage={"vision/spot": 1e9}, usage_at=b.NOW)
    often = once
    for second in range(0, 86_400, 600):
        often = often.accrued(b.NOW + second)
    once, often = once.accrued(b.NOW + 86_400), often.accrued(b.NOW + 86_400)
    assert often.usage == pytest.approx(once.usage)
    eight_gpu_days = 8 * 24 * 86_400
    assert 0.9 * eight_gpu_days < once.usage["research/spot"] < eight_gpu_days
    assert once.usage["vision/spot"] == pytest.approx(1e9 * 0.5 ** (1 / 7))


def test_use_loses_half_its_weight_in_a_half_life_and_is_forgotten_in_the_end() -> None:
    ledger = Ledger(usage={"vision/spot": 1e6}, usage_at=b.NOW)
    assert ledger.accrued(b.NOW + HALF_LIFE_S).usage == {"vision/spot": pytest.approx(5e5)}
    assert ledger.accrued(b.NOW + 20 * HALF_LIFE_S).usage == {}


def test_a_clock_that_runs_backwards_counts_nothing() -> None:
    ledger = Ledger(in_flight=(a_place(),), usage_at=b.NOW)
    assert ledger.accrued(b.NOW - 60) is ledger


@pytest.mark.parametrize(
    ("reserved", "shares"),
    [
        (EIGHT, 192),
        (Reserved(vcpus=64, nodes=2, market="spot"), 64),
        (Reserved(nodes=2, market="spot"), 48),
    ],
    ids=["gpus", "vcpus where there are no gpus", "nodes where nothing is known"],
)
def test_what_a_second_costs(reserved: Reserved, shares: int) -> None:
    assert reserved.shares == shares


def test_survivors_hold_their_part() -> None:
    gang = Reserved(vcpus=768, gpus=32, nodes=4, market="spot", yields_to="x")
    assert gang.of_nodes(3) == Reserved(vcpus=576, gpus=24, nodes=3, market="spot")
    assert gang.of_nodes(0) is None


def test_a_hold_stands_until_it_is_taken_away_and_again_changes_nothing() -> None:
    held = Ledger().held("vision", b.NOW, "ann").held(ALL_TEAMS, b.NOW, "ann")
    assert held.held("vision", b.NOW + 9, "bob") is held
    assert [hold.scope for hold in held.holds] == ["*", "vision"]
    free = held.unheld(ALL_TEAMS)
    assert (free.hold_on(ALL_TEAMS), free.freed) == (None, held.freed + 1)
    assert free.hold_on("vision") is not None
    assert free.unheld("nobody") is free


def test_a_full_ledger_fits_an_item() -> None:
    names = [f"{'n' * 29}-{number:010x}" for number in range(1_500)]
    yielding = replace(EIGHT, market="on_demand", yields_to="n" * 40)
    places = tuple(
        a_place(name, team="t" * 31, reserved=yielding if n % 50 == 0 else EIGHT) for n, name in enumerate(names)
    )
    usage = {f"team-{number}/spot": 123456789.123456 for number in range(200)}
    data = plain(Ledger(version=10**6, in_flight=places, usage=usage, usage_at=b.NOW))
    assert len(json.dumps(data, separators=(",", ":"))) < 400_000
    assert build(Ledger, json.loads(json.dumps(data))).in_flight == places
