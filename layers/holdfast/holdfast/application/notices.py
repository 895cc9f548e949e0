"""What AWS says of an instance, told to the job that owns it."""

from __future__ import annotations

from holdfast.application.ports import Ports
from holdfast.application.record import record
from holdfast.domain.events import FleetLost, InterruptionNoticed
from holdfast.domain.job import Job
from holdfast.domain.ownership import Ownership


def interrupted(instance: str, ports: Ports, *, deadline_at: float, cause: str = "spot warning") -> Job | None:
    """The owner's job is interrupted, the order to save is out; None when the instance is nobody's of ours."""
    node = ports.store.node(instance)
    if node is None:
        return None
    if node.state is Ownership.HELD:
        # It was kept for the next attempt, and that will find it gone.
        ports.store.mark_ending([instance], node.job, ports.clock())
        return ports.store.load(node.job)
    event = InterruptionNoticed(
        at=ports.clock(), attempt=node.attempt, instance=instance, deadline_at=deadline_at, cause=cause
    )
    return record(event, node.job, ports)


def lost(instance: str, ports: Ports) -> Job | None:
    """The member is lost to its job; None when it is nobody's, or is being ended by us."""
    node = ports.store.node(instance)
    if node is None or node.state is not Ownership.MEMBER:
        return None
    event = FleetLost(at=ports.clock(), attempt=node.attempt, instances=(instance,), cause="instance state")
    return record(event, node.job, ports)
