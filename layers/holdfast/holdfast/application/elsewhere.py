"""Looks where a job would go while AWS advises to leave its machines. It buys nothing, makes nothing, ends nothing."""

from __future__ import annotations

from holdfast.application.offers import Look, Offers
from holdfast.application.ports import Ports
from holdfast.application.record import record
from holdfast.application.terms import terms
from holdfast.domain.elsewhere import Choice, in_order, in_words
from holdfast.domain.errors import PurchaseRefused, Unavailable
from holdfast.domain.events import CapacityLooked
from holdfast.domain.job import Job, Pool
from holdfast.domain.notices import look_due
from holdfast.domain.placement import Candidate
from holdfast.domain.purchase import ADVICE, ReservationKind
from holdfast.messages.acceptance import candidates_of
from holdfast.messages.job_request import read_request

LOOKS_A_ROUND = 20
"""Jobs that one sweep looks for. A pool that is taken back warns hundreds; the next sweeps have the others."""


def look_elsewhere(job: Job, ports: Ports) -> Job | None:
    """The row and the history say where the job would go, and its next purchase asks its present pool last.

    None when it is not due, or when EC2 did not answer, so that the next sweep looks again.
    """
    request = ports.store.request(job.id) if look_due(job, ports.clock()) else None
    if request is None or job.pool is None or job.save_asked_at is None:
        return None
    whole = [one for one in candidates_of(read_request(request["body"]), job.nodes) if not one.fewest]
    try:
        outcome = in_words(_choices(job, job.pool, whole, ports), job.pool)
    except PurchaseRefused as refused:
        told = f"; {ADVICE[refused.refusal.kind]}" if refused.refusal.kind in ADVICE else ""
        outcome = f"not known: EC2 says {refused.refusal.code}{told}"
    except Unavailable:
        return None
    looked = CapacityLooked(
        at=ports.clock(),
        attempt=job.attempt,
        asked_at=job.save_asked_at,
        outcome=outcome,
        cause="advice to leave the machines",
    )
    return record(looked, job.id, ports)


def _choices(job: Job, pool: Pool, asked: list[Candidate], ports: Ports) -> list[Choice]:
    """What speaks against each candidate now, in the order of asking, as if the job's own machines were gone."""
    offers, facts = Offers(ports), Look()
    offers.read(asked, facts)
    offers.quotas = terms(asked, ports, without=job.id).quotas
    blocks = any(one.kind is ReservationKind.CAPACITY_BLOCK for one in facts.reservations.values())
    choices = []
    for _, candidate in in_order(asked, (subnet.zone for subnet in facts.subnets), pool):
        if blocks and not candidate.reservation:
            continue
        this = Look(subnets=facts.subnets, machines=facts.machines, reservations=facts.reservations)
        zones = tuple(dict.fromkeys(subnet.zone for subnet in offers.open_now(candidate, this)))
        choices.append(Choice(candidate=candidate, zones=zones, why_not=tuple(this.reasons)))
    return choices
