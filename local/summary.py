"""What a run of the story showed, computed from its raw record alone, and what is demanded of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from bench.table import Row

METADATA_POLL_S = 2.0
"""How often an agent reads its own metadata (training_image/agent/settings.py)."""

ORDER_PATHS = {
    "spot warning": "event",
    "metadata": "metadata",
    "sweep": "sweep",
    "instance state": "event",
    "silence": "heartbeat",
}


class RawRecord:
    """The files of one run: timeline, per-step metrics, node events, API and EC2 calls, results, what was left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.timeline = self._lines("timeline")
        self.metrics = sorted(self._lines("metrics"), key=lambda line: line["at"])
        self.node_events = sorted(self._lines("node_events"), key=lambda line: line["at"])
        self.api_calls = self._lines("api_calls")
        self.ec2_calls = self._lines("ec2_calls")
        self.end: dict[str, Any] = json.loads((folder / "end.json").read_text())

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summarize(record: RawRecord) -> dict[str, Any]:
    """Return the figures of the run. Times are seconds from the publication of the notice; None = did not happen."""
    job, history = record.end["job"], record.end["history"]
    notices = [line for line in record.timeline if line["what"] == "interruption"]
    noticed_at = notices[0]["at"] if notices else None
    losses = [line["loss"] for line in record.metrics]
    orders = _first(
        call["at"] for call in record.api_calls if _wrote_orders(call, job["id"]) and _after(call, noticed_at)
    )
    signal = _first(
        line["at"]
        for line in record.node_events
        if line["event"] == "signal" and line["kind"] == "checkpoint_stop" and _after(line, noticed_at)
    )
    commit = _first(call["at"] for call in record.api_calls if _put_manifest(call) and _after(call, signal))
    first_step = _first(line["at"] for line in record.metrics if line["attempt"] > 1)
    return {
        "job_id": job["id"],
        "phase": job["phase"],
        "attempts": job["attempt"],
        "interruptions": len(notices),
        "forced_checkpoints": job["forced_checkpoints"],
        "steps": max((line["step"] for line in record.metrics), default=0),
        "lost_steps": _lost_steps(record.metrics, record.end["steps"]),
        "steps_since_durable": _steps_since_durable(record, noticed_at),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "fleets_launched": len({call["response"]["FleetId"] for call in record.ec2_calls if _bought(call)}),
        "machines_bought": len(record.end["instances"]),
        "jobs_created": record.end["jobs_created"],
        "instances_left": len([one for one in record.end["instances"] if one["state"] != "terminated"]),
        "processes_left": len(record.end["processes"]),
        "result_ids": len({result["id"] for result in record.end["results"]}),
        "order_path": _order_path(history),
        "notice_to_order_s": _since(noticed_at, orders),
        "notice_to_signal_s": _since(noticed_at, signal),
        "notice_to_commit_s": _since(noticed_at, commit),
        "notice_s": notices[0]["notice_s"] if notices else None,
        "interruption_to_first_step_s": _since(noticed_at, first_step),
        "wall_s": round(record.end["ended_at"] - record.end["started_at"], 2),
    }


def demands(summary: dict[str, Any], notice: str) -> list[Row]:
    """Return each demand on the story with its figure."""
    rows = [
        _equal(summary, "phase", "completed"),
        _equal(summary, "attempts", 2),
        _equal(summary, "interruptions", 1),
        _equal(summary, "jobs_created", 1),
        _equal(summary, "result_ids", 1),
        _equal(summary, "fleets_launched", 2),
        # Two at first, and one for the one that was taken: the survivor is used again.
        _equal(summary, "machines_bought", 3),
        _equal(summary, "instances_left", 0),
        _equal(summary, "processes_left", 0),
        _below(summary, "last_loss", summary["first_loss"], "first_loss"),
        _at_most(summary, "wall_s", 180),
    ]
    if notice == "none":
        rows += [
            _equal(summary, "order_path", "sweep"),
            _at_most(summary, "lost_steps", summary["steps_since_durable"]),
        ]
        return rows
    rows += [
        _equal(summary, "lost_steps", 0),
        _at_most(summary, "notice_to_signal_s", METADATA_POLL_S + 1),
        _below(summary, "notice_to_commit_s", summary["notice_s"], "notice_s"),
    ]
    if notice != "all":
        rows.append(_equal(summary, "order_path", notice))
    if notice != "metadata":
        rows.append(_at_most(summary, "notice_to_order_s", 3))
    return rows


def _lost_steps(metrics: list[dict[str, Any]], steps: int) -> int:
    """Finished optimizer steps that were trained more than once, or never."""
    times = Counter(line["step"] for line in metrics)
    return sum(abs(times[step] - 1) for step in range(1, steps + 1))


def _steps_since_durable(record: RawRecord, noticed_at: float | None) -> int:
    """Steps of the first attempt after the newest save whose manifest was in before the notice."""
    trained = max((line["step"] for line in record.metrics if line["attempt"] == 1), default=0)
    durable = [
        int(call["key"].split("/step-")[1][:8])
        for call in record.api_calls
        if _put_manifest(call) and noticed_at is not None and call["at"] <= noticed_at
    ]
    return trained - max(durable, default=0)


def _order_path(history: list[dict[str, Any]]) -> str | None:
    causes = [
        event["cause"]
        for event in history
        if event["kind"] in ("interruption_noticed", "fleet_lost") and event["cause"]
    ]
    return ORDER_PATHS.get(causes[0], causes[0]) if causes else None


def _wrote_orders(call: dict[str, Any], job: str) -> bool:
    items = call.get("items", [])
    return any(item["key"].get("key", {}).get("S") == f"{job}/orders" for item in items) and call["status"] == 200


def _put_manifest(call: dict[str, Any]) -> bool:
    put = call["operation"] == "PutObject" and call["status"] == 200
    return put and str(call["key"]).endswith("/manifest.json")


def _bought(call: dict[str, Any]) -> bool:
    return call["operation"] == "CreateFleet" and bool(call["response"].get("Instances"))


def _after(line: dict[str, Any], at: float | None) -> bool:
    return at is not None and line["at"] >= at


def _first(times: Any) -> float | None:
    return min(times, default=None)


def _since(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 3)


def _equal(summary: dict[str, Any], name: str, wanted: Any) -> Row:
    return Row(name, summary[name], f"= {wanted}", summary[name] == wanted)


def _at_most(summary: dict[str, Any], name: str, most: float) -> Row:
    return Row(name, summary[name], f"<= {most:g}", summary[name] is not None and summary[name] <= most)


def _below(summary: dict[str, Any], name: str, most: float | None, what: str) -> Row:
    value = summary[name]
    return Row(name, value, f"< {what}", value is not None and most is not None and value < most)
