"""Ends the machines of an attempt, and closes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.application.ports import Ports
from holdfast.application.readiness import explain_unready
from holdfast.application.record import record
from holdfast.application.survivors import hold_survivors, let_go
from holdfast.domain.errors import Unavailable
from holdfast.domain.events import AttemptClosed, Failed, GateRefused
from holdfast.domain.gate import GATE_RETRY_S
from holdfast.domain.job import Job
from holdfast.domain.ownership import FleetIntent


def release_fleet(job_id: str, attempt: int, ports: Ports) -> int:
    """Every machine of the job is seen ending, but for survivors worth holding; returns how many were told to end.

    Nothing is dispatched before the attempt is closed, so until then every machine tagged with the job belongs to this
    attempt or an older one. Raises Unavailable while EC2 shows one at work, or may not yet show all that was bought;
    the step is then tried again.
    """
    job = ports.store.load(job_id)
    if job is None or job.attempt != attempt or not job.attempt_open:
        return 0
    _tell_unready(job, ports)
    intent = ports.store.intent(job.fleet) if job.fleet else None
    live = [instance.id for instance in ports.fleets.of_job(job_id) if instance.live]
    # What the answer to CreateFleet named counts too: the listing by tag may lag behind it.
    named = set(intent.instances) - set(live) if intent else set()
    seen = {instance.id: instance for instance in ports.fleets.described(sorted(named))}
    hidden = named - seen.keys() if intent and intent.may_still_show(ports.clock()) else set()
    here = {*live, *(name for name, instance in seen.items() if instance.live)}
    held = hold_survivors(job, here, ports)
    ending = sorted((here | hidden) - held)
    ports.store.mark_ending(sorted({*ending, *named} - held), job_id, ports.clock())
    if ending:
        ports.fleets.terminate(ending)
    _expect_ending(job_id, ending, hidden, ports)
    unanswered = intent is not None and intent.closed_at is None and not intent.instances
    if intent and unanswered and len(ending) < intent.nodes and intent.may_still_show(ports.clock()):
        raise Unavailable(f"CreateFleet for {intent.fleet} was not answered; what it brought may still show")
    _close_intent(intent, ports)
    return len(ending)


def _tell_unready(job: Job, ports: Ports) -> None:
    """A fleet whose nodes did not check in in time is refused with the reason, before its machines are gone."""
    reason = explain_unready(job, ports)
    if reason is not None:
        now = ports.clock()
        record(
            GateRefused(at=now, attempt=job.attempt, reason=reason, not_before=now + GATE_RETRY_S, failure="lost"),
            job.id,
            ports,
        )


def _close_intent(intent: FleetIntent | None, ports: Ports) -> None:
    """A purchase that a crash left open is over: what still comes of it is nobody's, and the sweep may end it."""
    if intent is not None and intent.closed_at is None:
        ports.store.close_intent(
            replace(intent, closed_at=ports.clock(), outcome=intent.outcome or "released before it was answered")
        )


def _expect_ending(job_id: str, ending: Sequence[str], hidden: set[str], ports: Ports) -> None:
    """Raise Unavailable unless EC2 shows every one of them on its way out."""
    states = {instance.id: instance.live for instance in ports.fleets.described(ending)}
    stubborn = [instance for instance in ending if states.get(instance, instance in hidden)]
    if stubborn:
        raise Unavailable(
            f"{len(stubborn)} of {len(ending)} machines of {job_id} not seen ending: {', '.join(stubborn[:5])}"
        )


def close_attempt(job_id: str, attempt: int, ports: Ports, *, cause: str = "run ended") -> Job:
    """The attempt is closed: the job has ended for good and its survivors with it, or may be dispatched again."""
    step = _newest_step(job_id, attempt, ports)
    event = AttemptClosed(at=ports.clock(), attempt=attempt, cause=cause, step=step)
    job = record(event, job_id, ports)
    let_go(job, ports)
    return job


def _newest_step(job_id: str, attempt: int, ports: Ports) -> int:
    """Return the newest step that a node of the attempt has told, 0 when none has."""
    job = ports.store.load(job_id)
    if job is None or job.attempt != attempt or job.fleet is None or job.roster_at is None:
        return 0
    intent = ports.store.intent(job.fleet)
    nodes = ports.store.nodes(intent.instances) if intent else []
    # A survivor's item still has the step that it reported in an attempt before.
    return max((node.step for node in nodes if (node.reported_at or 0.0) >= job.roster_at), default=0)


def end_dead_attempt(job_id: str, attempt: int, ports: Ports, *, cause: str) -> None:
    """An attempt whose execution is over without having closed it is released and closed; any other is left alone.

    Its launch may still be at work. So the row says first that the attempt is lost: a fleet that was intended before is
    found by the release, and none is intended afterwards.
    """
    job = ports.store.load(job_id)
    if job is None or job.attempt != attempt or not job.attempt_open:
        return
    record(Failed(at=ports.clock(), attempt=attempt, failure="lost", reason=cause, cause=cause), job_id, ports)
    release_fleet(job_id, attempt, ports)
    close_attempt(job_id, attempt, ports, cause=cause)
