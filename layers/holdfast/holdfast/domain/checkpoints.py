"""Whose checkpoints are these?"""

from __future__ import annotations

from holdfast.domain.job import Job
from job_contract.checkpoint_layout import Head


def of_an_older_life(head: Head, job: Job, attempt: int) -> bool:
    """True when an ended job of the same identity wrote the head: it names a save, or an attempt that this job never
    had, and no rank of this job has ever run.

    A save cannot be ours before a roster was. The bucket keeps checkpoints for ever, the table forgets a job.
    """
    if any((job.saved, job.retry_from, job.roster_id, job.last_roster_id)):
        return False
    return head.pointer is not None or head.attempt > attempt
