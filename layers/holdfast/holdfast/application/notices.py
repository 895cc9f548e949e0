"""What AWS says of machines, told to the jobs that own them; the answer is graded, see domain/notices.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from holdfast.application.apart import Faults
from holdfast.application.ports import Ports
from holdfast.application.record import record
from holdfast.domain import notices
from holdfast.domain.errors import UnknownJob
from holdfast.domain.events import (
    AttemptEvent,
    EarlySaveAdvised,
    FleetLost,
    InterruptionNoticed,
    MoveDue,
    MovePlanned,
)
from holdfast.domain.job import Job
from holdfast.domain.ownership import Node, Ownership
from holdfast.domain.phase import Phase


class Fate(StrEnum):
    """What became of a notice."""

    TAKEN = "taken"
    LATE = "late"
    EXPECTED = "expected"
    FOREIGN = "foreign"


@dataclass(frozen=True, kw_only=True)
class Told:
    """A notice for one machine: taken by its job; late, because the job is past that attempt; expected, because we
    end the machine ourselves; or foreign, because it is nobody's of ours. `job` is set when it is taken or late."""

    instance: str
    fate: Fate
    job: Job | None = None


def interrupted(instance: str, ports: Ports, *, deadline_at: float, cause: str = "spot warning") -> Told:
    """The owner's job is interrupted, the order to save is out; other jobs of the pool are asked for a save."""
    node = ports.store.node(instance)
    if node is None:
        return Told(instance=instance, fate=Fate.FOREIGN)
    return node_interrupted(node, ports, deadline_at=deadline_at, cause=cause)


def node_interrupted(node: Node, ports: Ports, *, deadline_at: float, cause: str, others: Sequence[str] = ()) -> Told:
    """The node's job is interrupted; `others` are members of the same attempt whose notices came with this one."""
    if node.state is Ownership.HELD:
        # It was kept for the next attempt, and that will find it gone.
        ports.store.mark_ending([node.instance], node.job, ports.clock())
    event = InterruptionNoticed(
        at=ports.clock(),
        attempt=node.attempt,
        instance=node.instance,
        deadline_at=deadline_at,
        others=tuple(others),
        cause=cause,
    )
    told = _tell(event, node, ports)
    _warn_pool(told, ports)
    return told


def lost(instance: str, ports: Ports) -> Told:
    """The member is lost to its job."""
    return _lost(instance, "instance state", ports)


def evicted(instances: Iterable[str], ports: Ports) -> list[Told]:
    """Members whose spot request was evicted are lost to their jobs; others of the pool are asked for a save.

    The record comes minutes after the fact, so there is nothing left to save on these machines.
    """
    told = _each(instances, lambda instance: _lost(instance, "bid evicted", ports))
    for one in told:
        _warn_pool(one, ports)
    return told


def advised(instance: str, ports: Ports) -> Told:
    """The owner's job is asked for one early save in a cool-down, and for closer ones while the advice holds.

    Most advice is followed by nothing, so no machine is touched and the phase stays what it is.
    """
    node = ports.store.node(instance)
    if node is None:
        return Told(instance=instance, fate=Fate.FOREIGN)
    now = ports.clock()
    event = EarlySaveAdvised(
        at=now, attempt=node.attempt, until_at=now + notices.ADVICE_HOLDS_S, cause="rebalance recommendation"
    )
    return _tell(event, node, ports)


def maintenance(instances: Iterable[str], ports: Ports, *, starts_at: float, cause: str) -> list[Told]:
    """The owners' jobs will leave these machines before the maintenance starts; the order is out if that is soon."""
    by_at = notices.maintenance_left_by(starts_at)
    return _each(instances, lambda instance: _leave(instance, ports, by_at=by_at, cause=cause))


def degraded(instances: Iterable[str], ports: Ports, *, cause: str) -> list[Told]:
    """The owners' jobs are asked for a save at once, and leave the failing machines when it is committed."""
    return _each(instances, lambda instance: _degraded(instance, ports, cause))


