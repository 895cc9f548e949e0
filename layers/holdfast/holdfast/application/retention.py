"""Old saves are deleted, by the supervisor alone. What a crash left half deleted goes the next time."""

from __future__ import annotations

from holdfast.application.ports import Ports
from holdfast.domain.job import Job
from holdfast.domain.retention import expired
from job_contract.checkpoint_layout import job_prefix

MOST_AT_ONCE = 5
"""A sweep looks at every job; a job with a long tail of saves is cleaned over several."""

LOOK_AFTER_S = 300.0
"""Only a new save makes an old one superfluous, so the bucket is listed by the few sweeps that follow one."""


def retire_saves(job: Job, ports: Ports) -> list[str]:
    """The oldest saves that `checkpoint.keep` does not cover are gone; returns their names."""
    if job.saved is None or not job.attempt_open or ports.clock() - job.saved.at > LOOK_AFTER_S:
        return []
    prefix = job_prefix(job.team, job.id)
    saves = ports.checkpoints.saves(prefix)
    if len(saves) <= job.keep:
        return []
    gone = expired(job, saves, ports.checkpoints.lineage(prefix, job, job.keep))[:MOST_AT_ONCE]
    for save in gone:
        ports.checkpoints.forget(prefix, save)
    return gone


def tidy(job_id: str, ports: Ports) -> list[str]:
    """Of a job that is over no more saves are left than `checkpoint.keep` says; returns the names of those that went.

    A job that is tried again meanwhile keeps what is there.
    """
    job = ports.store.load(job_id)
    if job is None or not job.over or job.saved is None:
        return []
    prefix, gone = job_prefix(job.team, job.id), list[str]()
    for save in expired(job, ports.checkpoints.saves(prefix), ports.checkpoints.lineage(prefix, job, job.keep)):
        now = ports.store.load(job_id)
        if now is None or not now.over:
            break
        ports.checkpoints.forget(prefix, save)
        gone.append(save)
    return gone
