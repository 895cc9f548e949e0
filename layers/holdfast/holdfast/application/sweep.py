"""The level-triggered twin of every event: looks at the real state, and tells the same `record`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import cast

from holdfast.application.account import repair_ledger
from holdfast.application.apart import Faults
from holdfast.application.dry_run import DryRun
from holdfast.application.elsewhere import LOOKS_A_ROUND, look_elsewhere
from holdfast.application.notices import heed_statuses, move_when_due, save_while_advised
from holdfast.application.ports import Ports
from holdfast.application.record import record, settle
from holdfast.application.release import end_dead_attempt
from holdfast.application.retention import retire_saves
from holdfast.application.retire import retire_launch_templates, retire_placement_groups
from holdfast.application.vitals import Vitals
from holdfast.domain.cost import cost
from holdfast.domain.errors import ExecutionOver
from holdfast.domain.events import BudgetNearlySpent, Failed, FleetLost, LimitPassed
from holdfast.domain.job import Job
from holdfast.domain.notices import look_due
from holdfast.domain.ownership import FleetIntent, Instance, may_belong, suspect
from holdfast.domain.phase import ALIVE, Intent, Phase
from holdfast.domain.recovery import budget_warning, budget_warning_due, hung, passed

START_GRACE_S = 30
"""A dispatch may be between its transaction and its StartExecution."""


@dataclass(frozen=True)
class Finding:
    """One thing that an event should have told, and what was done about it; in a dry run, what would be done.

    `orphan` is the machine of a finding that costs money while nobody owns it.
    """

    what: str
    who: str
    done: str
    orphan: Instance | None = None


class Sweep:
    """One look at everything that is alive. `found` is what it has found so far.

    A job that fails keeps no other from its turn. What is judged by the whole picture is looked at only when that is
    whole; an orphan, when every job that it could be of could be looked at.
    """

    def __init__(self, ports: Ports, *, dry_run: bool = False) -> None:
        self.ports = cast(Ports, DryRun(ports)) if dry_run else ports
        self.dry_run = dry_run
        self.vitals = Vitals(self.ports)
        self.found: list[Finding] = []
        self._advised: list[str] = []

    def run(self) -> list[Finding]:
        """Silent jobs are moved on and orphans ended; returns what was found.

        Raises Unavailable, or the first fault of our own, after the last job when one of them could not be swept.
        """
        faults, jobs = Faults(), self.ports.store.alive()
        for job_id in jobs:
            with faults.apart(job_id):
                self._add(self._job(job_id))
        if faults.found:
            stuck = frozenset(faults.found)
            with faults.apart("orphans"):
                self._end_orphans(stuck)
            faults.tell(f"the sweep is not complete: {len(stuck)} of {len(jobs)} jobs")
        if not self.dry_run:
            self._add(Finding("place of no job", job_id, "given back") for job_id in repair_ledger(self.ports))
        self._end_orphans()
        if not self.dry_run:
            self._add(self._leftovers())
        # Last: whoever may not read statuses or offers yet still has all of the above.
        with faults.apart("statuses"):
            self._add(self._statuses() if jobs else ())
        for job_id in self._advised[:LOOKS_A_ROUND] if not self.dry_run else ():
            with faults.apart(job_id):
                self._add(self._elsewhere(job_id))
        faults.tell("looking at statuses and elsewhere")
        return self.found

    def _add(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.found.append(finding)

    def _statuses(self) -> Iterable[Finding]:
        for told, words in heed_statuses(self.ports):
            if told.job is not None:
                yield Finding(f"{told.instance}: {words}", told.job.id, "told to its job")

    def _leftovers(self) -> list[Finding]:
        """Placement groups and launch templates that nothing needs; one still in use waits for the next look."""
        gone = [*retire_placement_groups(self.ports).gone, *retire_launch_templates(self.ports).gone]
        return [Finding("leftover of a purchase", name, "deleted") for name in gone]

    def _job(self, job_id: str) -> Iterable[Finding]:
        job = self.ports.store.load(job_id)
        if job is None or not job.attempt_open:
            return
        self.vitals.look(job)
        settle(job, self.ports)
        status = self.ports.workflow.status(job_id, job.attempt)
        if status is None:
            yield from self._never_started(job)
        elif status != "RUNNING":
            yield self._close(job, f"execution {status.lower()}")
        elif job.phase in ALIVE:
            yield from self._members(job)
            yield from self._progress(job)
            yield from self._limits(job)
            yield from self._warnings(job_id)
            yield from (Finding("save past checkpoint.keep", save, "deleted") for save in retire_saves(job, self.ports))

    def _warnings(self, job_id: str) -> Iterable[Finding]:
        """A date that has come near, or advice that still holds, is told by nobody else."""
        job = self.ports.store.load(job_id)
        if job is None:
            return
        if move_when_due(job, self.ports):
            yield Finding("planned move is due", job_id, "ordered to save and stop")
        elif save_while_advised(job, self.ports):
            yield Finding("advice holds and the newest save is old", job_id, "asked for a save")
        if look_due(job, self.ports.clock()):
            self._advised.append(job_id)

    def _elsewhere(self, job_id: str) -> Iterable[Finding]:
        job = self.ports.store.load(job_id)
        looked = look_elsewhere(job, self.ports) if job is not None else None
        if looked is not None and looked.elsewhere is not None:
            yield Finding("AWS advises to leave its machines", job_id, f"looked elsewhere: {looked.elsewhere.words}")

    def _never_started(self, job: Job) -> Iterable[Finding]:
        if self.ports.clock() - job.phase_at < START_GRACE_S:
            return
        try:
            self.ports.workflow.start(job.id, job.attempt)
        except ExecutionOver:
            yield self._close(job, "execution over")
            return
        yield Finding("attempt without an execution", job.id, "started")

    def _close(self, job: Job, why: str) -> Finding:
        if not self.dry_run:
            end_dead_attempt(job.id, job.attempt, self.ports, cause=why)
        return Finding(why, job.id, "fleet released, attempt closed")

    def _members(self, job: Job) -> Iterable[Finding]:
        intent = self.ports.store.intent(job.fleet) if job.fleet else None
        if intent is None or not intent.instances or intent.closed_at is None:
            return
        seen = {instance.id: instance for instance in self.ports.fleets.described(intent.instances)}
        gone = [instance for instance in intent.instances if not self._here(seen.get(instance), intent.closed_at)]
        if not gone:
            return
        event = FleetLost(at=self.ports.clock(), attempt=job.attempt, instances=tuple(sorted(gone)), cause="sweep")
        before = job.version
        after = record(event, job.id, self.ports)
        if after.version != before:
            yield Finding(f"lost {len(gone)} of {intent.nodes} nodes", job.id, f"phase {after.phase}")

    def _progress(self, job: Job) -> Iterable[Finding]:
        intent = self.ports.store.intent(job.fleet) if job.fleet else None
        if job.phase is not Phase.RUNNING or intent is None:
            return
        moves = [node.step_at for node in self.ports.store.nodes(intent.instances) if node.step_at is not None]
        why = hung(job, max(moves, default=None), self.ports.clock())
        if why:
            record(Failed(at=self.ports.clock(), attempt=job.attempt, failure="hang", reason=why), job.id, self.ports)
            yield Finding("hang", job.id, why)

    def _limits(self, job: Job) -> Iterable[Finding]:
        now = self.ports.clock()
        limit = passed(job, now)
        if limit is not None and job.intent is Intent.RUN:
            passed_it = LimitPassed(at=now, attempt=job.attempt, reason=limit.reason, failure=limit.failure)
            record(passed_it, job.id, self.ports)
            yield Finding("limit", job.id, limit.reason)
        elif job.intent is Intent.RUN and job.budget_usd is not None and budget_warning_due(job, now):
            spent = cost(job, now).usd
            event = BudgetNearlySpent(at=now, attempt=job.attempt, budget_usd=job.budget_usd, cost_usd=spent)
            warned = record(event, job.id, self.ports).budget_warned
            if warned is not None and warned.at == now:
                self.vitals.budget_warned()
                yield Finding("most of the budget is spent", job.id, budget_warning(job, warned))

    def _here(self, instance: Instance | None, bought_at: float) -> bool:
        if instance is None:
            # DescribeInstances may not know a new instance yet: not found is not ended until it had time to appear.
            return self.ports.clock() - bought_at < START_GRACE_S
        return instance.live

    def _end_orphans(self, stuck: frozenset[str] = frozenset()) -> None:
        orphans = self._orphans(stuck)
        self.vitals.orphans(len(orphans))
        self._add(orphans)

    def _orphans(self, stuck: frozenset[str]) -> list[Finding]:
        """All are judged before the first is ended, so a read that fails ends nobody.

        What may belong to a job that is stuck is left to a sweep that can look at that job.
        """
        now, listed = self.ports.clock(), self.ports.fleets.of_stack()
        intent_of, job_of = cache(self.ports.store.intent), cache(self.ports.store.load)

        def why_orphan(instance: Instance) -> str | None:
            if not instance.live:
                return None
            # The owner is read last: an intent is closed after its machines are owned, an attempt after they are ending
            # or held.
            intent = intent_of(instance.fleet) if instance.fleet else None
            if intent is not None and intent.closed_at is None and _over(intent, job_of(intent.job)):
                # A crash came between the intent and the row, so no release knew of it: it protects nothing any more.
                intent = intent.withdrawn(now)
            job = job_of(instance.job) if instance.job else None
            node = self.ports.store.node(instance.id)
            if stuck and may_belong(instance, node, intent, stuck):
                return None
            closed = job.attempt - job.attempt_open if job and node and node.job == job.id else 0
            return suspect(instance, node, intent, now, closed=closed)

        found = [(instance, why_orphan(instance)) for instance in listed]
        ended = []
        for instance, why in found:
            if why is None or (not self.dry_run and self.ports.store.suspected(instance.id, now) is None):
                continue
            self.ports.fleets.terminate([instance.id])
            ended.append(Finding(f"orphan instance: {why}", instance.id, "terminated", orphan=instance))
        return ended


def _over(intent: FleetIntent, job: Job | None) -> bool:
    """True when the attempt that opened the intent is closed."""
    return job is None or job.attempt != intent.attempt or not job.attempt_open
