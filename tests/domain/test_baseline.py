"""When steps are off their baseline, when that is sure, and what becomes a baseline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from holdfast.domain.baseline import (
    OFF_REPORTS,
    RENEWED_AFTER_S,
    WINDOW_STEPS,
    Baseline,
    BaselineKey,
    Watch,
    culprit,
    excesses,
    model_of,
    one_node,
    sentence,
    together,
)
from holdfast.messages.job_request import canonical_body, read_request
from job_contract.reports import Steady
from tests import builders as b

USUAL = Baseline(
    job="before", at=b.NOW, nodes=2, world_size=2, tokens_per_s=1000.0, step_ms=1000.0, data_wait_ms=10.0, comm_ms=200.0
)


def steady(**changes: Any) -> Steady:
    fields = {"step_ms": 1000.0, "tokens_per_s": 1000.0, "data_wait_ms": 10.0, "comm_ms": 200.0}
    return Steady(**{"steps": 100, "world_size": 2, **fields, **changes})


def off(**changes: Any) -> list[str]:
    return [one.figure for one in excesses(steady(**changes), USUAL)]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"comm_ms": 230.0, "step_ms": 1030.0}, []),
        ({"comm_ms": 250.0, "step_ms": 1050.0}, ["comm_ms"]),
        ({"step_ms": 1150.0}, []),
        ({"step_ms": 1250.0}, ["step_ms"]),
        ({"data_wait_ms": 18.0}, []),
        ({"data_wait_ms": 60.0}, ["data_wait_ms"]),
        ({"step_ms": 1500.0, "comm_ms": 700.0}, ["step_ms", "comm_ms"]),
        ({"comm_ms": None}, []),
        ({"step_ms": 500.0, "comm_ms": 50.0, "data_wait_ms": 0.0}, []),
    ],
    ids=[
        "as usual", "all-reduce +15 %", "all-reduce +25 %", "step +15 %", "step +25 %", "noise of a short wait",
        "data", "two figures", "not measured", "faster",
    ],
)  # fmt: skip
def test_a_figure_is_off_when_it_is_more_than_a_fifth_over_its_baseline(
    changes: dict[str, Any], found: list[str]
) -> None:
    assert off(**changes) == found


def watched(*told: Steady, every_s: float = 300.0, usual: Baseline | None = USUAL) -> list[float]:
    """Return when signals were given while a watch saw these reports."""
    watch, given = Watch(attempt=1, usual=usual), []
    for number, one in enumerate(told):
        at = every_s * number
        watch = watch.judged(one, at)
        if watch.signalling(at):
            watch = watch.signalled("slow")
            given.append(at)
    return given


SLOW, GOOD = steady(comm_ms=250.0), steady()


def test_a_slowness_that_lasts_is_signalled_once_after_three_reports() -> None:
    assert watched(*[SLOW] * (OFF_REPORTS - 1), GOOD, *[SLOW] * (OFF_REPORTS - 1)) == []
    assert watched(*[GOOD] * 5, *[SLOW] * 100) == [300.0 * (5 + OFF_REPORTS - 1)]


def test_three_reports_within_seconds_are_no_signal_yet() -> None:
    assert watched(*[SLOW] * 100, every_s=2.0) == []
    assert watched(*[SLOW] * 200, every_s=2.0) == [300.0]


def test_a_signal_ends_when_the_steps_are_usual_again_and_only_then_may_the_next_come() -> None:
    almost = steady(comm_ms=225.0)
    assert len(watched(*[SLOW] * 5, *[almost] * 20, *[SLOW] * 20)) == 1
    assert len(watched(*[SLOW] * 5, *[GOOD] * 2, *[SLOW] * 20)) == 1
    assert len(watched(*[SLOW] * 5, *[GOOD] * OFF_REPORTS, *[SLOW] * 20)) == 2


def test_without_a_baseline_nothing_is_judged() -> None:
    assert watched(*[SLOW] * 100, usual=None) == []


def test_a_window_is_whole_after_enough_steps_and_is_their_mean_by_steps() -> None:
    watch = Watch(attempt=1).grown(steady(steps=WINDOW_STEPS - 10, step_ms=100.0))
    assert watch.window is None
    window = watch.grown(steady(steps=10, step_ms=150.0)).window
    assert window is not None
    assert (window.steps, window.step_ms) == (WINDOW_STEPS, 110.0)
    assert watch.judging_by(USUAL).grown(steady()).own is None


def test_steps_of_another_world_size_are_not_mixed() -> None:
    assert together(steady(), steady(world_size=4, step_ms=1.0)) == steady(world_size=4, step_ms=1.0)
    assert together(steady(), steady(comm_ms=None)).comm_ms is None


def test_a_baseline_gives_way_to_a_far_faster_one_and_never_to_a_slower_one() -> None:
    def own(**changes: Any) -> Baseline:
        return replace(USUAL, job="new", **changes)

    assert USUAL.outdone_by(own(step_ms=800.0))
    assert not USUAL.outdone_by(own(step_ms=900.0))
    assert not USUAL.outdone_by(own(step_ms=2000.0))
    late = b.NOW + RENEWED_AFTER_S + 1
    assert USUAL.outdone_by(own(at=late))
    assert not USUAL.outdone_by(own(at=late, step_ms=2000.0))


@pytest.mark.parametrize(
    ("node_ms", "rank"),
    [
        ((800.0, 850.0), 1),
        ((800.0, 800.0, 805.0), None),
        ((850.0, 800.0, 800.0), 0),
        ((20.0, 20.0, 26.0), 2),
        ((800.0,), None),
        ((0.0, 850.0), None),
        ((), None),
    ],
    ids=[
        "its own time grew",
        "none stands out",
        "the leader",
        "a GPU's piece of work",
        "alone",
        "not measured",
        "none",
    ],
)
def test_the_node_whose_own_time_explains_the_wait_is_named_or_none(node_ms: Sequence[float], rank: int | None) -> None:
    assert culprit(excesses(SLOW, USUAL), node_ms) == rank


def test_no_node_explains_a_wait_for_data() -> None:
    assert culprit(excesses(steady(data_wait_ms=60.0), USUAL), (800.0, 900.0)) is None


def test_the_sentence_has_the_figures_and_where_they_were_measured() -> None:
    named = sentence(
        excesses(SLOW, USUAL), measured_on="rank 0 on i-1", node="node 1 (i-2)", own_ms=850.0, others_ms=800.0
    )
    assert named == (
        "waiting for other ranks takes 250 ms where 200 is usual (+25%), node 1 (i-2) needs 850 ms of its own where "
        "the others need 800, measured on rank 0 on i-1"
    )
    network = sentence(excesses(SLOW, USUAL), measured_on="rank 0 on i-1", node="")
    assert "look at the network" in network
    data = sentence(excesses(steady(data_wait_ms=60.0), USUAL), measured_on="rank 0 on i-1", node="")
    assert data == "waiting for data takes 60 ms where 10 is usual (+500%), measured on rank 0 on i-1"


def request(**training: Any) -> dict[str, Any]:
    body = b.sample("job-request.json")
    body["training"] |= training
    return dict(json.loads(canonical_body(read_request(json.dumps(body)))))


def test_jobs_are_comparable_by_model_type_world_size_and_the_work_of_a_step() -> None:
    key = BaselineKey.of(request(), "c7i.large", 2)
    assert BaselineKey.of(request(steps=7, seed=3, learning_rate=0.5, warmup_steps=0), "c7i.large", 2) == key
    assert BaselineKey.of(request(global_batch=64), "c7i.large", 2) != key
    assert model_of(request(global_batch=64)) == key.model
    assert model_of(request(sequence_length=32)) != key.model
    assert len({key, BaselineKey.of(request(), "c7i.xlarge", 2), BaselineKey.of(request(), "c7i.large", 4)}) == 3


def test_the_fastest_run_on_one_node_is_what_scaling_is_held_against() -> None:
    known = [USUAL, replace(USUAL, nodes=1, tokens_per_s=600.0), replace(USUAL, nodes=1, tokens_per_s=550.0)]
    best = one_node(known)
    assert best is not None and best.tokens_per_s == 600.0
    assert one_node([USUAL]) is None
