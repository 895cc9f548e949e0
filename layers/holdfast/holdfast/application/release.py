"""Ends the machines of an attempt, and closes it."""

from __future__ import annotations

from holdfast.application.ports import Ports
from holdfast.application.record import record
from holdfast.domain.errors import Unavailable
from holdfast.domain.events import AttemptClosed
from holdfast.domain.job import Job


def release_fleet(job_id: str, attempt: int, ports: Ports) -> int:
    """Every machine of the job is seen ending; returns how many were told to.

    Nothing is dispatched before the attempt is closed, so until then every machine tagged with the job belongs to this
    attempt or an older one. Raises Unavailable while EC2 still shows one at work; the step is then tried again.
    """
    job = ports.store.load(job_id)
    if job is None or job.attempt != attempt or not job.attempt_open:
        return 0
    live = [instance.id for instance in ports.fleets.of_job(job_id) if instance.live]
    owned = _owned(job, ports)
    known_live = {instance.id for instance in ports.fleets.described(sorted(owned - set(live))) if instance.live}
    ending = sorted({*live, *known_live})
    ports.store.mark_ending(sorted({*ending, *owned}), job_id, ports.clock())
    if not ending:
        return 0
    ports.fleets.terminate(ending)
    stubborn = [instance.id for instance in ports.fleets.described(ending) if instance.live]
    if stubborn:
        raise Unavailable(
            f"{len(stubborn)} of {len(ending)} machines of {job_id} still live: {', '.join(stubborn[:5])}"
        )
    return len(ending)


def _owned(job: Job, ports: Ports) -> set[str]:
    """Instances that the answer to CreateFleet named; the listing by tag may lag behind it."""
    intent = ports.store.intent(job.fleet) if job.fleet else None
    return set(intent.instances) if intent else set()


def close_attempt(job_id: str, attempt: int, ports: Ports, *, cause: str = "run ended") -> Job:
    """The attempt is closed: the job has ended for good, or may be dispatched again."""
    event = AttemptClosed(at=ports.clock(), attempt=attempt, cause=cause)
    return record(event, job_id, ports)


def end_dead_attempt(job_id: str, attempt: int, ports: Ports, *, cause: str) -> None:
    """An attempt whose execution is over without having closed it is released and closed; any other is left alone."""
    job = ports.store.load(job_id)
    if job is None or job.attempt != attempt or not job.attempt_open:
        return
    release_fleet(job_id, attempt, ports)
    close_attempt(job_id, attempt, ports, cause=cause)
