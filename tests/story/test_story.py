"""The whole story once, and each figure of its summary computed again from the raw record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from local.processes import marked
from local.story import Story
from local.summary import RawRecord, demands, summarize

pytestmark = [pytest.mark.cloud, pytest.mark.ranks, pytest.mark.timeout(280)]

UNTIMED = {"wall_s", "notice_to_signal_s", "notice_to_order_s", "notice_to_commit_s"}
"""Demands in seconds are `make run`'s; a loaded machine proves nothing about them."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("story") / "run"
    yield folder, Story(folder, notice="all", victim="other", notice_s=60.0, quiet=True).play()


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_the_job_lived_through_its_interruption(told: tuple[Path, dict[str, Any]]) -> None:
    _, summary = told
    missed = [row for row in demands(summary, "all") if not row.ok and row.name not in UNTIMED]
    assert missed == []


def test_every_figure_of_the_summary_follows_from_the_raw_record(told: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = told
    assert json.loads((folder / "summary.json").read_text()) == summary
    end = json.loads((folder / "end.json").read_text())
    metrics, calls = lines(folder, "metrics"), lines(folder, "api_calls")
    fleets = [call for call in lines(folder, "ec2_calls") if call["operation"] == "CreateFleet"]
    [notice] = [line for line in lines(folder, "timeline") if line["what"] == "interruption"]
    job, at = end["job"]["id"], notice["at"]

    trained = [line["step"] for line in metrics]
    puts = [call for call in calls if call["operation"] == "PutObject" and call["key"].endswith("manifest.json")]
    signals = [line["at"] for line in lines(folder, "node_events") if line["event"] == "signal" and line["at"] >= at]
    commits = [put["at"] for put in puts if put["at"] >= min(signals)]
    orders = [call["at"] for call in calls if f"{job}/orders" in json.dumps(call.get("items", "")) and call["at"] >= at]
    second = min(line["at"] for line in metrics if line["attempt"] == 2)
    before = [int(put["key"].split("step-")[1][:8]) for put in puts if put["at"] <= at]
    causes = {event["kind"]: event["cause"] for event in reversed(end["history"])}
    by_time = sorted(metrics, key=lambda line: line["at"])

    assert summary == {
        "job_id": job,
        "phase": end["history"][-1]["after"],
        "attempts": max(line["attempt"] for line in metrics),
        "interruptions": 1,
        "forced_checkpoints": len([one for one in end["history"] if one["detail"].get("final")]),
        "steps": 120,
        "lost_steps": len(trained) - len(set(trained)) + len(set(range(1, 121)) - set(trained)),
        "steps_since_durable": max(line["step"] for line in metrics if line["attempt"] == 1) - max(before),
        "first_loss": by_time[0]["loss"],
        "last_loss": by_time[-1]["loss"],
        "fleets_launched": len([call for call in fleets if call["response"]["Instances"]]),
        "machines_bought": len(list((folder / "nodes").iterdir())),
        "jobs_created": 1,
        "instances_left": 0,
        "processes_left": 0,
        "result_ids": len({result["id"] for result in end["results"]}),
        "order_path": {"spot warning": "event", "metadata": "metadata"}[causes["interruption_noticed"]],
        "notice_to_order_s": round(min(orders) - at, 3),
        "notice_to_signal_s": round(min(signals) - at, 3),
        "notice_to_commit_s": round(min(commits) - at, 3),
        "notice_s": 60.0,
        "interruption_to_first_step_s": round(second - at, 3),
        "wall_s": round(end["ended_at"] - end["started_at"], 2),
    }
    assert end["processes"] == []
    assert {one["state"] for one in end["instances"]} == {"terminated"}


def test_a_step_that_was_trained_twice_or_never_is_counted(told: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = told
    record = RawRecord(folder)
    twice = next(line for line in record.metrics if line["step"] == 7)
    record.metrics = [line for line in record.metrics if line["step"] != 9] + [twice]
    assert summarize(record)["lost_steps"] == summary["lost_steps"] + 2


def test_the_report_of_the_run_tells_what_the_nodes_did(told: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = told
    report = json.loads((folder / "report.json").read_text())
    trained = {line["step"]: line for line in lines(folder, "metrics")}
    assert [one["step"] for one in report["curve"]] == sorted(trained)
    assert (report["step"], report["tokens"]) == (len(trained), sum(line["tokens"] for line in trained.values()))
    assert [one["attempt"] for one in report["attempts"]] == [1, 2] and report["interruptions"] == 1
    assert "interruption_noticed" in {one["kind"] for one in report["troubles"]}
    assert "<svg" in (folder / "report.html").read_text()


def test_nothing_was_left_running(told: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = told
    nodes = [path.name for path in (folder / "nodes").iterdir()]
    assert len(nodes) == 3, "two nodes at first; the one that was not interrupted is used again"
    assert [pid for node in nodes for pid in marked("HOLDFAST_NODE", node)] == []
