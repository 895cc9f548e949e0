"""What a dispatch costs with 10,000 waiting jobs of 50 teams: reads, decisions a second, and against a plain sort.

The order is measured alone, in CPU time, best of five. The dispatch runs on the real adapter over a
table in memory that answers at once, so its figure is our own CPU time: decoding, deciding, encoding.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from bench.table import Row, report
from holdfast.adapters.items import from_item, to_item
from holdfast.adapters.job_table import LINE_PAGE, WAITING_CARRIES, JobTable, row_of
from holdfast.application.dispatch import dispatch
from holdfast.domain.job import Job
from holdfast.domain.ledger import InFlight, Ledger, Quota, Quotas, Reserved
from holdfast.domain.queueing import Waiter, order
from job_contract.version import plain

JOBS, TEAMS, RUNNING, NOW = 10_000, 50, 200, 1_800_000_000.0
READS = ("get_item", "batch_get_item", "query")
MOST_READS = TEAMS + 5
LEAST_DECISIONS_S = 10_000
CARRIED = {"pk", "sk", "waiting_team", "waiting_rank", *WAITING_CARRIES}


class TableInMemory:
    """As much of DynamoDB as a dispatch asks for. It answers at once, and counts what it was asked."""

    def __init__(self) -> None:
        self.items: dict[tuple[str, str], dict[str, Any]] = {}
        self.lines: dict[str, list[dict[str, Any]]] = {}
        self.calls: Counter[str] = Counter()

    def hold(self, data: dict[str, Any]) -> None:
        item = to_item(data)
        self.items[data["pk"], data["sk"]] = item
        if "waiting_team" in data:
            shown = {name: value for name, value in item.items() if name in CARRIED}
            self.lines.setdefault(data["waiting_team"], []).append(shown)

    def sort(self) -> None:
        for line in self.lines.values():
            line.sort(key=lambda item: float(item["waiting_rank"]["N"]))

    def get_item(self, *, Key: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.calls["get_item"] += 1
        item = self.items.get(_key(Key))
        return {"Item": item} if item else {}

    def batch_get_item(self, *, RequestItems: dict[str, Any]) -> dict[str, Any]:
        self.calls["batch_get_item"] += 1
        [(table, wanted)] = RequestItems.items()
        assert len(wanted["Keys"]) <= 100
        return {"Responses": {table: [self.items[_key(key)] for key in wanted["Keys"] if _key(key) in self.items]}}

    def query(self, *, ExpressionAttributeValues: dict[str, Any], **more: Any) -> dict[str, Any]:
        self.calls["query"] += 1
        [value] = from_item(ExpressionAttributeValues).values()
        if more.get("IndexName") == "waiting":
            return {"Items": self.lines.get(value, [])[: more["Limit"]]}
        return {"Items": [item for (pk, _), item in self.items.items() if pk == value]}

    def get_paginator(self, _: str) -> Any:
        return SimpleNamespace(paginate=lambda **asked: [self.query(**asked)])

    def transact_write_items(self, **_: Any) -> None:
        self.calls["transact_write_items"] += 1

    def update_item(self, **_: Any) -> None:
        self.calls["update_item"] += 1


def _key(key: dict[str, Any]) -> tuple[str, str]:
    return (key["pk"]["S"], key["sk"]["S"])


def waiting_jobs(dice: random.Random) -> list[Job]:
    return [
        Job(
            id=f"job-{n:05d}", team=f"team-{n % TEAMS:02d}", name="bench", priority=dice.randint(0, 100),
            submitted_at=NOW - dice.randint(0, 80_000), phase_at=NOW, spec_id="spec", nodes=dice.choice([1, 2, 4, 8]),
            market=dice.choice(["spot", "on_demand"]), attempts_limit=5, run_s=dice.randint(600, 86_400), wait_s=90_000,
            vcpus_per_node=192, gpus_per_node=8,
        )
        for n in range(JOBS)
    ]  # fmt: skip


def busy_ledger(dice: random.Random) -> Ledger:
    places = tuple(
        InFlight(
            job=f"run-{n:03d}", team=f"team-{n % TEAMS:02d}", priority=50, attempt=1, since_at=NOW - 60, running=True,
            ends_at=NOW + dice.randint(60, 86_400), reserved=Reserved(vcpus=384, gpus=16, nodes=2, market="spot"),
        )
        for n in range(RUNNING)
    )  # fmt: skip
    return Ledger(version=1, in_flight=places, usage_at=NOW)


def quotas() -> Quotas:
    markets = {"spot": Quota(gpus=16 * RUNNING + 64), "on_demand": Quota(gpus=64)}
    return Quotas(markets=markets, teams={f"team-{n:02d}": Quota(gpus=256) for n in range(TEAMS)})


def best_of(times: int, work: Callable[[], Any]) -> float:
    """Return the shortest time that the work took."""
    took = []
    for _ in range(times):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took)


def table_of(jobs: list[Job], ledger: Ledger, known: Quotas) -> TableInMemory:
    table = TableInMemory()
    for job in jobs:
        table.hold(row_of(job))
    for team in sorted({job.team for job in jobs}):
        table.hold({"pk": "TEAMS", "sk": team})
        table.hold({"pk": "QUOTA", "sk": f"TEAM#{team}", **plain(known.team(team))})
    for market, quota in known.markets.items():
        table.hold({"pk": "QUOTA", "sk": f"MARKET#{market}", **plain(quota)})
    table.hold({"pk": "LEDGER", "sk": "ROW", **plain(ledger)})
    table.sort()
    return table


def one_dispatch(table: TableInMemory) -> tuple[float, int]:
    """Return the seconds that a dispatch takes us, and how many jobs it started."""
    workflow = SimpleNamespace(start=lambda job_id, attempt: None)
    ports: Any = SimpleNamespace(
        store=JobTable(table, jobs="jobs", orders="orders"), workflow=workflow, clock=lambda: NOW
    )
    began = time.process_time()
    started = dispatch(ports)
    return time.process_time() - began, len(started)


def main() -> int:
    dice = random.Random(1)
    jobs, ledger, known = waiting_jobs(dice), busy_ledger(dice), quotas()
    line = [Waiter.of(job) for job in jobs]
    ordering_s = best_of(5, lambda: order(line, ledger=ledger, quotas=known, now=NOW))
    sorting_s = best_of(5, lambda: sorted(line, key=lambda job: (job.rank, job.id)))
    table = table_of(jobs, ledger, known)
    dispatch_s, started = one_dispatch(table)
    reads = sum(table.calls[name] for name in READS)
    rate, a_team = JOBS / ordering_s, JOBS // TEAMS
    writes = table.calls["transact_write_items"] + table.calls["update_item"]
    return report(
        "queue",
        [
            Row("reads a dispatch", reads, f"<= {MOST_READS}: a page a team and five", reads <= MOST_READS),
            Row("writes a dispatch", writes, "<= 125: 25 starts and 100 reasons", writes <= 125),
            Row("jobs started by it", started, ">= 1", started >= 1),
            Row("jobs on a team's page", min(LINE_PAGE, a_team), f"= {a_team}", a_team <= LINE_PAGE),
            Row("decisions/s of the order", rate, f">= {LEAST_DECISIONS_S}", rate >= LEAST_DECISIONS_S),
            Row("order / plain sort", ordering_s / sorting_s, "<= 100", ordering_s / sorting_s <= 100),
            Row("own CPU of a dispatch, s", dispatch_s, "<= 3", dispatch_s <= 3),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
