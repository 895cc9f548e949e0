"""The same decisions as one loop over a dict of functions and rows that are dicts: what the domain is measured against.

No ports, no dataclasses, no table of transitions, no retries: just what has to be done for these events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]
Wrote = Callable[..., object]
ORDERED = ("phase", "doomed", "deadline_at")


def run(rows: dict[str, Row], nodes: dict[str, Row], events: Iterable[Row], wrote: Wrote = lambda *items: None) -> None:
    """Every event is applied to its node's job, once by its key; changed orders are written anew."""
    for event in events:
        node = nodes.get(event["instance"])
        if node is None:
            continue
        if event["kind"] == "progress":
            nodes[event["instance"]] = {**node, "step": event["step"], "loss": event["loss"], "step_at": event["at"]}
            wrote(nodes[event["instance"]])
            continue
        before = rows[node["job"]]
        key = f"{event['kind']}#{node['attempt']}#{event['about']}"
        if key in before["seen"]:
            continue
        row = {**before, "seen": before["seen"] | {key: event}}
        KINDS[event["kind"]](row, event)
        if row == {**before, "seen": row["seen"]}:
            continue
        row["version"] += 1
        if row["phase"] != before["phase"]:
            row["phase_at"], row["news"] = event["at"], row["news"] + 1
        if [row[name] for name in ORDERED] != [before[name] for name in ORDERED]:
            row["orders"] = {name: row[name] for name in ("attempt", "version", *ORDERED)}
            wrote(row["orders"])
        rows[node["job"]] = row
        wrote({name: value for name, value in row.items() if name not in ("seen", "orders")}, event)


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
    if event["final"] and row["phase"] != "resuming":
        row |= {"forced": row["forced"] + 1, "phase": "resuming", "stage": "releasing machines"}


def lost(row: Row, event: Row) -> None:
    if row["phase"] == "running":
        row |= {"phase": "resuming", "stage": "releasing machines", "failure": "preemption"}


KINDS = {"noticed": noticed, "heard": heard, "saved": saved, "lost": lost}