def heed_statuses(ports: Ports) -> Iterable[tuple[Told, str]]:
    """What EC2's statuses say of members is told to their jobs; yields what changed a job, and in which words.

    A scheduled event is the same fact as AWS Health's, so both are one move. A machine whose status check fails is left
    after a save, and is lost when that does not come about. Raises when EC2 does not list them all, and, after the last
    of them, when a job could not be told.
    """
    troubles, faults = {one.instance: one for one in ports.fleets.troubled()}, Faults()
    for node in ports.store.nodes(sorted(troubles)) if troubles else ():
        with faults.apart(node.job):
            yield from _heed(troubles[node.instance], node, ports)
    faults.tell("telling jobs of their machines' statuses")


def _heed(trouble: notices.Trouble, node: Node, ports: Ports) -> Iterable[tuple[Told, str]]:
    job = ports.store.load(node.job)
    if job is None or node.state is Ownership.ENDING:
        return
    for told, words in _troubles_told(trouble, node, job, ports):
        if told.job is not None and told.fate is Fate.TAKEN and told.job.version != job.version:
            yield told, words
            job = told.job


def _troubles_told(trouble: notices.Trouble, node: Node, job: Job, ports: Ports) -> Iterable[tuple[Told, str]]:
    for event in trouble.events:
        by_at = notices.maintenance_left_by(event.starts_at)
        yield _leave(trouble.instance, ports, by_at=by_at, cause=event.code), f"{event.code} is scheduled"
    impaired_s = trouble.impaired_s(ports.clock())
    words = f"status check fails for {impaired_s:.0f} s"
    if impaired_s >= notices.IMPAIRED_LOST_S and node.state is Ownership.MEMBER:
        lost = FleetLost(
            at=ports.clock(), attempt=node.attempt, instances=(trouble.instance,), failure="hardware", cause=words
        )
        yield _tell(lost, node, ports), words
    elif impaired_s >= notices.IMPAIRED_LEAVE_S and notices.trains(job):
        yield _degraded(trouble.instance, ports, words), words


def unfit(instance: str, ports: Ports, *, cause: str) -> Told:
    """The machine takes part in no further attempt: it is ended, and the others of its gang are kept where they can be.

    With ranks at work on it, it is left when the next save is committed.
    """
    node = ports.store.node(instance)
    if node is None:
        return Told(instance=instance, fate=Fate.FOREIGN)
    job = ports.store.load(node.job)
    if job is None or node.state is Ownership.ENDING:
        return Told(instance=instance, fate=Fate.EXPECTED)
    now = ports.clock()
    if node.state is Ownership.HELD or node.attempt != job.attempt or job.phase not in (Phase.LAUNCHING, Phase.RUNNING):
        ports.store.mark_ending([instance], node.job, now)
        return Told(instance=instance, fate=Fate.TAKEN, job=job)
    if job.roster_id is not None:
        return swapped(node, ports, cause=cause)
    event = MoveDue(at=now, attempt=node.attempt, by_at=now, instance=instance, cause=f"{instance} is unfit: {cause}")
    return _tell(event, node, ports)


def swapped(node: Node, ports: Ports, *, cause: str) -> Told:
    """Once the next save is committed the job leaves this machine alone, and another is bought in its place."""
    now = ports.clock()
    by_at = now + notices.DEGRADED_MOVE_S
    event = MovePlanned(
        at=now,
        attempt=node.attempt,
        instance=node.instance,
        by_at=by_at,
        after_save=True,
        alone=True,
        cause=cause,
    )
    return _tell(event, node, ports)


def block_ends(reservation: str, ports: Ports, *, ends_at: float) -> list[Told]:
    """The jobs on the Capacity Block will have left it before EC2 begins to end its instances.

    One machine of each job is enough to tell: a block is one pool, and a gang is bought in one.
    """
    on_block = [one.id for one in ports.fleets.of_stack() if one.live and one.reservation == reservation]
    one_a_job = {node.job: node.instance for node in ports.store.nodes(on_block)}
    by_at = notices.block_left_by(ends_at)
    return _each(one_a_job.values(), lambda one: _leave(one, ports, by_at=by_at, cause=f"{reservation} ends"))


def move_when_due(job: Job, ports: Ports) -> Job | None:
    """The order to move is out when its time has come; None while it has not."""
    now = ports.clock()
    if job.move_by_at is None or not notices.move_due(job, now):
        return None
    by_at = notices.move_deadline_at(job.move_by_at, now)
    return record(MoveDue(at=now, attempt=job.attempt, by_at=by_at, cause="planned move"), job.id, ports)


