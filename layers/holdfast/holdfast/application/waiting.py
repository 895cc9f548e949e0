"""Leaves the token of a waiting state where news will find it."""

from __future__ import annotations

from holdfast.application.ports import Ports
from holdfast.application.record import record, settle
from holdfast.domain.errors import UnknownJob
from holdfast.domain.events import FleetLost
from holdfast.domain.job import Job
from job_contract.orders import WaitItem


def leave_token(item: WaitItem, ports: Ports, *, after_silence: bool = False) -> None:
    """The token is stored, and answered at once where the row already says the answer.

    The item is written before the row is read, and `record` writes the row before it reads the item: whoever is second
    sees the other. After a silence the members are looked at first: when one is gone, the fleet is lost.
    """
    ports.store.put_wait(item)
    job = ports.store.load(item.job)
    if job is None:
        raise UnknownJob(item.job)
    if item.attempt < job.attempt:
        ports.workflow.settle(item.token, {"outcome": "ended"})
        return
    gone = members_gone(job, ports) if after_silence else ()
    if gone:
        record(FleetLost(at=ports.clock(), attempt=item.attempt, instances=gone, cause="silence"), job.id, ports)
        return
    settle(job, ports)


def members_gone(job: Job, ports: Ports) -> tuple[str, ...]:
    """Return the members of the job's fleet that EC2 no longer shows at work."""
    intent = ports.store.intent(job.fleet) if job.fleet else None
    if intent is None:
        return ()
    live = {instance.id for instance in ports.fleets.described(intent.instances) if instance.live}
    return tuple(instance for instance in intent.instances if instance not in live)
