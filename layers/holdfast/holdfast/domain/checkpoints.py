"""Whose checkpoints are these?"""

from __future__ import annotations

from holdfast.domain.job import Job
from job_contract.checkpoint_layout import Head, parse_save_name


def of_an_older_life(head: Head, job: Job, attempt: int) -> bool:
    """True when an ended job of the same identity wrote the head: it names a save, or an attempt that this job never
    had, and no rank of this job has ever run.

    A save cannot be ours before a roster was. The bucket keeps checkpoints for ever, the table forgets a job.
    """
    if any((job.saved, job.retry_from, job.roster_id, job.last_roster_id)):
        return False
    return head.pointer is not None or head.attempt > attempt


def contradicts(head: Head, job: Job) -> bool:
    """True when the head cannot be the one that the nodes left: a save is reported only after the head has moved to it.

    So the head is never behind the row's newest save, and says the same of it. A branch begins at an older save.
    """
    if job.saved is None or job.branch > 0 or head.branch > job.branch:
        return head.branch > job.branch
    if head.save is None:
        return True
    name = parse_save_name(head.save)
    if head.save != job.saved.save:
        return (name.attempt, name.number, name.step) < job.saved.order
    return (head.manifest_sha256, head.parent) != (job.saved.manifest_sha256, job.saved.parent)