def save_while_advised(job: Job, ports: Ports) -> Job | None:
    """The next early save is asked for when advice still holds and the newest save has grown old; None otherwise."""
    now = ports.clock()
    if not notices.early_save_due(job, now):
        return None
    return record(EarlySaveAdvised(at=now, attempt=job.attempt, cause="advice still holds"), job.id, ports)


def _each(instances: Iterable[str], tell: Callable[[str], Told]) -> list[Told]:
    """Return what became of each telling. Raises, when one of them failed, after all were told."""
    faults, told, every = Faults(), list[Told](), list(instances)
    for instance in every:
        with faults.apart(instance):
            told.append(tell(instance))
    faults.tell(f"{len(faults.found)} of {len(every)} instances")
    return told


def _lost(instance: str, cause: str, ports: Ports) -> Told:
    node = ports.store.node(instance)
    if node is None:
        return Told(instance=instance, fate=Fate.FOREIGN)
    if node.state is not Ownership.MEMBER:
        return Told(instance=instance, fate=Fate.EXPECTED)
    event = FleetLost(at=ports.clock(), attempt=node.attempt, instances=(instance,), cause=cause)
    return _tell(event, node, ports)


def _leave(instance: str, ports: Ports, *, by_at: float, cause: str) -> Told:
    node = ports.store.node(instance)
    if node is None:
        return Told(instance=instance, fate=Fate.FOREIGN)
    event = MovePlanned(at=ports.clock(), attempt=node.attempt, instance=instance, by_at=by_at, cause=cause)
    told = _tell(event, node, ports)
    if told.job is not None and told.fate is Fate.TAKEN:
        move_when_due(told.job, ports)
    return told


def _degraded(instance: str, ports: Ports, cause: str) -> Told:
    node = ports.store.node(instance)
    if node is None:
        return Told(instance=instance, fate=Fate.FOREIGN)
    now = ports.clock()
    _tell(EarlySaveAdvised(at=now, attempt=node.attempt, cause=cause), node, ports)
    by_at = now + notices.DEGRADED_MOVE_S
    moved = MovePlanned(at=now, attempt=node.attempt, instance=instance, by_at=by_at, after_save=True, cause=cause)
    return _tell(moved, node, ports)


def _tell(event: AttemptEvent, node: Node, ports: Ports) -> Told:
    try:
        job = record(event, node.job, ports)
    except UnknownJob:
        # Rows outlive their jobs by weeks only, and so do owner items, but not to the same second.
        return Told(instance=node.instance, fate=Fate.FOREIGN)
    late = job.attempt != node.attempt or not job.attempt_open
    return Told(instance=node.instance, fate=Fate.LATE if late else Fate.TAKEN, job=job)


def _warn_pool(told: Told, ports: Ports) -> None:
    """Other jobs of the pool are asked for a save, once in a cool-down: what takes one machine often takes more.

    Best effort: whoever has claimed the warning and dies leaves these jobs to notices of their own.
    """
    if told.job is None or told.fate is not Fate.TAKEN or not told.job.pool or _follows_another(told):
        return
    now = ports.clock()
    if ports.store.claim(f"pool-warning/{told.job.pool}", now, now + notices.REBALANCE_COOL_DOWN_S):
        for neighbour in _neighbours(told.job, ports)[: notices.POOL_JOBS_WARNED]:
            cause = f"{told.job.pool} is being taken back"
            record(EarlySaveAdvised(at=now, attempt=neighbour.attempt, cause=cause), neighbour.id, ports)


def _follows_another(told: Told) -> bool:
    """True for a notice after the job's first in this attempt, which has warned the pool: a gang has hundreds."""
    return told.job is not None and bool(told.job.doomed) and told.job.doomed[0] != told.instance


def _neighbours(job: Job, ports: Ports) -> Sequence[Job]:
    """Return the training jobs on the same capacity, those with the most unsaved time first."""
    others = [one for one in ports.store.alive() if one != job.id][: notices.POOL_JOBS_READ]
    found = [one for one in ports.store.load_all(others) if one.pool == job.pool and notices.trains(one)]
    return sorted(found, key=lambda one: one.saved.at if one.saved else 0.0)
