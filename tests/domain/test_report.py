"""Claims about the report of a run: what counts, and that nothing on its page is more than text."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest

from holdfast.domain.baseline import Baseline
from holdfast.domain.phase import Phase
from holdfast.domain.report import MOST_POINTS, counted, run_report, speed_of, thinned
from holdfast.messages.report_page import report_page
from tests.builders import NOW, a_job


def a_line(step: int, attempt: int = 1, **more: Any) -> dict[str, Any]:
    at = NOW + 100 * attempt + step
    return {"step": step, "attempt": attempt, "loss": 5.0 / step, "tokens": 100, "seconds": 2.0, "at": at, **more}


def an_event(kind: str, attempt: int = 1, at: float = NOW, cause: str = "", **detail: Any) -> dict[str, Any]:
    return {"kind": kind, "attempt": attempt, "at": at, "cause": cause, "detail": detail}


HISTORY = [
    an_event("attempt_started", at=NOW + 1),
    an_event("fleet_bought", at=NOW + 2, instance_type="p5.48xlarge", zone="us-east-1a", market="spot", nodes=2),
    an_event("training_started", at=NOW + 9, step=0),
    an_event("checkpoint_saved", at=NOW + 20, pointer={"save": "step-00000004.a0001.s01"}),
    an_event("interruption_noticed", at=NOW + 30, cause="spot warning", instance="i-1"),
    an_event("checkpoint_saved", at=NOW + 31, pointer={"save": "step-00000006.a0001.s02"}),
    an_event("checkpoint_saved", at=NOW + 32, pointer={"save": "step-00000006.a0001.s02"}, final=True),
    an_event("attempt_closed", at=NOW + 40, cause="run ended"),
    an_event("attempt_started", 2, at=NOW + 41),
    an_event("training_started", 2, at=NOW + 50, step=6),
]


def a_report(metrics: list[dict[str, Any]], history: list[dict[str, Any]] = HISTORY, **job: Any) -> dict[str, Any]:
    ended = {"phase": Phase.COMPLETED, "ended_at": NOW + 100, "step": 10, "lost_steps": 1}
    return run_report(a_job(**{**ended, **job}), history, metrics, steps=10)


def test_of_a_step_that_was_trained_again_the_later_training_counts() -> None:
    lines = [a_line(7, 1, loss=9.0), a_line(7, 2, loss=0.5), a_line(6), a_line(8, 2)]
    assert [(line["step"], line["attempt"]) for line in counted(lines)] == [(6, 1), (7, 2), (8, 2)]


def test_a_line_of_several_steps_that_a_later_attempt_began_within_does_not_count() -> None:
    lines = [a_line(5, 1, steps=5), a_line(10, 1, steps=5), a_line(12, 2, steps=5)]
    assert [(line["step"], line["attempt"]) for line in counted(lines)] == [(5, 1), (12, 2)]


def test_evaluations_are_a_curve_of_their_own_and_no_steps() -> None:
    evaluation = {"step": 4, "attempt": 1, "at": NOW, "evaluation_loss": 2.5}
    report = a_report([a_line(4), evaluation])
    assert (report["evaluations"], len(report["curve"])) == ([{"step": 4, "loss": 2.5}], 1)


def test_goodput_is_the_share_of_the_time_in_which_steps_were_made_that_count() -> None:
    lines = [a_line(step) for step in range(1, 11)] + [a_line(step, 2) for step in range(7, 11)]
    assert a_report(lines)["goodput"] == pytest.approx(20 / 100)
    assert a_report([])["goodput"] is None


def test_a_save_that_several_nodes_told_of_is_listed_once_and_says_that_it_was_ordered() -> None:
    assert [(one["step"], one["final"]) for one in a_report([])["checkpoints"]] == [(4, False), (6, True)]


def test_a_loss_that_shows_twice_is_one_interruption_and_both_are_listed() -> None:
    report = a_report([], [*HISTORY, an_event("fleet_lost", at=NOW + 33, cause="state change")], interruptions=1)
    assert (report["interruptions"], [one["kind"] for one in report["troubles"]]) == (
        1,
        ["interruption_noticed", "fleet_lost"],
    )


def test_each_attempt_says_where_it_ran_and_from_which_step_it_went_on() -> None:
    first, second = a_report([])["attempts"]
    assert (first["instance_type"], first["trains_at"] - first["started_at"], first["why"]) == (
        "p5.48xlarge",
        8,
        "run ended",
    )
    assert (second["from_step"], "closed_at" in second) == (6, False)


def test_a_curve_is_bounded_and_keeps_its_ends() -> None:
    lines = [a_line(step) for step in range(1, 10_001)]
    curve = a_report(lines)["curve"]
    assert (len(curve), curve[0]["step"], curve[-1]["step"]) == (MOST_POINTS, 1, 10_000)
    assert thinned(lines[:3], 500) == lines[:3]


def a_steady_line(attempt: int = 1, steps: int = 200, **more: Any) -> dict[str, Any]:
    steady = {"steps": steps, "world_size": 16, "step_ms": 410.5, "tokens_per_s": 900.0, "data_wait_ms": 1.25}
    return {"step": 300, "attempt": attempt, "at": NOW, "steady": steady, **more}


ONE_NODE = Baseline(
    job="alone", at=NOW, nodes=1, world_size=8, tokens_per_s=500.0, step_ms=400.0, data_wait_ms=1.0, comm_ms=None
)


def test_scaling_efficiency_is_held_against_one_node_of_the_type() -> None:
    speed = speed_of(HISTORY, [a_line(1), a_steady_line(mfu=0.41)], ONE_NODE)
    assert (speed["efficiency"], speed["efficiency_unknown"], speed["tokens_per_s"]) == (0.9, "", 900.0)
    assert (speed["nodes"], speed["instance_type"], speed["world_size"], speed["mfu"]) == (2, "p5.48xlarge", 16, 0.41)
    assert speed["comm_ms"] is None


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "no attempt told of steady steps"),
        ([a_steady_line()], "no run of this model on one p5.48xlarge is known"),
        ([a_steady_line(attempt=2)], "the history does not say on how many nodes attempt 2 ran"),
    ],
)
def test_where_efficiency_is_not_known_the_report_says_why(lines: list[dict[str, Any]], why: str) -> None:
    report = a_report([a_line(1), *lines])
    assert report["speed"]["efficiency"] is None
    assert report["speed"]["efficiency_unknown"].startswith(why)
    assert why in read(report_page(report))


def test_the_attempt_with_the_most_steady_steps_speaks_for_the_run() -> None:
    lines = [a_steady_line(2, 100), a_steady_line(1, 900), a_steady_line(3, 50)]
    assert speed_of(HISTORY, lines)["attempt"] == 1


@pytest.mark.parametrize(("memory", "hints"), [(0.79, 1), (0.8, 0), (None, 0)])
def test_memory_that_was_never_used_is_advice_and_only_where_there_are_gpus(memory: float | None, hints: int) -> None:
    report = a_report([a_line(1), a_steady_line(gpu_memory=memory)])
    assert len(report["speed"]["advice"]) == hints
    assert ("the batch may be too small" in read(report_page(report))) == bool(hints)


def test_the_page_shows_speed_efficiency_and_what_slowed_it_with_formulas() -> None:
    slow = an_event("steps_slowed", at=NOW + 25, cause="a step takes 500 ms where 400 is usual (+25%)", number=1)
    lines = [a_line(1), a_steady_line(mfu=0.41)]
    speed = speed_of([*HISTORY, slow], lines, ONE_NODE)
    report = run_report(a_job(), HISTORY, lines, steps=10, speed=speed)
    json.dumps(report, allow_nan=False)
    text = read(report_page(report))
    for said in (
        "90.0%", "41.0%", "410 ms", "1.2 ms", "2 x p5.48xlarge, 16 ranks", "500 tokens/s, by alone",
        "tokens/s / (nodes x tokens/s of one node)", "6 N + 12 L D T", "where 400 is usual",
    ):  # fmt: skip
        assert said in text, said


class Strict(HTMLParser):
    """Fails at what a page of text may not hold, and at tags that do not close."""

    VOID = frozenset({"meta", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "iframe", "img", "object"} and not [name for name, _ in attrs if name[:2] == "on"]
        assert all(not (value or "").startswith(("http", "//")) for _, value in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in {"polyline", "line"}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> str:
    parser = Strict()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return " ".join(parser.text)


def test_the_page_shows_the_run_and_loads_nothing() -> None:
    lines = [a_line(step) for step in range(1, 7)] + [a_line(step, 2) for step in range(7, 11)]
    text = read(report_page(a_report(lines)))
    for said in ("10 of 10", "spot warning", "step-00000006.a0001.s02", "2 x p5.48xlarge", "attempt 2 goes on from"):
        assert said in text


def test_text_of_a_request_stays_text_on_the_page() -> None:
    evil = '<script>alert(1)</script>"><img src=x onerror=alert(1)>'
    history = [an_event("failed", reason=evil), an_event("attempt_closed", cause=evil)]
    assert evil in read(report_page(a_report([a_line(1)], history, name=evil, reason=evil)))


def test_a_loss_that_is_no_number_leaves_a_gap_and_no_broken_page() -> None:
    lines = [a_line(1), a_line(2, loss=float("nan")), a_line(3), a_line(4, loss=float("inf")), a_line(5)]
    report = a_report(lines)
    json.loads(json.dumps(report, allow_nan=False))
    page = report_page(report)
    read(page)
    assert "nan" not in page and "inf" not in page.replace("info", "")


def test_a_job_that_never_trained_has_a_page_too() -> None:
    assert "No step was trained" in read(
        report_page(a_report([], [], phase=Phase.FAILED, step=0, reason="no capacity"))
    )
