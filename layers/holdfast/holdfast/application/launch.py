"""Buys the gang of an attempt: write-ahead intent, one all-or-nothing call per candidate, owners for every instance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.application.ports import Bought, Ports
from holdfast.application.record import record
from holdfast.application.survivors import rejoin
from holdfast.domain.errors import CapacityUnavailable, IdentityReused
from holdfast.domain.events import CapacityRefused, FleetBought, FleetIntended, GaveUp
from holdfast.domain.job import Job
from holdfast.domain.ownership import FleetIntent, Instance, Node
from holdfast.domain.phase import Intent, Phase
from holdfast.domain.placement import CAPACITY_RETRY_S, Candidate, fleet_name
from job_contract.checkpoint_layout import Head
from job_contract.orders import ResumeFrom

READY_WAIT_S = 900
"""Nodes boot and pull the image for minutes."""

CALL_RESERVE_S = 60
"""No call is begun that could not be answered before the function's time is up."""


class Launch:
    """One run of the launch step for one attempt of one job."""

    def __init__(self, ports: Ports) -> None:
        self.ports = ports

    def run(
        self, job_id: str, attempt: int, *, candidates: Sequence[Candidate], prefix: str, time_left_s: float
    ) -> Mapping[str, Any]:
        """Return {outcome: launched | again | refused | withdrawn, ready_wait_s}; whatever was bought has an owner."""
        ends_at = self.ports.clock() + time_left_s
        job = self.ports.store.load(job_id)
        if job is None or not _wanted(job, attempt):
            return _answer("withdrawn")
        if job.gang:
            # The fleet of this attempt is bought and told: this is the step's second delivery.
            return _answer("launched")
        try:
            head = self.ports.checkpoints.take_over(prefix, job, attempt)
        except IdentityReused as refusal:
            return self._give_up(job_id, attempt, str(refusal))
        if job.held and (outcome := rejoin(job, attempt, _resume_from(head), self.ports)):
            return _answer(outcome)
        refusals: list[str] = []
        # The request says how many nodes were wanted at first; a resume may have changed that.
        wanted = [replace(candidate, nodes=job.nodes) for candidate in candidates]
        for number, candidate in enumerate(wanted):
            fleet = fleet_name(job_id, attempt, number)
            intent = self.ports.store.intent(fleet)
            if intent is not None and intent.closed_at is not None and intent.outcome != "bought":
                refusals.append(intent.outcome)
                continue
            if self.ports.clock() > ends_at - CALL_RESERVE_S:
                return _answer("again")
            if not _wanted(self.ports.store.load(job_id), attempt):
                return _answer("withdrawn")
            try:
                self._buy(fleet, job_id, attempt, number, candidate, head)
            except CapacityUnavailable as refusal:
                refusals.append(str(refusal))
                continue
            return _answer("launched")
        self._record(
            CapacityRefused(
                at=self.ports.clock(),
                attempt=attempt,
                reason="; ".join(refusals)[:500],
                not_before=self.ports.clock() + CAPACITY_RETRY_S,
            ),
            job_id,
        )
        return _answer("refused")

    def _give_up(self, job_id: str, attempt: int, reason: str) -> Mapping[str, Any]:
        # Read again: a newer attempt of this very job may have taken the head over meanwhile.
        if not _wanted(self.ports.store.load(job_id), attempt):
            return _answer("withdrawn")
        record(GaveUp(at=self.ports.clock(), reason=reason), job_id, self.ports)
        return _answer("refused")

    def _buy(self, fleet: str, job_id: str, attempt: int, number: int, candidate: Candidate, head: Head) -> None:
        now = self.ports.clock()
        self._record(FleetIntended(at=now, attempt=attempt, fleet=fleet, resume_from=_resume_from(head)), job_id)
        intent = self.ports.store.open_intent(
            FleetIntent(
                fleet=fleet, job=job_id, attempt=attempt, candidate=number, nodes=candidate.nodes, opened_at=now
            )
        )
        # The same token with another number is an error of EC2's, so what was written ahead counts.
        candidate = replace(candidate, nodes=intent.nodes)
        bought = self._settled(intent) or self.ports.fleets.buy(fleet, job_id, candidate)
        if len(bought.instances) != candidate.nodes:
            self._give_back(intent, bought, candidate)
        self.ports.store.own(
            [
                Node(instance=instance, job=job_id, fleet=fleet, attempt=attempt, since_at=now)
                for instance in bought.instances
            ]
        )
        self.ports.store.close_intent(_closed(intent, bought.instances, "bought", self.ports.clock()))
        self._record(
            FleetBought(
                at=self.ports.clock(),
                attempt=attempt,
                fleet=fleet,
                instance_type=bought.instance_type or candidate.instance_type,
                zone=bought.zone,
                market=candidate.market,
                nodes=len(bought.instances),
            ),
            job_id,
        )

    def _settled(self, intent: FleetIntent) -> Bought | None:
        """What an earlier call under this intent brought; None when the call is (again) to be made."""
        if intent.outcome == "bought":
            return Bought(instances=intent.instances)
        # The answer of an earlier call may have been lost: the tag knows. The same token buys nothing twice.
        return _as_bought(
            [instance for instance in self.ports.fleets.of_fleet(intent.fleet) if instance.live], intent.nodes
        )

    def _give_back(self, intent: FleetIntent, bought: Bought, candidate: Candidate) -> None:
        """End a part of a gang and raise CapacityUnavailable with what EC2 said."""
        self.ports.fleets.terminate(bought.instances)
        what = f"{len(bought.instances)} of {candidate.nodes} {candidate.instance_type} ({candidate.market})"
        reason = f"{what}: {', '.join(bought.errors) or 'no reason given'}"
        self.ports.store.close_intent(_closed(intent, bought.instances, reason, self.ports.clock()))
        raise CapacityUnavailable(reason)

    def _record(self, event: CapacityRefused | FleetIntended | FleetBought, job_id: str) -> None:
        record(event, job_id, self.ports)


def _wanted(job: Job | None, attempt: int) -> bool:
    return (
        job is not None
        and job.attempt == attempt
        and job.attempt_open
        and job.phase is Phase.LAUNCHING
        and job.intent is Intent.RUN
    )


def _answer(outcome: str) -> Mapping[str, Any]:
    return {"outcome": outcome, "ready_wait_s": READY_WAIT_S}


def _resume_from(head: Head) -> ResumeFrom | None:
    pointer = head.pointer
    if pointer is None:
        return None
    return ResumeFrom(save=pointer.save, manifest_sha256=pointer.manifest_sha256, parent=head.parent)


def _as_bought(live: Sequence[Instance], nodes: int) -> Bought | None:
    if len(live) < nodes:
        return None
    return Bought(
        instances=tuple(instance.id for instance in live), instance_type=live[0].instance_type, zone=live[0].zone
    )


def _closed(intent: FleetIntent, instances: Sequence[str], outcome: str, now: float) -> FleetIntent:
    return replace(intent, instances=tuple(instances), outcome=outcome, closed_at=now)
