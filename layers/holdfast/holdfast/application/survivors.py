"""Keeps the survivors of a loss for the next attempt, and joins them with the nodes that take the vacant places.

A node outlives an attempt: member of one, held between, member of the next. At most one live fleet a job, survivors
counted in, because nothing else is bought while they are held.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from holdfast.application.ports import Ports
from holdfast.application.record import record
from holdfast.domain import recovery
from holdfast.domain.events import CapacityRefused, FleetBought, FleetIntended, SurvivorsHeld
from holdfast.domain.job import Job
from holdfast.domain.ownership import FleetIntent, Node, Ownership
from holdfast.domain.phase import ALIVE, Intent, Phase
from holdfast.domain.placement import Candidate
from holdfast.domain.purchase import Bought, Part, Purchase
from job_contract.orders import ResumeFrom


def hold_survivors(job: Job, live: Collection[str], ports: Ports) -> frozenset[str]:
    """Return those of the live machines that stay for the next attempt; the row and their owner items say so."""
    if job.phase is not Phase.RESUMING or job.intent is not Intent.RUN or job.pool is None:
        return frozenset()
    if job.held:
        return frozenset(job.held)
    alive = [node.instance for node in ports.store.nodes(live) if node.state is not Ownership.ENDING]
    choice = recovery.after_loss(job, alive, ports.clock())
    if not choice.instances:
        return frozenset()
    ports.store.hold(choice.instances, choice.until)
    held = SurvivorsHeld(
        at=ports.clock(), attempt=job.attempt, instances=choice.instances, until=choice.until, why=choice.why
    )
    return frozenset(record(held, job.id, ports).held)


def let_go(job: Job, ports: Ports) -> None:
    """Machines held for a job that does not want them any more are ending."""
    if job.held and not job.attempt_open and not job.dispatchable:
        ports.store.mark_ending(job.held, job.id, ports.clock())
        ports.fleets.terminate([found.id for found in ports.fleets.described(job.held) if found.live])


Missing = Callable[[str, Candidate], tuple[Purchase | None, str]]
"""Turns the fleet's name and the missing nodes into a call to make; None with the reason why none is to be made."""


def rejoin(
    job: Job,
    attempt: int,
    resume_from: ResumeFrom | None,
    missing: Missing,
    ports: Ports,
    *,
    node_usd_h: float | None = None,
) -> str | None:
    """Return the outcome of the launch step with survivors: launched, withdrawn, or refused (wait, and ask again); None
    when they were let go and a whole gang is to be bought. `node_usd_h` is the price of a node in their pool.
    """
    fleet = f"{job.id}-{attempt}-s"
    now = ports.clock()
    survivors, leaving = _still_there(job, fleet, ports)
    wanted = max(0, job.nodes - len(survivors))
    intent, refusal = _intent(job, attempt, fleet, wanted, missing, ports)
    # In this order: a release that finds the fleet in the row waits for the intent, an earlier one is seen here.
    told = record(FleetIntended(at=now, attempt=attempt, fleet=fleet, resume_from=resume_from), job.id, ports)
    if told.fleet != fleet:
        ports.store.open_intent(intent.withdrawn(now))
        return "withdrawn"
    if not (told.attempt_open and told.phase is Phase.LAUNCHING and told.intent is Intent.RUN):
        return "withdrawn"
    if leaving:
        # Under notice while held: at work until AWS takes it, and no part of the next gang.
        ports.fleets.terminate(leaving)
    bought, refusal = (Bought(), refusal) if refusal else _missing_nodes(intent, wanted, ports)
    if refusal:
        choice = recovery.after_refusal(job, len(survivors), now)
        if choice is recovery.Refused.WAIT:
            return _wait(job, attempt, intent, f"{len(survivors)} held; missing {wanted}: {refusal}", ports)
        if choice is recovery.Refused.RELEASE:
            ports.store.mark_ending(job.held, job.id, now)
            ports.fleets.terminate(survivors)
            ports.store.close_intent(replace(intent, closed_at=now, outcome=refusal))
            return None
    members = _members(survivors[: job.nodes], bought.instances, job, fleet, attempt, ports)
    ports.store.close_intent(
        replace(intent, instances=members, nodes=len(members), closed_at=ports.clock(), outcome="bought")
    )
    _end_the_surplus(survivors[job.nodes :], job, ports)
    assert job.pool is not None
    whole = FleetBought(
        at=ports.clock(),
        attempt=attempt,
        fleet=fleet,
        instance_type=job.pool.instance_type,
        zone=job.pool.zone,
        market=job.pool.market,
        nodes=len(members),
        node_usd_h=node_usd_h,
    )
    told = record(whole, job.id, ports)
    if told.attempt != attempt or not told.attempt_open or told.phase not in ALIVE:
        # The attempt ended while EC2 answered: whoever released its machines may not have seen these.
        ports.store.mark_ending(members, job.id, ports.clock())
        ports.fleets.terminate(members)
        return "withdrawn"
    return "launched"


