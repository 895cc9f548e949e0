"""What a notice from AWS costs and allows."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.domain.job import Job
from holdfast.domain.phase import Phase

CHECKPOINT_GRACE_S = 600
"""After the deadline the nodes that live on may still be uploading their parts; agents give up at the same time."""

ORDERED_STOP_S = 600
"""What a stop without a deadline of AWS (cancel, pause) may take."""


def loses_only_doomed(job: Job, instances: Iterable[str]) -> bool:
    """True while a save is under way and nobody is gone but those under notice: the others may still commit it.

    False when the whole gang is gone: then there are no others.
    """
    gone = set(instances)
    saving = job.phase in (Phase.INTERRUPTED, Phase.CHECKPOINTING)
    return saving and gone <= set(job.doomed) and (not job.gang or len(gone) < job.gang)


def checkpoint_wait_s(job: Job, now: float) -> int:
    """Seconds that the run may wait for the ordered save: to the deadline and the grace after it."""
    if job.deadline_at is None:
        return ORDERED_STOP_S
    return max(1, round(job.deadline_at + CHECKPOINT_GRACE_S - now))
