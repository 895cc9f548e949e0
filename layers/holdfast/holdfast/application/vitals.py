"""What the sweep measures while it looks: numbers that are zero while all is well, and then are not sent at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.application.ports import Ports
from holdfast.domain.job import Job
from holdfast.domain.ownership import Node
from holdfast.domain.phase import Intent, Phase

COMMIT_AGE_FLOOR_S = 1_800.0
"""One slow upload is no reason to wake anybody, however short the interval is."""

STEPS_UNKNOWN_S = 3_600.0
"""What an interval in steps counts as while no node has told how fast it steps."""

UNHEARD_S = 60.0
"""Agents poll every five seconds at the slowest."""

SILENT_AT_LEAST_S = 600.0
SILENT_REPORTS = 3

AUTO_INTERVAL_S = 1_800.0
"""The longer one of the two that `checkpoint: auto` stands for."""


class Vitals:
    """Gathers the metrics of one sweep. `found` holds what is to be sent: names as the alarms of the template know
    them, values above zero."""

    def __init__(self, ports: Ports) -> None:
        self.ports = ports
        self.found: dict[str, float] = {}

    def look(self, job: Job) -> None:
        """What is wrong with a job whose attempt is open is counted."""
        now = self.ports.clock()
        if job.phase is Phase.INTERRUPTED and now - job.phase_at > UNHEARD_S:
            self._one_more("OrdersNotHeard")
        nodes = self._nodes(job, now)
        if self._silent(job, nodes, now):
            self._one_more("SilentFleets")
        age_s = commit_age_s(job, now)
        if age_s > COMMIT_AGE_FLOOR_S and age_s > 2 * self._interval_s(job, nodes):
            self.found["LastCommitAgeSeconds"] = max(age_s, self.found.get("LastCommitAgeSeconds", 0.0))

    def orphans(self, number: int) -> None:
        if number:
            self.found["Orphans"] = float(number)

    def budget_warned(self) -> None:
        self._one_more("BudgetWarnings")

    def _one_more(self, name: str) -> None:
        self.found[name] = self.found.get(name, 0.0) + 1

    def _nodes(self, job: Job, now: float) -> list[Node]:
        """Return the nodes of a fleet that should have spoken by now; of a young one nothing needs to be known."""
        since = job.roster_at or job.bought_at
        if job.fleet is None or since is None or now - since < SILENT_AT_LEAST_S:
            return []
        intent = self.ports.store.intent(job.fleet)
        return self.ports.store.nodes(intent.instances) if intent else []

    def _silent(self, job: Job, nodes: list[Node], now: float) -> bool:
        if not nodes or job.phase not in (Phase.LAUNCHING, Phase.RUNNING):
            return False
        if job.roster_id is None:
            return all(node.ready is None for node in nodes)
        heard_at = max((node.reported_at or 0.0) for node in nodes)
        bound_s = max(SILENT_AT_LEAST_S, SILENT_REPORTS * job.report_s)
        return now - max(heard_at, job.roster_at or 0.0) > bound_s

    def _interval_s(self, job: Job, nodes: list[Node]) -> float:
        request = self.ports.store.request(job.id)
        return interval_s(json.loads(request["body"]), nodes) if request else AUTO_INTERVAL_S


def commit_age_s(job: Job, now: float) -> float:
    """Return how long the ranks have trained since the newest committed save, 0 where nothing is to be saved now."""
    if job.phase is not Phase.RUNNING or job.intent is not Intent.RUN or job.roster_at is None:
        return 0.0
    return now - max(job.roster_at, job.saved.at if job.saved else 0.0)


def interval_s(request: Mapping[str, Any], nodes: list[Node]) -> float:
    """Return the seconds between two saves that the request asks for; steps at the speed that the nodes told last."""
    asked = request.get("checkpoint") or {}
    if isinstance(asked.get("interval_s"), int | float):
        return float(asked["interval_s"])
    if not isinstance(asked.get("interval_steps"), int):
        return AUTO_INTERVAL_S
    training = request.get("training") or {}
    tokens = training.get("global_batch", 0) * training.get("sequence_length", 0)
    speed = max((node.tokens_per_s or 0.0 for node in nodes), default=0.0)
    return float(asked["interval_steps"] * tokens / speed) if tokens and speed else STEPS_UNKNOWN_S
