"""Buys the gang of an attempt: write-ahead intent, one all-or-nothing call per candidate, owners for every instance.

What EC2 refuses is remembered by pool, so no job asks a pool that is cold; a job waits for its pools outside of any
attempt, as long as it takes, and makes at most CALLS_AN_HOUR calls in an hour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from holdfast.application.offers import LOOK_AGAIN_S, Offers, Round, Stop, misplaced
from holdfast.application.ports import Ports
from holdfast.application.record import record
from holdfast.application.survivors import rejoin
from holdfast.application.terms import ReadTerms, Terms, unread
from holdfast.domain.elsewhere import in_order
from holdfast.domain.errors import IdentityReused, PurchaseRefused, Unavailable
from holdfast.domain.events import CapacityRefused, Event, FleetBought, FleetIntended, GaveUp
from holdfast.domain.job import Job
from holdfast.domain.ownership import FleetIntent, Instance, Node
from holdfast.domain.phase import ALIVE, Intent, Phase
from holdfast.domain.placement import (
    CALLS_AN_HOUR,
    CLUSTER,
    ON_DEMAND,
    Candidate,
    Patience,
    ask_again_at,
    cooled,
    fleet_name,
    jitter_of,
    node_price,
    pools_of,
)
from holdfast.domain.purchase import (
    Bought,
    Consequence,
    Gang,
    Part,
    Purchase,
    Refusal,
    RefusalKind,
    ReservationKind,
    Template,
    consequence,
    gang_of,
    shortfall,
)
from job_contract.checkpoint_layout import Head
from job_contract.orders import ResumeFrom

READY_WAIT_S = 900
"""Nodes boot and pull the image for minutes."""

CALL_RESERVE_S = 60
"""No call is begun that could not be answered before the function's time is up."""

AMBIGUOUS_S = 10.0
"""How long an unanswered call is repeated before the job waits."""

NO_ANSWER_S = 60.0

REASON_CHARACTERS = 500


