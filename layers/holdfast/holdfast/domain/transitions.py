"""`advance`: the whole life of a job as one pure function over one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from holdfast.domain import failure
from holdfast.domain.errors import IllegalTransition
from holdfast.domain.events import (
    AllReady,
    AttemptClosed,
    AttemptEvent,
    AttemptStarted,
    CancelRequested,
    CapacityRefused,
    CheckpointSaved,
    Event,
    Failed,
    FleetBought,
    FleetIntended,
    FleetLost,
    GateRefused,
    GaveUp,
    InterruptionNoticed,
    OrderHeard,
    TrainingFinished,
    TrainingStarted,
)
from holdfast.domain.job import Job, Saved
from holdfast.domain.notices import loses_only_doomed
from holdfast.domain.obligations import projection
from holdfast.domain.phase import ALIVE, ENDED, WAITING, Intent, Phase

Q, L, R = Phase.QUEUED, Phase.LAUNCHING, Phase.RUNNING
N, C, S = Phase.INTERRUPTED, Phase.CHECKPOINTING, Phase.RESUMING

AT_WORK = {L: R, R: R, N: N, C: C, S: S}
"""A sign of life from the ranks makes a launching job a running one and changes no other phase."""

ENDS_ATTEMPT = dict.fromkeys((L, R, N, C, S), S)

TABLE: Mapping[type[Event], Mapping[Phase, Phase]] = {
    AttemptStarted: {Q: L, S: L},
    FleetIntended: {L: L},
    FleetBought: {L: L},
    AllReady: {L: L, R: R, N: N, C: C, S: S},
    CapacityRefused: {L: S, S: S},
    GateRefused: {L: S, S: S},
    TrainingStarted: AT_WORK,
    InterruptionNoticed: {L: N, R: N, N: N, C: C, S: S},
    OrderHeard: {L: L, R: R, N: C, C: C, S: S},
    CheckpointSaved: AT_WORK,
    FleetLost: ENDS_ATTEMPT,
    TrainingFinished: dict.fromkeys((L, R, N, C, S), Phase.COMPLETED),
    Failed: ENDS_ATTEMPT,
    AttemptClosed: ENDS_ATTEMPT,
    GaveUp: dict.fromkeys((Q, L, R, N, C, S, Phase.PAUSED), Phase.FAILED),
    CancelRequested: {phase: phase for phase in (Q, L, R, N, C, S, Phase.PAUSED)},
}

OVERTAKEN = (AttemptStarted, FleetIntended, FleetBought)
"""Steps of the supervisor that a cancel or a loss may overtake: then they change nothing."""


def advance(job: Job, event: Event) -> Job:
    """Return the job after the event; the same object when nothing changes.

    An event of an older attempt changes nothing, except that a committed save is remembered. An event about a job
    that has ended changes nothing, except that its attempt is closed. Raises IllegalTransition for any pair that is
    not in the table.
    """
    if job.phase in ENDED:
        return _stamp(job, _after_the_end(job, event), event)
    if isinstance(event, AttemptEvent) and not isinstance(event, AttemptStarted):
        if event.attempt > job.attempt:
            raise IllegalTransition(f"{type(event).__name__} of attempt {event.attempt}: {job.id} is at {job.attempt}")
        if event.attempt < job.attempt or not job.attempt_open:
            return _stamp(job, _remember(job, event), event)
    target = TABLE[type(event)].get(job.phase)
    if target is None:
        if isinstance(event, OVERTAKEN):
            return job
        raise IllegalTransition(f"{type(event).__name__} is not possible for {job.id} in phase {job.phase}")
    return _stamp(job, RULES[type(event)](job, event, target), event)


def _stamp(before: Job, after: Job, event: Event) -> Job:
    """Give a changed job its version, the generation of changed orders, and news of a changed phase or a final end."""
    if after == before:
        return before
    changes: dict[str, Any] = {"version": before.version + 1}
    if projection(after) != projection(before):
        changes["generation"] = before.version + 1
    if after.phase is not before.phase:
        changes["phase_at"] = event.at
    if after.phase is not before.phase or after.over is not before.over:
        changes["news"] = before.news + 1
    if after.over and not before.over:
        changes["ended_at"] = event.at
    return replace(after, **changes)


def _after_the_end(job: Job, event: Event) -> Job:
    if isinstance(event, AttemptClosed) and event.attempt == job.attempt and job.attempt_open:
        return _settled(job, event)
    return _remember(job, event)


def _remember(job: Job, event: Event) -> Job:
    """Keep the newest committed save, whoever reports it and however late."""
    if not isinstance(event, CheckpointSaved):
        return job
    saved = Saved(
        save=event.pointer.save, manifest_sha256=event.pointer.manifest_sha256, at=event.at, parent=event.parent
    )
    if job.saved is not None and saved.order <= job.saved.order:
        return job
    return replace(job, saved=saved)


def _attempt_started(job: Job, event: AttemptStarted, target: Phase) -> Job:
    if event.attempt != job.attempt + 1 or not job.dispatchable:
        return job
    return replace(
        job,
        phase=target,
        stage="starting the run",
        reason="",
        attempt=event.attempt,
        attempt_open=True,
        fleet=None,
        bought_at=None,
        roster_id=None,
        resume_from=None,
        doomed=(),
        deadline_at=None,
        failure=None,
        not_before=0.0,
    )


def _fleet_intended(job: Job, event: FleetIntended, target: Phase) -> Job:
    return replace(job, stage="buying machines", fleet=event.fleet, resume_from=event.resume_from)


def _fleet_bought(job: Job, event: FleetBought, target: Phase) -> Job:
    if event.fleet != job.fleet:
        return job
    stage = f"booting {job.nodes} x {event.instance_type} in {event.zone}"
    return replace(job, stage=stage, bought_at=job.bought_at or event.at)


def _refused(job: Job, event: CapacityRefused | GateRefused, target: Phase) -> Job:
    if job.phase is S:
        return job
    stage = "waiting for capacity" if isinstance(event, CapacityRefused) else "waiting for other machines"
    kind = event.failure if isinstance(event, GateRefused) else "capacity"
    return replace(job, phase=target, stage=stage, reason=event.reason, not_before=event.not_before, failure=kind)


def _all_ready(job: Job, event: AllReady, target: Phase) -> Job:
    if job.phase is not L or job.roster_id is not None or job.intent is not Intent.RUN:
        return job
    return replace(job, stage="starting the ranks", roster_id=event.roster_id)


def _training_started(job: Job, event: TrainingStarted, target: Phase) -> Job:
    stage = "training" if target is R else job.stage
    reason = f"fell back past {', '.join(event.fell_back)}" if event.fell_back else job.reason
    return replace(
        job,
        phase=target,
        stage=stage,
        reason=reason,
        step=max(job.step, event.step),
        fell_back=job.fell_back + len(event.fell_back),
    )


def _interruption_noticed(job: Job, event: InterruptionNoticed, target: Phase) -> Job:
    if event.instance in job.doomed:
        return job
    deadline_at = min(event.deadline_at, job.deadline_at or event.deadline_at)
    noticed = replace(
        job, doomed=(*job.doomed, event.instance), deadline_at=deadline_at, interruptions=job.interruptions + 1
    )
    reason = f"{event.instance} will be taken away"
    if job.phase is S:
        # Peers that died of it may be heard first: the attempt is still charged to the preemption.
        return noticed
    if job.phase is L and job.roster_id is None:
        return replace(noticed, phase=S, stage="releasing machines", reason=reason, failure="preemption")
    return replace(noticed, phase=target, stage="saving before the deadline", reason=reason)


def _order_heard(job: Job, event: OrderHeard, target: Phase) -> Job:
    return replace(job, phase=target)


def _checkpoint_saved(job: Job, event: CheckpointSaved, target: Phase) -> Job:
    remembered = _remember(job, event)
    step = max(job.step, event.pointer.step)
    if not event.final or job.phase is S:
        stage = "training" if target is R else job.stage
        return replace(remembered, phase=target, step=step, stage=stage)
    forced = job.forced_checkpoints + (job.phase in (N, C) or job.intent is not Intent.RUN)
    return replace(remembered, phase=S, stage="releasing machines", step=step, forced_checkpoints=forced)


def _fleet_lost(job: Job, event: FleetLost, target: Phase) -> Job:
    if job.phase is S or loses_only_doomed(job, event.instances):
        return job
    kind = "preemption" if job.market in ("spot", "mixed") or job.doomed else "hardware"
    reason = f"lost {', '.join(event.instances)}"
    return replace(job, phase=target, stage="releasing machines", reason=reason, failure=job.failure or kind)


def _training_finished(job: Job, event: TrainingFinished, target: Phase) -> Job:
    return replace(job, phase=target, stage="releasing machines", reason="", step=event.step, failure=None)


def _failed(job: Job, event: Failed, target: Phase) -> Job:
    known = job.failure in failure.PRIMARY or event.failure not in failure.PRIMARY
    if job.phase is S and (job.failure is None or known):
        # The fleet is being released already: peers of a stopped rank die of it, and say so.
        return job
    over = failure.spent(job.charged, event.failure, job.attempts_limit)
    ended = replace(job, failure=event.failure, reason=over or event.reason, stage="releasing machines")
    return replace(ended, phase=Phase.FAILED if over else target)


def _gave_up(job: Job, event: GaveUp, target: Phase) -> Job:
    return replace(job, phase=target, stage="releasing machines", reason=event.reason)


def _cancel_requested(job: Job, event: CancelRequested, target: Phase) -> Job:
    wanted = replace(job, intent=Intent.CANCEL)
    if not job.attempt_open:
        return replace(wanted, phase=Phase.CANCELLED, stage="", reason="cancelled before it had machines")
    return replace(wanted, stage="saving before the end" if job.roster_id else "releasing machines")


def _attempt_closed(job: Job, event: AttemptClosed, target: Phase) -> Job:
    lost = job if job.phase in WAITING else replace(job, phase=S, failure=job.failure or "lost")
    return _settled(lost, event)


def _settled(job: Job, event: AttemptClosed) -> Job:
    """Charge the attempt to its class, count its machine time, and leave the job dispatchable or ended."""
    charged, over = dict(job.charged), None
    if job.failure is not None:
        charged_as = "preemption" if job.doomed and job.failure == "peer_lost" else job.failure
        over = failure.spent(charged, charged_as, job.attempts_limit)
        charged[charged_as] = charged.get(charged_as, 0) + 1
    node_seconds = job.node_seconds + (job.nodes * (event.at - job.bought_at) if job.bought_at else 0.0)
    closed = replace(job, attempt_open=False, charged=charged, node_seconds=round(node_seconds, 1))
    if closed.phase in ENDED:
        return replace(closed, stage="")
    if job.intent is not Intent.RUN:
        phase = Phase.CANCELLED if job.intent is Intent.CANCEL else Phase.PAUSED
        return replace(closed, phase=phase, stage="", reason=f"{phase} as asked")
    if over:
        return replace(closed, phase=Phase.FAILED, stage="", reason=over)
    return replace(closed, stage="waiting for a place" if job.failure != "capacity" else job.stage)


Rule = Callable[[Job, Any, Phase], Job]

RULES: Mapping[type[Event], Rule] = {
    AttemptStarted: _attempt_started,
    FleetIntended: _fleet_intended,
    FleetBought: _fleet_bought,
    AllReady: _all_ready,
    CapacityRefused: _refused,
    GateRefused: _refused,
    TrainingStarted: _training_started,
    InterruptionNoticed: _interruption_noticed,
    OrderHeard: _order_heard,
    CheckpointSaved: _checkpoint_saved,
    FleetLost: _fleet_lost,
    TrainingFinished: _training_finished,
    Failed: _failed,
    AttemptClosed: _attempt_closed,
    GaveUp: _gave_up,
    CancelRequested: _cancel_requested,
}

assert RULES.keys() == TABLE.keys()
assert set(ENDS_ATTEMPT) > ALIVE
