"""`holdfast queue`: who is next, and why the others are not."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from holdfast.domain.job import Job
from holdfast_cli import show
from holdfast_cli.errors import told
from holdfast_cli.options import AsJson, StackName
from holdfast_cli.stack import Stack


@told
def queue(
    team: Annotated[str | None, typer.Option(help="Only this team's jobs.")] = None,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Show the waiting jobs in the order of their teams' queues, each with its reason."""
    table, now = Stack(stack).table, time.time()
    waiting = [job for name in ([team] if team else table.teams()) for job in table.waiting(name)]
    places = list(_places((job for job in Stack(stack).jobs(waiting) if job.dispatchable), now))
    if as_json:
        show.as_json(places)
    elif not places:
        print("nobody waits")
    else:
        heads = ("TEAM", "PLACE", "JOB", "PRIORITY", "WAITS", "NODES", "WHY")
        show.table(heads, [_row(place) for place in places])


def _places(jobs: Iterable[Job], now: float) -> Iterable[dict[str, Any]]:
    places: dict[str, int] = {}
    for job in sorted(jobs, key=lambda job: (job.team, job.rank)):
        places[job.team] = places.get(job.team, 0) + 1
        because = getattr(job, "waiting", None)
        if because is not None:
            code, why = str(because.code), because.sentence
        elif job.not_before > now:
            code, why = "not_before", f"not before {show.clock_time(job.not_before)} UTC: {job.reason or job.stage}"
        else:
            code, why = "in_line", job.stage
        yield {
            "team": job.team,
            "place": places[job.team],
            "job": job.id,
            "priority": job.priority,
            "waits_s": round(now - job.phase_at),
            "nodes": job.nodes,
            "held": len(job.held),
            "code": code,
            "why": why,
        }


def _row(place: dict[str, Any]) -> tuple[str, ...]:
    held = f" ({place['held']} held)" if place["held"] else ""
    return (
        place["team"],
        str(place["place"]),
        place["job"],
        str(place["priority"]),
        show.age(place["waits_s"]),
        f"{place['nodes']}{held}",
        place["why"],
    )
