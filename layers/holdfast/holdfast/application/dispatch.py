"""Starts attempts of the jobs that wait, and writes down why the others do not start.

Reads of one look: the teams, the quotas, the ledger, one page of the index a team, and the chosen rows in one batch.
Two looks at once are safe: a start holds only while the ledger is the one that was decided on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress

from holdfast.application.apart import Faults
from holdfast.application.ports import Ports
from holdfast.application.record import begin, record
from holdfast.application.release import end_dead_attempt
from holdfast.application.survivors import let_go
from holdfast.domain.because import IN_LINE, Because
from holdfast.domain.errors import ExecutionOver, Raced, Unavailable
from holdfast.domain.events import AttemptStarted, GaveUp, PlaceWanted
from holdfast.domain.job import Job
from holdfast.domain.ledger import Ledger
from holdfast.domain.queueing import MOST_STARTS, Decision, Waiter, order
from holdfast.domain.recovery import unaffordable

MOST_LOOKS = 4
"""After a race, or after as many starts as one look may make, the line is looked at again; then the tick goes on."""

MOST_REASONS = 100
"""Reasons written in one dispatch, at about 8 ms each; the others follow with the next."""

LONGEST_PAUSE_S = 0.2


def dispatch(ports: Ports) -> list[str]:
    """Every job that may start has its attempt started; returns their ids.

    Jobs that waited past their limit have failed, running jobs that are to make room are asked to save, and every
    waiting job whose reason is another one than before has it in its row.
    """
    return Dispatch(ports).run()


class Dispatch:
    """`started`: begun now, in order. `set_aside`: not to be tried again in this dispatch."""

    def __init__(self, ports: Ports) -> None:
        self.ports = ports
        self.started: list[str] = []
        self.set_aside: set[str] = set()
        self.faults = Faults()

    def run(self) -> list[str]:
        for look in range(MOST_LOOKS):
            if self._look(last=look == MOST_LOOKS - 1):
                break
        # One whose machines could not be ended, or that could not be asked, has kept no other from its start.
        self.faults.tell(f"{len(self.faults.found)} jobs")
        return self.started

    def _look(self, *, last: bool) -> bool:
        """Act on one decision; False when there is reason to look again."""
        store, now = self.ports.store, self.ports.clock()
        quotas, ledger = store.quotas(), store.ledger()
        waiting = [job for team in store.teams() for job in store.line(team) if job.id not in self.set_aside]
        decision = order(waiting, ledger=ledger, quotas=quotas, now=now)
        late = [job.id for job in waiting if _waited_out(job, now)][:MOST_STARTS]
        # The index may be stale: what is acted on is read strongly, in one batch.
        rows = {job.id: job for job in store.load_all(sorted({*decision.starts, *late}))}
        self._give_up(late, rows)
        self._end_the_broke(decision.starts, rows)
        try:
            self._start(decision, {job.id: job for job in waiting}, rows, ledger)
        except Raced:
            self.ports.pause(random.uniform(0, LONGEST_PAUSE_S))
            return False
        if len(decision.starts) >= MOST_STARTS and not last:
            return False
        self._ask_for_room(decision)
        self._explain(waiting, decision)
        return True

    def _start(self, decision: Decision, seen: dict[str, Waiter], rows: dict[str, Job], ledger: Ledger) -> None:
        for job_id in decision.starts:
            job, now = rows.get(job_id), self.ports.clock()
            if job_id in self.set_aside or job is None or not _as_seen(job, seen[job_id], now):
                continue
            event = AttemptStarted(at=now, attempt=job.attempt + 1, reserved=seen[job_id].wanted)
            self.set_aside.add(job_id)
            try:
                after = begin(job, event, ledger, self.ports)
            except ExecutionOver:
                # That name was used up by a start that was repeated late.
                # What cannot be ended yet is the sweep's; the other jobs do not wait for it.
                with suppress(Unavailable):
                    end_dead_attempt(job_id, event.attempt, self.ports, cause="name was used")
                raise Raced(f"the place of {job_id} was given back") from None
            except Raced:
                self.set_aside.discard(job_id)
                raise
            if after is not job:
                ledger = ledger.moved(job, after, event.at)
                self.started.append(job_id)

    def _give_up(self, late: list[str], rows: dict[str, Job]) -> None:
        for job_id in late:
            job, now = rows.get(job_id), self.ports.clock()
            if job is None or not job.dispatchable or not _waited_out(job, now):
                continue
            self.set_aside.add(job_id)
            reason = f"limits.wait_s = {job.wait_s} passed before training could start"
            with self.faults.apart(job_id):
                let_go(record(GaveUp(at=now, reason=reason, branch=job.branch), job_id, self.ports), self.ports)

    def _end_the_broke(self, starts: Sequence[str], rows: dict[str, Job]) -> None:
        """A job whose budget pays for no useful attempt any more has failed, with the way out."""
        for job_id in starts:
            job, now = rows.get(job_id), self.ports.clock()
            why = unaffordable(job, now) if job is not None and job.dispatchable else None
            if job is None or why is None:
                continue
            self.set_aside.add(job_id)
            spent = GaveUp(at=now, reason=why.reason, failure=why.failure, branch=job.branch)
            with self.faults.apart(job_id):
                let_go(record(spent, job_id, self.ports), self.ports)

    def _ask_for_room(self, decision: Decision) -> None:
        for asked in decision.preempt:
            event = PlaceWanted(at=self.ports.clock(), attempt=asked.attempt, by=asked.by, cause="preemption")
            with self.faults.apart(asked.victim):
                record(event, asked.victim, self.ports)

    def _explain(self, waiting: list[Waiter], decision: Decision) -> None:
        """Write reasons that changed: those of heads first, for the next decision rests on them."""
        now, left = self.ports.clock(), MOST_REASONS
        for job in sorted(waiting, key=lambda job: job.id not in decision.promised):
            because = decision.because.get(job.id)
            if because is None or job.id in self.set_aside or not _is_news(job.waiting, because, now):
                continue
            if not left:
                return
            left -= self.ports.store.explain(job, because)


def _waited_out(job: Waiter | Job, now: float) -> bool:
    """True when the time to wait for a first step is over; a job that has trained waits as long as it takes."""
    return job.step == 0 and now - job.submitted_at > job.wait_s


def _as_seen(job: Job, seen: Waiter, now: float) -> bool:
    """True when the row still is what was decided on."""
    timely = job.not_before <= now and not _waited_out(job, now)
    return job.dispatchable and timely and Waiter.of(job).wanted == seen.wanted


def _is_news(known: Because | None, because: Because, now: float) -> bool:
    """True for another code or head, and for a time that has passed: few writes, and nothing that is plainly untrue."""
    known = known or IN_LINE
    if (known.code, known.head_since) != (because.code, because.head_since):
        return True
    return known.until is not None and known.until < now and known.until != because.until