class Launch:
    """One run of the launch step for one attempt of one job; `quotas_reached` counts refusals for want of a quota.

    `terms` reads what the machines cost, and what the account's quotas leave.
    """

    def __init__(self, ports: Ports, *, terms: ReadTerms = unread) -> None:
        self.ports, self._read_terms, self.terms = ports, terms, Terms()
        self.offers = Offers(ports)
        self._refused_for_quota = 0

    @property
    def quotas_reached(self) -> int:
        return self._refused_for_quota + self.offers.quotas_reached

    def run(
        self,
        job_id: str,
        attempt: int,
        *,
        candidates: Sequence[Candidate],
        prefix: str,
        time_left_s: float,
        image: str = "",
    ) -> Mapping[str, Any]:
        """Return {outcome: launched | again | refused | withdrawn, ready_wait_s}; whatever was bought has an owner."""
        ends_at = self.ports.clock() + time_left_s
        job = self.ports.store.load(job_id)
        if job is None or not _alive(job, attempt):
            return _answer("withdrawn")
        if job.phase is not Phase.LAUNCHING:
            # This step was repeated late: the fleet that it bought is at work.
            return _answer("launched")
        if not _wanted(job, attempt):
            return _answer("withdrawn")
        if job.gang:
            # The fleet of this attempt is bought and told: this is the step's second delivery.
            return _answer("launched")
        try:
            head = self.ports.checkpoints.take_over(prefix, job, attempt)
        except IdentityReused as refusal:
            return self._give_up(job_id, attempt, str(refusal))
        self.terms = self._read_terms(candidates, self.ports)
        self.offers.quotas = self.terms.quotas
        patience = self.ports.store.patience(job_id)
        this = Round(job_id=job_id, attempt=attempt, head=head, ends_at=ends_at, patience=patience, image=image)
        this.avoided = job.elsewhere.pool if job.elsewhere is not None else None
        try:
            if job.held and (outcome := self._rejoin(job, this)):
                return _answer(outcome)
            self._finish_the_last(self.ports.store.load(job_id) or job, this)
            self._ask_all(candidates, this)
        except Stop as stop:
            if stop.outcome is not None:
                return _answer(stop.outcome)
        self._tell_refusal(this)
        return _answer("refused")

    def _give_up(self, job_id: str, attempt: int, reason: str) -> Mapping[str, Any]:
        # Read again: a newer attempt of this very job may have taken the head over meanwhile.
        if not _wanted(self.ports.store.load(job_id), attempt):
            return _answer("withdrawn")
        self._end(reason, job_id)
        return _answer("refused")

    def _end(self, reason: str, job_id: str) -> None:
        job = self.ports.store.load(job_id)
        record(GaveUp(at=self.ports.clock(), reason=reason, branch=job.branch if job else 0), job_id, self.ports)

    def _rejoin(self, job: Job, this: Round) -> str | None:
        def missing(fleet: str, candidate: Candidate) -> tuple[Purchase | None, str]:
            self.offers.read([candidate], this)
            purchase = self.offers.purchase(fleet, candidate, this)
            return purchase, "; ".join(this.reasons)

        pool = job.pool
        new = node_price(self.terms.prices, pool.instance_type, pool.zone, [pool.market]) if pool else None
        price = job.node_usd_h if new is None else new
        return rejoin(job, this.attempt, _resume_from(this.head), missing, self.ports, node_usd_h=price)

    def _finish_the_last(self, job: Job, this: Round) -> None:
        """An intent that a run before this one left open is settled before anything else is asked for."""
        intent = self.ports.store.intent(job.fleet) if job.fleet else None
        if intent is None or intent.attempt != this.attempt:
            return
        if intent.outcome == "bought" and intent.closed_at is not None:
            self._tell_bought(intent, this)
            raise Stop("launched")
        if intent.closed_at is None:
            self._settle(intent, this, fresh=False)

    def _ask_all(self, asked: Sequence[Candidate], this: Round) -> None:
        try:
            self.offers.read(asked, this)
        except PurchaseRefused as refused:
            self._before_a_call(refused.refusal, asked[0], this)
            raise Stop from refused
        except Unavailable as silence:
            self._no_answer(silence, this)
        this.reasons += misplaced(this, asked)
        blocks = [one for one in this.reservations.values() if one.kind is ReservationKind.CAPACITY_BLOCK]
        wanted = in_order(asked, (subnet.zone for subnet in this.subnets), this.avoided)
        if not wanted:
            this.reasons.append(f"no subnet of the stack lies in {', '.join(asked[0].zones)}; add one or allow any")
        for number, candidate in wanted:
            # A block is paid for: nothing else is bought in its stead.
            if candidate.reservation or not blocks:
                self._ask(number, candidate, this)

    def _ask(self, number: int, candidate: Candidate, this: Round) -> None:
        fleet = fleet_name(this.job_id, this.attempt, number)
        intent = self.ports.store.intent(fleet)
        if intent is not None and intent.closed_at is not None:
            this.reasons.append(intent.outcome)
            self._note_thaw(candidate, this)
            return
        now = self.ports.clock()
        if candidate.fewest and not this.patience.fewer_will_do(now):
            return
        if this.patience.free_at(now) > now:
            this.wait(f"{CALLS_AN_HOUR} calls were made within this hour", this.patience.free_at(now))
            raise Stop
        if now > this.ends_at - CALL_RESERVE_S:
            raise Stop("again")
        if not _wanted(self.ports.store.load(this.job_id), this.attempt):
            raise Stop("withdrawn")
        try:
            purchase = self.offers.purchase(fleet, candidate, this)
        except PurchaseRefused as refused:
            self._before_a_call(refused.refusal, candidate, this)
            return
        except Unavailable as silence:
            self._no_answer(silence, this)
        if purchase is not None:
            self._buy(purchase, number, this)

    # -- asking --------------------------------------------------------------------------------------------------------

    def _buy(self, purchase: Purchase, number: int, this: Round) -> None:
        now = self.ports.clock()
        intended = FleetIntended(
            at=now, attempt=this.attempt, fleet=purchase.fleet, resume_from=_resume_from(this.head)
        )
        # Counted before the call: a crash must not make calls free.
        self._keep(this.patience.asking(now), this)
        ours = FleetIntent(
            fleet=purchase.fleet,
            job=this.job_id,
            attempt=this.attempt,
            candidate=number,
            nodes=purchase.nodes,
            opened_at=now,
            purchase=purchase,
        )
        intent = self.ports.store.open_intent(ours)
        # In this order: a release that finds the fleet in the row finds the intent too and waits for it, and one that
        # came earlier is seen here.
        told = self._record(intended, this)
        if told.fleet != purchase.fleet:
            # The row never named it, so no call was made under it, and no release will look for it. Written like this,
            # it gives way to one that another run of this step has closed meanwhile.
            self.ports.store.open_intent(intent.withdrawn(now))
            raise Stop("withdrawn")
        if not _wanted(told, this.attempt):
            # Left open for the release: an earlier call under it may have bought.
            raise Stop("withdrawn")
        self._settle(intent, this, fresh=intent == ours)

    def _settle(self, intent: FleetIntent, this: Round, *, fresh: bool) -> None:
        """What the intent stands for is owned, or given back and its pools are cold. Raises Stop when it was whole."""
        if intent.instances:
            self._give_back(intent, this)
            return
        # The answer of an earlier call may have been lost: the tag knows. The same token buys nothing twice.
        live = [] if fresh else self._shown(intent.fleet)
        purchase = intent.purchase
        bought = _as_bought(live)
        if purchase is not None and len(live) < purchase.nodes:
            bought = _joined(self._asked_for(purchase, intent, this), live)
            if any(refusal.kind is RefusalKind.MISMATCH for refusal in bought.refusals):
                # Somebody bought under this token in other words: what there is, is ours.
                bought = _joined(bought, self._shown(intent.fleet))
        gang = gang_of(purchase, bought) if purchase else None
        if gang is not None:
            self._own(intent, gang, bought, this)
            raise Stop("launched")
        self._short(intent, bought, this)

    def _shown(self, fleet: str) -> list[Instance]:
        """What carries the fleet's tag by now."""
        return [one for one in self.ports.fleets.of_fleet(fleet) if one.live]

    def _asked_for(self, purchase: Purchase, intent: FleetIntent, this: Round) -> Bought:
        try:
            return self.ports.fleets.buy(purchase)
        except Unavailable as silence:
            if self.ports.clock() - intent.opened_at < AMBIGUOUS_S:
                # The step is tried again: by then the tag may show what this call brought.
                raise
            # The intent stays open: the release waits for what the call may have brought, and ends it.
            self._no_answer(silence, this)

    def _own(self, intent: FleetIntent, gang: Gang, bought: Bought, this: Round) -> None:
        now = self.ports.clock()
        self.ports.store.own(
            [
                Node(
                    instance=instance,
                    job=this.job_id,
                    fleet=intent.fleet,
                    attempt=this.attempt,
                    since_at=now,
                    market=bought.market_of(instance),
                )
                for instance in gang.instances
            ]
        )
        if gang.extra:
            self.ports.store.mark_ending(gang.extra, this.job_id, now)
        whole = replace(intent, nodes=len(gang.instances), node_usd_h=self._price(intent, gang, bought))
        closed = _closed(whole, gang.instances, "bought", now)
        self.ports.store.close_intent(closed)
        if gang.extra:
            self.ports.fleets.terminate(gang.extra)
        here = (gang.instance_type, gang.zone)
        self.ports.store.warm(
            [pool for pool, cold in this.cold.items() if cold.misses and (pool.instance_type, pool.zone) == here]
        )
        self._keep(replace(this.patience, refused_since=None, soon=0, unknown=0), this)
        self._tell_bought(closed, this, gang)

    def _price(self, intent: FleetIntent, gang: Gang, bought: Bought) -> float | None:
        purchase = intent.purchase
        if purchase is not None and purchase.reservation_kind == ReservationKind.CAPACITY_BLOCK:
            # Paid for when it was reserved.
            return 0.0
        usual = purchase.market if purchase else ""
        markets = [
            ON_DEMAND if purchase and purchase.reservation else bought.market_of(one) or usual for one in gang.instances
        ]
        return node_price(self.terms.prices, gang.instance_type, gang.zone, markets)

    def _tell_bought(self, intent: FleetIntent, this: Round, gang: Gang | None = None) -> None:
        purchase = intent.purchase
        kind = gang.instance_type if gang else purchase.instance_type if purchase else ""
        zones = {place.zone for place in purchase.places} if purchase else set()
        zone = gang.zone if gang else zones.pop() if len(zones) == 1 else ""
        job = self._record(
            FleetBought(
                at=self.ports.clock(),
                attempt=this.attempt,
                fleet=intent.fleet,
                instance_type=kind or "machines",
                zone=zone,
                market=purchase.market if purchase else "",
                nodes=len(intent.instances),
                node_usd_h=intent.node_usd_h,
            ),
            this,
        )
        if not _alive(job, this.attempt):
            # The attempt ended while EC2 answered: whoever released its machines may not have seen these.
            self.ports.store.mark_ending(intent.instances, this.job_id, self.ports.clock())
            self.ports.fleets.terminate(intent.instances)
            raise Stop("withdrawn")

    def _short(self, intent: FleetIntent, bought: Bought, this: Round) -> None:
        """A part of a gang is written down, ended and seen ending; then what EC2 said takes its course."""
        purchase = intent.purchase
        reason = shortfall(purchase, bought) if purchase else "its purchase was not written down"
        noted = replace(intent, instances=bought.instances, outcome=reason)
        if bought.instances:
            self.ports.store.close_intent(noted)
        follows = consequence(purchase, _said(bought), this.patience) if purchase else None
        if follows is not None and follows.quota:
            this.for_quota.add(reason)
        if follows is not None:
            # What was learned is written down first: it stands whatever becomes of the part.
            self._learn(follows, intent.fleet, this)
        self._give_back(noted, this)
        if follows is not None and (follows.fatal or follows.stop):
            raise Stop

    def _give_back(self, intent: FleetIntent, this: Round) -> None:
        """The part is seen ending and its intent closed. Else nothing more is asked in this attempt.

        The release, which the run machine repeats as long as it takes, reads the open intent and ends what it lists.
        """
        this.reasons.append(intent.outcome)
        if intent.instances:
            self.ports.store.mark_ending(intent.instances, intent.job, self.ports.clock())
            self.ports.fleets.terminate(intent.instances)
            ended = {one.id for one in self.ports.fleets.described(intent.instances) if not one.live}
            if not ended.issuperset(intent.instances):
                this.again_at.append(self.ports.clock() + LOOK_AGAIN_S / 5)
                raise Stop
        self.ports.store.close_intent(_closed(intent, intent.instances, intent.outcome, self.ports.clock()))

    # -- what follows from a refusal -----------------------------------------------------------------------------------

    def _before_a_call(self, refusal: Refusal, candidate: Candidate, this: Round) -> None:
        """EC2 refused to answer what a call needs to be made."""
        nothing = Purchase(
            fleet=fleet_name(this.job_id, this.attempt, 0),
            job=this.job_id,
            instance_type=candidate.instance_type,
            market=candidate.market,
            nodes=candidate.nodes,
            minimum=candidate.minimum,
            places=(),
            template=Template(id="", version=""),
        )
        this.wait(f"EC2 said {refusal.code}", self.ports.clock() + refusal.cool_s)
        follows = consequence(nothing, (refusal,), this.patience)
        self._learn(follows, nothing.fleet, this)
        if follows.fatal or follows.stop:
            raise Stop

    def _no_answer(self, silence: Unavailable, this: Round) -> NoReturn:
        """The job waits, and no attempt is burnt for an EC2 that is silent."""
        this.wait(str(silence), self.ports.clock() + NO_ANSWER_S)
        raise Stop from silence

    def _learn(self, follows: Consequence, fleet: str, this: Round) -> None:
        now = self.ports.clock()
        if follows.patience != this.patience:
            self._keep(follows.patience, this)
        known = self.ports.store.cold(cooling.pool for cooling in follows.cooling)
        for cooling in follows.cooling:
            cold = cooled(
                cooling.pool,
                known.get(cooling.pool),
                code=cooling.code,
                base_s=cooling.base_s,
                now=now,
                jitter=jitter_of(fleet),
            )
            if cold != known.get(cooling.pool):
                self.ports.store.cool(cold)
            this.cooled_here[cooling.pool] = this.cold[cooling.pool] = cold
            this.again_at.append(cold.until)
        if follows.wait_s:
            this.again_at.append(now + follows.wait_s)
        self._refused_for_quota += follows.quota
        this.fatal = follows.fatal or this.fatal

    def _note_thaw(self, candidate: Candidate, this: Round) -> None:
        """An earlier run of this attempt was refused here: when the pools thaw is what it left."""
        for zone in candidate.zones:
            for group in ("", CLUSTER):
                cold = self.ports.store.cold(pools_of(candidate, zone, group))
                this.again_at += [one.until for one in cold.values() if one.until > self.ports.clock()]

    def _tell_refusal(self, this: Round) -> None:
        now = self.ports.clock()
        reasons = "; ".join(dict.fromkeys(this.reasons)) or "no candidate is left"
        if this.fatal or not this.again_at:
            # Nothing that waiting could change.
            self._end((this.fatal or reasons)[:REASON_CHARACTERS], this.job_id)
            return
        if this.patience.refused_since is None:
            self._keep(replace(this.patience, refused_since=now), this)
        jitter = jitter_of(fleet_name(this.job_id, this.attempt, 0))
        not_before = ask_again_at(now, this.again_at, this.patience, jitter)
        self._record(
            CapacityRefused(
                at=now,
                attempt=this.attempt,
                reason=reasons[:REASON_CHARACTERS],
                not_before=not_before,
                over_quota=this.only_for_quota,
            ),
            this,
        )

    def _keep(self, patience: Patience, this: Round) -> None:
        this.patience = patience
        self.ports.store.keep_patience(this.job_id, patience, self.ports.clock())

    def _record(self, event: Event, this: Round) -> Job:
        return record(event, this.job_id, self.ports)


def _alive(job: Job, attempt: int) -> bool:
    return job.attempt == attempt and job.attempt_open and job.phase in ALIVE


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


def _as_bought(live: Sequence[Instance]) -> Bought:
    return Bought(
        parts=tuple(
            Part(instances=(one.id,), instance_type=one.instance_type, zone=one.zone, market=one.market) for one in live
        )
    )


def _joined(bought: Bought, live: Sequence[Instance]) -> Bought:
    """The answer, and what carries the fleet's tag besides."""
    more = _as_bought([one for one in live if one.id not in bought.instances])
    return replace(bought, parts=(*bought.parts, *more.parts))


def _said(bought: Bought) -> tuple[Refusal, ...]:
    """What EC2 said; a shortfall without a word is a pool that has no more."""
    return bought.refusals or (Refusal(code="Shortfall", kind=RefusalKind.POOL_COLD),)


def _closed(intent: FleetIntent, instances: Sequence[str], outcome: str, now: float) -> FleetIntent:
    return replace(intent, instances=tuple(instances), outcome=outcome, closed_at=now)
