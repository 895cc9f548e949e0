"""The heart: the only writer of a job's phase."""

from __future__ import annotations

import random

from holdfast.application.ports import Ports
from holdfast.domain.errors import Raced, UnknownJob
from holdfast.domain.events import AttemptStarted, Event, InterruptionNoticed
from holdfast.domain.job import Job
from holdfast.domain.keys import dedup_key
from holdfast.domain.ledger import Ledger
from holdfast.domain.obligations import answers_for
from holdfast.domain.phase import Phase
from holdfast.domain.records import replace
from holdfast.domain.transitions import advance

RETRY_FOR_S = 10.0
FIRST_PAUSE_S = 0.02
CROWDED_PAUSE_S = 0.1
LONGEST_PAUSE_S = 1.0


def record(event: Event, job_id: str, ports: Ports) -> Job:
    """Load -> advance -> one transaction -> do what is owed; returns the job as it stands afterwards.

    A repeated event writes nothing but repeats what is owed, so a redelivery heals a crash. Races and conflicts are
    retried with full jitter for up to 10 s, because Lambda would retry an asynchronous call only a minute later.
    Notices that race for one row are left beside it, and the next to write it takes all of them along.
    Raises UnknownJob, IllegalTransition, or Raced when the time is up.
    """
    key = dedup_key(event)
    give_up_at, pause_s = ports.clock() + RETRY_FOR_S, FIRST_PAUSE_S
    crowded = False
    while True:
        job, seen = ports.store.load_for(job_id, key)
        if job is None:
            raise UnknownJob(job_id)
        after = job if seen else advance(job, event)
        if after is not job and crowded:
            event = _with_others(event, job_id, ports)
            after = advance(job, event)
        if after is job:
            break
        try:
            ports.store.save(job, after, event, key)
            break
        except Raced:
            if ports.clock() > give_up_at:
                raise
            if isinstance(event, InterruptionNoticed) and not crowded:
                ports.store.leave_notice(job_id, event.attempt, event.instance, event.deadline_at)
                crowded, pause_s = True, CROWDED_PAUSE_S
            ports.pause(random.uniform(0, pause_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    _do_what_is_owed(after, event, ports)
    return after


def begin(job: Job, event: AttemptStarted, ledger: Ledger, ports: Ports) -> Job:
    """Start an attempt on the strength of this row and this ledger; the same job when it may not be started.

    One try: when either has moved, the decision behind it is void, so Raced is for the caller to decide anew.
    """
    after = advance(job, event)
    if after is not job:
        ports.store.save(job, after, event, dedup_key(event), ledger)
        _do_what_is_owed(after, event, ports)
    return after


def _do_what_is_owed(after: Job, event: Event, ports: Ports) -> None:
    settle(after, ports)
    if isinstance(event, AttemptStarted) and after.attempt == event.attempt and after.phase is Phase.LAUNCHING:
        ports.workflow.start(after.id, event.attempt)


def _with_others(event: Event, job_id: str, ports: Ports) -> Event:
    """Return the notice together with those that were left for whoever writes next."""
    assert isinstance(event, InterruptionNoticed)
    left = ports.store.left_notices(job_id, event.attempt)
    deadline_at = min([event.deadline_at, *left.values()])
    return replace(event, deadline_at=deadline_at, others=tuple(sorted(left.keys() - {event.instance})))


def settle(job: Job, ports: Ports) -> None:
    """Every state of the run machine that waits for what the row already says has been told."""
    answers = answers_for(job, ports.clock()) if job.attempt else {}
    if not answers:
        return
    for item in ports.store.waits(job.id, answers):
        if item.attempt == job.attempt:
            ports.workflow.settle(item.token, answers[item.wait])
            ports.store.drop_wait(item)