def _intent(job: Job, attempt: int, fleet: str, wanted: int, missing: Missing, ports: Ports) -> tuple[FleetIntent, str]:
    """Return the intent that stands for the missing nodes, and why no call is to be made.

    What an earlier run wrote ahead is kept to the letter: the same token with other words is an error of EC2's.
    """
    known = ports.store.intent(fleet)
    if known is not None and known.closed_at is None and known.purchase is not None:
        return known, ""
    purchase, refusal = None, ""
    if wanted and job.pool is not None:
        pool = job.pool
        purchase, refusal = missing(
            fleet,
            Candidate(instance_type=pool.instance_type, market=pool.market, nodes=wanted, zones=(pool.zone,)),
        )
    intent = FleetIntent(
        fleet=fleet,
        job=job.id,
        attempt=attempt,
        candidate=-1,
        nodes=wanted,
        opened_at=ports.clock(),
        purchase=purchase,
    )
    return ports.store.open_intent(intent), "" if purchase or not wanted else refusal or "no call could be made"


def _still_there(job: Job, fleet: str, ports: Ports) -> tuple[list[str], list[str]]:
    """Return those held that EC2 shows at work: survivors that are still ours, and others; each sorted by id."""
    ours = {
        node.instance
        for node in ports.store.nodes(job.held)
        if node.state is Ownership.HELD or (node.state is Ownership.MEMBER and node.fleet == fleet)
    }
    live = sorted(found.id for found in ports.fleets.described(job.held) if found.live)
    return [one for one in live if one in ours], [one for one in live if one not in ours]


def _missing_nodes(intent: FleetIntent, wanted: int, ports: Ports) -> tuple[Bought, str]:
    """Return what was bought to fill the gang, and why nothing was."""
    if not wanted or intent.purchase is None:
        return Bought(), ""
    known = [found for found in ports.fleets.of_fleet(intent.fleet) if found.live]
    if len(known) >= wanted:
        return Bought(parts=(Part(instances=tuple(found.id for found in known)),)), ""
    bought = ports.fleets.buy(intent.purchase)
    if len(bought.instances) >= wanted:
        return bought, ""
    ports.fleets.terminate(bought.instances)
    return Bought(), f"{len(bought.instances)} of {intent.purchase.what}: {', '.join(bought.errors)}"


def _members(
    survivors: Collection[str], new: Collection[str], job: Job, fleet: str, attempt: int, ports: Ports
) -> tuple[str, ...]:
    now = ports.clock()
    adopted = [instance for instance in survivors if ports.store.adopt(instance, fleet=fleet, attempt=attempt, now=now)]
    ports.store.own([Node(instance=one, job=job.id, fleet=fleet, attempt=attempt, since_at=now) for one in new])
    return (*adopted, *new)


def _end_the_surplus(instances: Collection[str], job: Job, ports: Ports) -> None:
    """The job wants fewer nodes than survived."""
    if instances:
        ports.store.mark_ending(instances, job.id, ports.clock())
        ports.fleets.terminate(instances)


def _wait(job: Job, attempt: int, intent: FleetIntent, reason: str, ports: Ports) -> str:
    now = ports.clock()
    ports.store.close_intent(replace(intent, closed_at=now, outcome=reason))
    refused = CapacityRefused(at=now, attempt=attempt, reason=reason, not_before=now + recovery.REFUSED_RETRY_S)
    record(refused, job.id, ports)
    return "refused"
