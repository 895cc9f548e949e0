"""Gives back what was made for a purchase and is not an instance: placement groups and launch templates.

Level-triggered: whoever calls looks at what there is, so a group that instances still hold while they shut down is
tried again at every call, for as long as it takes, and the job that it was made for has long been reported finished.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.application.ports import Ports

TEMPLATE_KEEP_S = 7 * 86400.0
"""A template is found again by whoever needs the same; one deleted too early is made anew at the next try."""


@dataclass(frozen=True, kw_only=True)
class Retired:
    """Names that are gone, and names that something still holds."""

    gone: tuple[str, ...] = ()
    held: tuple[str, ...] = ()


def retire_placement_groups(ports: Ports) -> Retired:
    """Groups of jobs that are over, or that nobody knows, are deleted; those in use are listed for the next time."""
    gone: list[str] = []
    held: list[str] = []
    for group in ports.fleets.groups():
        job = ports.store.load(group.job) if group.job else None
        if job is not None and not job.over:
            continue
        (gone if ports.fleets.drop_group(group.name) else held).append(group.name)
    return Retired(gone=tuple(gone), held=tuple(held))


def retire_launch_templates(ports: Ports) -> Retired:
    """Derived templates are deleted a week after they were made, unless a fleet that is alive was bought with them."""
    old = [one for one in ports.fleets.templates() if ports.clock() - one.created_at > TEMPLATE_KEEP_S]
    if not old:
        return Retired()
    used = _in_use(ports)
    gone = [one for one in old if one.id not in used]
    for one in gone:
        ports.fleets.drop_template(one.id)
    return Retired(gone=tuple(one.name for one in gone), held=tuple(one.name for one in old if one.id in used))


def _in_use(ports: Ports) -> set[str]:
    used = set()
    for job_id in ports.store.alive():
        job = ports.store.load(job_id)
        intent = ports.store.intent(job.fleet) if job is not None and job.fleet else None
        if intent is not None and intent.purchase is not None:
            used.add(intent.purchase.template.id)
    return used
