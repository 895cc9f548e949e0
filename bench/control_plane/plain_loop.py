"""The same decisions as one loop over a dict of functions and rows that are dicts: what the domain is measured against.

No ports, no dataclasses, no table of transitions, no retries: just what has to be done for these events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]
Wrote = Callable[..., object]
ORDERED = ("phase", "doomed", "deadline_at", "asked")
WAITS = {"interrupted": ("training",), "checkpointing": ("training",), "resuming": ("ready", "training", "checkpoint")}
COOL_DOWN_S, WARNED = 600.0, 50


def run(
    rows: dict[str, Row],
    nodes: dict[str, Row],
    waits: dict[tuple[str, str], str],
    events: Iterable[Row],
    wrote: Wrote = lambda *items: None,
) -> list[tuple[str, str]]:
    """Every event is applied to its node's job, once by its key; changed orders are written anew, and the waiting
    states told. The first notice of a pool asks its other jobs for a save. Returns what the waiting states were told.
    """
    told: list[tuple[str, str]] = []
    warned: dict[str, float] = {}
    for event in events:
        node = nodes.get(event["instance"])
        if node is None or node["job"] != event["job"]:
            continue
        if event["kind"] == "progress":
            nodes[event["instance"]] = {**node, "step": event["step"], "loss": event["loss"], "step_at": event["at"]}
            wrote(nodes[event["instance"]])
            continue
        row = _take(rows, node["job"], node["attempt"], event, wrote)
        for wait in WAITS.get(row["phase"], ()):
            token = waits.pop((row["id"], wait), None)
            if token is not None:
                told.append((token, row["phase"]))
        if event["kind"] == "noticed" and warned.get(row["pool"], 0.0) <= event["at"]:
            warned[row["pool"]] = event["at"] + COOL_DOWN_S
            for neighbour in _neighbours(rows, row):
                about = str(int(event["at"] // COOL_DOWN_S))
                _take(rows, neighbour, node["attempt"], {"kind": "advised", "about": about, "at": event["at"]}, wrote)
    return told


def _take(rows: dict[str, Row], job: str, attempt: int, event: Row, wrote: Wrote) -> Row:
    before = rows[job]
    key = f"{event['kind']}#{attempt}#{event['about']}"
    if key in before["seen"] or (attempt != before["attempt"] and event["kind"] != "saved"):
        return before
    row = {**before, "seen": before["seen"] | {key: event}}
    KINDS[event["kind"]](row, event)
    if row == {**before, "seen": row["seen"]}:
        return before
    row["version"] += 1
    if row["phase"] != before["phase"]:
        row["phase_at"], row["news"] = event["at"], row["news"] + 1
    if [row[name] for name in ORDERED] != [before[name] for name in ORDERED]:
        row["orders"] = {name: row[name] for name in ("attempt", "version", *ORDERED)}
        wrote(row["orders"])
    rows[job] = row
    wrote({name: value for name, value in row.items() if name not in ("seen", "orders")}, event)
    return row


def _neighbours(rows: dict[str, Row], row: Row) -> list[str]:
    others = [
        one for one in rows.values() if one["pool"] == row["pool"] and one["phase"] == "running" and one is not row
    ]
    others.sort(key=lambda one: one["saved"]["at"] if one["saved"] else 0.0)
    return [one["id"] for one in others[:WARNED]]


def noticed(row: Row, event: Row) -> None:
    if event["instance"] not in row["doomed"]:
        deadline_at = min(event["deadline_at"], row["deadline_at"] or event["deadline_at"])
        phase = "interrupted" if row["phase"] == "running" else row["phase"]
        row |= {"doomed": (*row["doomed"], event["instance"]), "phase": phase, "deadline_at": deadline_at}
        row |= {"interruptions": row["interruptions"] + 1, "stage": "saving before the deadline"}


def heard(row: Row, event: Row) -> None:
    row["phase"] = "checkpointing" if row["phase"] == "interrupted" else row["phase"]


def saved(row: Row, event: Row) -> None:
    row["step"] = max(row["step"], event["step"])
    if row["saved"] is None or event["order"] > row["saved"]["order"]:
        row["saved"] = {"save": event["save"], "order": event["order"], "at": event["at"]}
        if row["asked_at"] is not None and event["at"] >= row["asked_at"]:
            row["asked"] = None
    if event["final"] and row["phase"] != "resuming":
        row |= {"forced": row["forced"] + 1, "phase": "resuming", "stage": "releasing machines"}


def lost(row: Row, event: Row) -> None:
    if row["phase"] == "running":
        row |= {"phase": "resuming", "stage": "releasing machines", "failure": "preemption"}


def advised(row: Row, event: Row) -> None:
    if row["phase"] == "running":
        row |= {"asked": row["version"] + 1, "asked_at": event["at"], "stage": "saving early, training goes on"}


KINDS = {"noticed": noticed, "heard": heard, "saved": saved, "lost": lost, "advised": advised}
