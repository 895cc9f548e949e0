"""Which saves may go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.domain.job import Job
from job_contract.checkpoint_layout import Manifest, parse_save_name


def expired(job: Job, saves: Iterable[str], lineage: Sequence[Manifest]) -> list[str]:
    """Return the saves to delete, oldest first; `lineage` is the head's save and its ancestors, newest first.

    Everything older than the `keep` newest finite saves of the line goes: older saves, those of a branch left behind,
    and what was never committed. Nothing goes before the newest attempt has committed a save of its own, because until
    then it may fall back along what it was told to restore, and a job that ended so may have no better one; nor where a
    save of the line cannot be read. A job that waits may be given an attempt at any moment, so its saves stay.
    """
    if not (job.attempt_open or job.over) or job.saved is None or not lineage:
        return []
    if {parse_save_name(job.saved.save).attempt, parse_save_name(lineage[0].save).attempt} != {job.attempt}:
        return []
    finite = [manifest for manifest in lineage if manifest.facts.get("finite", True)]
    if len(finite) < job.keep:
        return []
    oldest = _order(finite[job.keep - 1].save)
    start = job.retry_from.save if job.retry_from else None
    return sorted((save for save in saves if _order(save) < oldest and save != start), key=_order)


def _order(save: str) -> tuple[int, int, int]:
    name = parse_save_name(save)
    return (name.attempt, name.number, name.step)
