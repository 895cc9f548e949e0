"""Starts attempts of the jobs that wait."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.application.ports import Ports
from holdfast.application.record import record
from holdfast.application.release import close_attempt
from holdfast.domain.errors import ExecutionOver
from holdfast.domain.events import AttemptStarted, GaveUp
from holdfast.domain.job import Job


def dispatch(teams: Iterable[str], ports: Ports) -> list[str]:
    """Every dispatchable job of these teams whose time has come is launching; returns their ids.

    An execution of that name may have ended already (a start that was repeated late): then the attempt is closed.
    """
    started = []
    for team in teams:
        for job_id in ports.store.waiting(team):
            job = ports.store.load(job_id)
            if job is None or not job.dispatchable or job.not_before > ports.clock():
                continue
            if _waited_out(job, ports.clock()):
                reason = f"limits.wait_s = {job.wait_s} passed before training could start"
                record(GaveUp(at=ports.clock(), reason=reason), job_id, ports)
                continue
            event = AttemptStarted(at=ports.clock(), attempt=job.attempt + 1)
            try:
                record(event, job_id, ports)
            except ExecutionOver:
                close_attempt(job_id, event.attempt, ports, cause="name was used")
                continue
            started.append(job_id)
    return started


def _waited_out(job: Job, now: float) -> bool:
    return job.saved is None and now - job.submitted_at > job.wait_s
