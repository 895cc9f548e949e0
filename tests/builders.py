"""Jobs, events and messages for tests, each made in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.domain import events
from holdfast.domain.job import Job
from holdfast.domain.transitions import advance
from job_contract.checkpoint_layout import SavePointer, save_name

ROOT = Path(__file__).resolve().parents[1]
LEADER, OTHER = "i-0aaaaaaaaaaaaaaa1", "i-0aaaaaaaaaaaaaaa2"
NOW = 1_800_000_000.0


def a_job(**changes: Any) -> Job:
    """A queued job of two spot nodes."""
    job = Job(
        id="demo-0123456789",
        team="research",
        name="demo",
        priority=50,
        submitted_at=NOW,
        phase_at=NOW,
        spec_id="abc",
        nodes=2,
        market="spot",
        attempts_limit=5,
        run_s=86400,
        wait_s=90000,
    )
    return replace(job, **changes)


def after(job: Job, *happened: events.Event) -> Job:
    """The job after these events."""
    for event in happened:
        job = advance(job, event)
    return job


def started(attempt: int = 1) -> events.AttemptStarted:
    return events.AttemptStarted(at=NOW, attempt=attempt)


def intended(attempt: int = 1, fleet: str | None = None) -> events.FleetIntended:
    return events.FleetIntended(at=NOW, attempt=attempt, fleet=fleet or f"demo-0123456789-{attempt}-0")


def bought(attempt: int = 1) -> events.FleetBought:
    fleet = f"demo-0123456789-{attempt}-0"
    return events.FleetBought(
        at=NOW,
        attempt=attempt,
        fleet=fleet,
        instance_type="c7i.large",
        zone="us-east-1a",
        market="spot",
        nodes=2,
        node_usd_h=0.036,
    )


def ready(attempt: int = 1) -> events.AllReady:
    return events.AllReady(at=NOW, attempt=attempt, roster_id=f"{attempt}-roster")


def training(attempt: int = 1, step: int = 1) -> events.TrainingStarted:
    return events.TrainingStarted(at=NOW, attempt=attempt, step=step)


def noticed(instance: str = OTHER, attempt: int = 1) -> events.InterruptionNoticed:
    return events.InterruptionNoticed(at=NOW, attempt=attempt, instance=instance, deadline_at=NOW + 120)


def heard(attempt: int = 1, generation: int = 5) -> events.OrderHeard:
    return events.OrderHeard(at=NOW, attempt=attempt, generation=generation)


def saved(step: int = 25, attempt: int = 1, number: int = 1, *, final: bool = False) -> events.CheckpointSaved:
    pointer = SavePointer(save=save_name(step, attempt, number), manifest_sha256=f"{step:064x}")
    return events.CheckpointSaved(at=NOW, attempt=attempt, pointer=pointer, final=final)


def lost(*instances: str, attempt: int = 1) -> events.FleetLost:
    return events.FleetLost(at=NOW, attempt=attempt, instances=instances or (OTHER,))


def finished(attempt: int = 1, step: int = 120) -> events.TrainingFinished:
    return events.TrainingFinished(at=NOW, attempt=attempt, step=step)


def failed(failure: str = "crash", attempt: int = 1) -> events.Failed:
    return events.Failed(at=NOW, attempt=attempt, failure=failure, reason="it broke")


def closed(attempt: int = 1) -> events.AttemptClosed:
    return events.AttemptClosed(at=NOW + 60, attempt=attempt)


def cancelled(request: str = "cancel") -> events.CancelRequested:
    return events.CancelRequested(at=NOW, request=request)


def a_running_job(**changes: Any) -> Job:
    return after(a_job(**changes), started(), intended(), bought(), ready(), training())


def sample(name: str) -> dict[str, Any]:
    """A recorded message from events/."""
    return dict(json.loads((ROOT / "events" / name).read_text()))
