"""What a user wants of a job that exists, by message."""

from __future__ import annotations

from typing import Any

from holdfast.application.account import hold, set_quota, unhold
from holdfast.application.datasets import register
from holdfast.application.ports import Ports
from holdfast.application.record import record
from holdfast.application.survivors import let_go
from holdfast.domain.errors import Rejected, UnknownJob
from holdfast.domain.events import (
    CancelRequested,
    EarlySaveAdvised,
    Event,
    LimitsExtended,
    PauseRequested,
    PriorityChanged,
    ResumeRequested,
    RetryRequested,
)
from holdfast.domain.job import Job
from holdfast.domain.ledger import ALL_TEAMS
from holdfast.domain.notices import trains
from holdfast.messages import control_request as wish
from job_contract.checkpoint_layout import job_prefix

ANSWER_AT_RECEIVE = 3
"""The delivery at which a wish for an unknown job is answered; the queue gives up after five."""


def obey(request: wish.ControlRequest, ports: Ports, *, bucket: str | None = None) -> Job | None:
    """The job, or queue or registry (then None is returned), does what was asked; checkpoint first where it can.

    `bucket` is the stack's own. Raises Rejected when it cannot be done.
    """
    if isinstance(request, wish.Hold):
        hold(request.team or ALL_TEAMS, ports, by=request.requested_by or "")
        return None
    if isinstance(request, wish.Unhold):
        unhold(request.team or ALL_TEAMS, ports)
        return None
    if isinstance(request, wish.SetQuota):
        by = request.requested_by or ""
        set_quota(*request.scope, request.applied, ports, by=by, wish=request.dedup_id)
        return None
    if isinstance(request, wish.RegisterDataset):
        register(request, ports, bucket=bucket)
        return None
    job = record(_event(request, ports), request.job, ports)
    let_go(job, ports)
    return job


def _event(request: wish.JobControl, ports: Ports) -> Event:
    name = wish.control_identity(request)
    told: dict[str, Any] = {"at": ports.clock(), "cause": request.requested_by or "", "request": name}
    match request:
        case wish.Cancel():
            return CancelRequested(**told)
        case wish.Pause():
            return PauseRequested(**told)
        case wish.Checkpoint():
            return _checkpoint(request, told, ports)
        case wish.Resume():
            return ResumeRequested(**told, nodes=request.nodes)
        case wish.Priority():
            return PriorityChanged(**told, priority=request.priority)
        case wish.Extend():
            limits: dict[str, Any] = {"run_s": request.run_s, "wait_s": request.wait_s, "attempts": request.attempts}
            return LimitsExtended(**told, **limits, budget_usd=request.budget_usd)
        case wish.Retry():
            return _retry(request, told, ports)
    raise Rejected("unknown_action", f"{request.action} is not an action on one job")


def _checkpoint(request: wish.Checkpoint, told: dict[str, Any], ports: Ports) -> EarlySaveAdvised:
    job = ports.store.load(request.job)
    if job is None:
        raise UnknownJob(request.job)
    if not trains(job):
        raise Rejected("not_training", f"{job.id} is {job.phase}; only a job that trains can save and go on")
    # Two wishes without a dedup_id are two saves, when the job has moved on between them.
    return EarlySaveAdvised(**{**told, "request": f"{told['request']}#{job.version}"}, attempt=job.attempt)


def _retry(request: wish.Retry, told: dict[str, Any], ports: Ports) -> RetryRequested:
    job = ports.store.load(request.job)
    if job is None:
        raise UnknownJob(request.job)
    if not job.over:
        raise Rejected("still_running", f"{job.id} is {job.phase}; only a job that has ended can be tried again")
    if request.save is None:
        return RetryRequested(**told)
    pointer = ports.checkpoints.pointer(job_prefix(job.team, job.id), job, request.save)
    if pointer is None:
        raise Rejected(
            "no_such_save", f"{job.id} has no committed save {request.save}; `holdfast checkpoints` lists them"
        )
    return RetryRequested(**told, pointer=pointer)


def overtook_its_submit(refusal: Rejected, *, received: int) -> bool:
    """True while a wish for an unknown job may only have come before the job: two queues keep no order between them."""
    return isinstance(refusal, UnknownJob) and received < ANSWER_AT_RECEIVE
