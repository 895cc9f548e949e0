"""`advance`: the whole life of a job as one pure function over one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.domain import failure, recovery
from holdfast.domain.cost import counted
from holdfast.domain.errors import IllegalTransition
from holdfast.domain.events import (
    AllReady,
    AttemptClosed,
    AttemptEvent,
    AttemptStarted,
    BudgetNearlySpent,
    CancelRequested,
    CapacityLooked,
    CapacityRefused,
    CheckpointSaved,
    EarlySaveAdvised,
    Event,
    Failed,
    FleetBought,
    FleetIntended,
    FleetLost,
    GateRefused,
    GaveUp,
    InterruptionNoticed,
    LimitPassed,
    LimitsExtended,
    MoveDue,
    MovePlanned,
    OrderHeard,
    PauseRequested,
    PlaceWanted,
    PriorityChanged,
    ResumeRequested,
    RetryRequested,
    SaveLost,
    StepsSlowed,
    SurvivorsHeld,
    TrainingFinished,
    TrainingStarted,
)
from holdfast.domain.job import BudgetWarned, Elsewhere, Job, Pool, Saved, save_order
from holdfast.domain.notices import announced, cooling, loses_only_doomed, may_swap, trains
from holdfast.domain.obligations import orders_differ
from holdfast.domain.phase import ALIVE, ENDED, WAITING, Intent, Phase
from holdfast.domain.records import replace, same
from job_contract.checkpoint_layout import parse_save_name

Q, L, R = Phase.QUEUED, Phase.LAUNCHING, Phase.RUNNING
N, C, S = Phase.INTERRUPTED, Phase.CHECKPOINTING, Phase.RESUMING

AT_WORK = {L: R, R: R, N: N, C: C, S: S}
"""A sign of life from the ranks makes a launching job a running one and changes no other phase."""

NOT_ENDED = {phase: phase for phase in (Q, L, R, N, C, S, Phase.PAUSED)}

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
    PlaceWanted: {L: L, R: R, N: N, C: C, S: S},
    OrderHeard: {L: L, R: R, N: C, C: C, S: S},
    CheckpointSaved: AT_WORK,
    SaveLost: {phase: phase for phase in (L, R, N, C, S)},
    StepsSlowed: {phase: phase for phase in (L, R, N, C, S)},
    FleetLost: ENDS_ATTEMPT,
    TrainingFinished: dict.fromkeys((L, R, N, C, S), Phase.COMPLETED),
    Failed: ENDS_ATTEMPT,
    AttemptClosed: ENDS_ATTEMPT,
    SurvivorsHeld: {S: S},
    LimitPassed: NOT_ENDED,
    BudgetNearlySpent: NOT_ENDED,
    GaveUp: dict.fromkeys((Q, L, R, N, C, S, Phase.PAUSED), Phase.FAILED),
    CancelRequested: NOT_ENDED,
    PauseRequested: NOT_ENDED,
    ResumeRequested: {**NOT_ENDED, Phase.PAUSED: Q},
    PriorityChanged: NOT_ENDED,
    LimitsExtended: {**NOT_ENDED, **{phase: phase for phase in ENDED}},
    RetryRequested: dict.fromkeys(ENDED, Q),
    EarlySaveAdvised: {phase: phase for phase in (L, R, N, C, S)},
    CapacityLooked: {phase: phase for phase in (L, R, N, C, S)},
    MovePlanned: {phase: phase for phase in (L, R, N, C, S)},
    MoveDue: {L: N, R: N, N: N, C: C, S: S},
}

OVERTAKEN = (AttemptStarted, FleetIntended, FleetBought, SurvivorsHeld, RetryRequested)
"""Steps of the supervisor that a cancel or a loss may overtake: then they change nothing."""


REASON_CHARACTERS = 1_000
"""The row is written whole with every change."""

NAMED = 5
"""So many machines are named in a reason; a gang may have hundreds."""


def advance(job: Job, event: Event) -> Job:
    """Return the job after the event; the same object when nothing changes.

    An event of an older attempt changes nothing, except that a committed save is remembered. An event about a job
    that has ended changes nothing, except that its attempt is closed. Raises IllegalTransition for any pair that is
    not in the table.
    """
    if job.phase in ENDED and not isinstance(event, (LimitsExtended, RetryRequested)):
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
    if same(after, before):
        return before
    changes: dict[str, Any] = {"version": before.version + 1}
    moved, ended = after.phase is not before.phase, after.over is not before.over
    if len(after.reason) > REASON_CHARACTERS:
        changes["reason"] = f"{after.reason[:REASON_CHARACTERS]}..."
    if orders_differ(before, after):
        changes["generation"] = before.version + 1
    if moved:
        changes["phase_at"] = event.at
    if moved or ended:
        changes["news"] = before.news + 1
    if ended:
        changes["ended_at"] = event.at if after.over else None
    if after.held_from is not None and not after.attempt_open and not after.dispatchable:
        # Whoever waits for nothing holds nothing: its survivors are let go.
        after = counted(after, event.at)
    if after.waiting is not None and not after.dispatchable:
        changes["waiting"] = None
    return replace(after, **changes)


def _after_the_end(job: Job, event: Event) -> Job:
    if isinstance(event, AttemptClosed) and event.attempt == job.attempt and job.attempt_open:
        return _settled(job, event)
    return _remember(job, event)


def _remember(job: Job, event: Event) -> Job:
    """Keep the newest committed save, whoever reports it and however late."""
    newer = _newer_save(job, event) if isinstance(event, CheckpointSaved) else None
    return replace(job, saved=newer) if newer else job


def _newer_save(job: Job, event: CheckpointSaved) -> Saved | None:
    """Return the save that was reported, None when the job knows of it or of a newer one."""
    if job.saved is not None and save_order(event.pointer.save) <= job.saved.order:
        return None
    pointer = event.pointer
    return Saved(save=pointer.save, manifest_sha256=pointer.manifest_sha256, at=event.at, parent=event.parent)


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
        gang=0,
        roster_id=None,
        roster_at=None,
        last_roster_id=job.roster_id or job.last_roster_id,
        resume_from=None,
        doomed=(),
        deadline_at=None,
        failure=None,
        not_before=0.0,
        over_quota=False,
        save_asked_at=None,
        asked_generation=None,
        advised_until_at=None,
        elsewhere=job.elsewhere if job.elsewhere is not None and event.at < job.elsewhere.until else None,
        move_by_at=None,
        move_after_save_at=None,
        leaving=(),
        step_at_attempt_start=job.durable_step,
        reserved=event.reserved,
    )


def _fleet_intended(job: Job, event: FleetIntended, target: Phase) -> Job:
    return replace(job, stage="buying machines", fleet=event.fleet, resume_from=event.resume_from)


def _fleet_bought(job: Job, event: FleetBought, target: Phase) -> Job:
    if event.fleet != job.fleet:
        return job
    fewer = f" (of {job.nodes} wanted)" if event.nodes < job.nodes else ""
    job = counted(job, event.at)
    return replace(
        job,
        stage=f"booting {event.nodes} x {event.instance_type} in {event.zone or 'one zone'}{fewer}",
        bought_at=event.at,
        pool=Pool(instance_type=event.instance_type, zone=event.zone, market=event.market) if event.zone else None,
        gang=event.nodes,
        node_usd_h=event.node_usd_h,
        held=(),
        held_until=None,
        elsewhere=None,
    )


def _refused(job: Job, event: CapacityRefused | GateRefused, target: Phase) -> Job:
    if job.phase is S:
        return job
    stage = "waiting for capacity" if isinstance(event, CapacityRefused) else "waiting for other machines"
    kind = event.failure if isinstance(event, GateRefused) else "capacity"
    return replace(
        job,
        phase=target,
        stage=stage,
        reason=event.reason,
        not_before=event.not_before,
        over_quota=isinstance(event, CapacityRefused) and event.over_quota,
        failure=kind,
    )


def _all_ready(job: Job, event: AllReady, target: Phase) -> Job:
    if job.phase is not L or job.roster_id is not None or job.intent is not Intent.RUN:
        return job
    boot_s = event.at - job.bought_at if job.bought_at else 0.0
    return replace(
        job, stage="starting the ranks", roster_id=event.roster_id, roster_at=event.at, boot_s=round(boot_s, 1)
    )


def _training_started(job: Job, event: TrainingStarted, target: Phase) -> Job:
    stage = "training" if target is R else job.stage
    reason = f"fell back past {', '.join(event.fell_back)}" if event.fell_back else job.reason
    return replace(
        job,
        # What an older save is caught up from counts as progress, though the job has been further before.
        step_at_attempt_start=event.step if event.fell_back else job.step_at_attempt_start,
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
    new = tuple(dict.fromkeys(one for one in (event.instance, *event.others) if one not in job.doomed))
    noticed = replace(
        job, doomed=(*job.doomed, *new), deadline_at=deadline_at, interruptions=job.interruptions + len(new)
    )
    reason = f"{event.instance}{f' and {len(new) - 1} others' if len(new) > 1 else ''} will be taken away"
    if job.phase is S:
        # Peers that died of it may be heard first: the attempt is still charged to the preemption.
        return noticed
    if job.phase is L and job.roster_id is None:
        return replace(noticed, phase=S, stage="releasing machines", reason=reason, failure="preemption")
    return replace(noticed, phase=target, stage="saving before the deadline", reason=reason)


def _place_wanted(job: Job, event: PlaceWanted, target: Phase) -> Job:
    """Ask for a save and go on training; without ranks there is nothing to save, and the place is free at once."""
    if job.phase not in (L, R) or job.intent is not Intent.RUN or job.reserved is None or job.yields:
        return job
    asked = replace(job, reserved=replace(job.reserved, yields_to=event.by))
    return _place_given(asked) if job.roster_id is None else asked


def _place_given(job: Job) -> Job:
    by = job.reserved.yields_to if job.reserved is not None else ""
    return replace(job, phase=S, stage="releasing machines", reason=f"gave its place to {by}, which is urgent")


def _order_heard(job: Job, event: OrderHeard, target: Phase) -> Job:
    return replace(job, phase=target)


def _checkpoint_saved(job: Job, event: CheckpointSaved, target: Phase) -> Job:
    newer = _newer_save(job, event)
    asked = None if _answers(job, event) else job.asked_generation
    known: dict[str, Any] = {
        "saved": newer or job.saved,
        "asked_generation": asked,
        "step": max(job.step, event.pointer.step),
    }
    if job.yields and job.phase is R and (newer or asked is not job.asked_generation) and event.attempt == job.attempt:
        return _place_given(replace(job, **known))
    if not event.final or job.phase is S:
        return replace(job, **known, phase=target, stage="training" if target is R else job.stage)
    forced = job.forced_checkpoints + (job.phase in (N, C) or job.intent is not Intent.RUN)
    return replace(job, **known, phase=S, stage="releasing machines", forced_checkpoints=forced)


def _save_lost(job: Job, event: SaveLost, target: Phase) -> Job:
    return replace(job, phase=target, lost_saves=job.lost_saves + 1)


def _steps_slowed(job: Job, event: StepsSlowed, target: Phase) -> Job:
    """It is counted, and stands in the history: a slow job trains on."""
    return replace(job, slowdowns=job.slowdowns + 1) if trains(job) else job


def _fleet_lost(job: Job, event: FleetLost, target: Phase) -> Job:
    if job.phase is S or loses_only_doomed(job, event.instances):
        return job
    usual = "preemption" if job.market in ("spot", "mixed") or announced(job) else "hardware"
    kind = event.failure or usual
    more = f" and {len(event.instances) - NAMED} more" if len(event.instances) > NAMED else ""
    reason = f"lost {', '.join(event.instances[:NAMED])}{more}"
    return replace(job, phase=target, stage="releasing machines", reason=reason, failure=job.failure or kind)


def _training_finished(job: Job, event: TrainingFinished, target: Phase) -> Job:
    reason = f"all {event.step} steps are trained"
    return replace(job, phase=target, stage="releasing machines", reason=reason, step=event.step, failure=None)


def _failed(job: Job, event: Failed, target: Phase) -> Job:
    known = job.failure in failure.PRIMARY or event.failure not in failure.PRIMARY
    if job.phase is S and (job.failure is None or known):
        # The fleet is being released already: peers of a stopped rank die of it, and say so.
        return job
    over = failure.spent(job.charged, event.failure, job.attempts_limit)
    ended = replace(job, failure=event.failure, reason=over or event.reason, stage="releasing machines")
    return replace(ended, phase=Phase.FAILED if over else target)


def _gave_up(job: Job, event: GaveUp, target: Phase) -> Job:
    if event.branch != job.branch:
        return job
    given_up = replace(
        job,
        phase=target,
        stage="releasing machines",
        reason=event.reason,
        failure=event.failure or job.failure,
    )
    return given_up if job.attempt_open else replace(given_up, stage="", reserved=None)


def _limit_passed(job: Job, event: LimitPassed, target: Phase) -> Job:
    if job.intent is not Intent.RUN:
        return job
    return replace(_stopped(replace(job, intent=Intent.EXPIRE, limit=event.failure), Phase.FAILED), reason=event.reason)


def _budget_nearly_spent(job: Job, event: BudgetNearlySpent, target: Phase) -> Job:
    if event.budget_usd != job.budget_usd:
        # Extended meanwhile: the new budget has a warning of its own.
        return job
    warned = BudgetWarned(budget_usd=event.budget_usd, cost_usd=event.cost_usd, at=event.at)
    return replace(job, budget_warned=warned)


def _cancel_requested(job: Job, event: CancelRequested, target: Phase) -> Job:
    return _stopped(replace(job, intent=Intent.CANCEL), Phase.CANCELLED)


def _pause_requested(job: Job, event: PauseRequested, target: Phase) -> Job:
    if job.intent in (Intent.CANCEL, Intent.EXPIRE) or job.phase is Phase.PAUSED:
        return job
    return _stopped(replace(job, intent=Intent.PAUSE), Phase.PAUSED)


def _stopped(job: Job, phase: Phase) -> Job:
    """At once where nothing runs, else checkpoint first: the closing of the attempt reads the intent."""
    if not job.attempt_open:
        return replace(job, phase=phase, stage="", reason=f"{phase} while it had no machines at work", reserved=None)
    return replace(job, stage="saving before the end" if job.roster_id else "releasing machines")


def _resume_requested(job: Job, event: ResumeRequested, target: Phase) -> Job:
    if job.intent in (Intent.CANCEL, Intent.EXPIRE):
        return job
    nodes = event.nodes or job.nodes
    wanted = replace(job, intent=Intent.RUN, nodes=nodes, min_nodes=min(job.min_nodes, nodes))
    if job.phase is not Phase.PAUSED:
        return wanted
    return replace(wanted, phase=target, stage="waiting for a place", reason="", not_before=0.0)


def _priority_changed(job: Job, event: PriorityChanged, target: Phase) -> Job:
    return replace(job, priority=event.priority)


def _limits_extended(job: Job, event: LimitsExtended, target: Phase) -> Job:
    extended = replace(
        job,
        run_s=event.run_s or job.run_s,
        wait_s=event.wait_s or job.wait_s,
        attempts_limit=event.attempts or job.attempts_limit,
        budget_usd=event.budget_usd or job.budget_usd,
    )
    if job.intent is not Intent.EXPIRE or recovery.passed(extended, event.at) is not None:
        return extended
    # The ranks may have stopped by now, so the order stands; the closing of the attempt judges the limits anew.
    return replace(extended, reason="the limit was extended while it stopped: it goes on after this save")


def _retry_requested(job: Job, event: RetryRequested, target: Phase) -> Job:
    if not job.over:
        return job
    return replace(
        job,
        phase=target,
        intent=Intent.RUN,
        stage="waiting for a place",
        reason="",
        charged={},
        failure=None,
        limit=None,
        not_before=0.0,
        branch=job.branch + 1,
        retry_from=event.pointer,
    )


def _survivors_held(job: Job, event: SurvivorsHeld, target: Phase) -> Job:
    if job.held or job.intent is not Intent.RUN:
        return job
    return replace(job, held=event.instances, held_until=event.until, stage=f"holding {len(event.instances)} survivors")


def _attempt_closed(job: Job, event: AttemptClosed, target: Phase) -> Job:
    unheard = "preemption" if announced(job) else "lost"
    lost = job if job.phase in WAITING else replace(job, phase=S, failure=job.failure or unheard)
    return _settled(lost, event)


def _settled(job: Job, event: AttemptClosed) -> Job:
    """Charge the attempt to its class, count its machine time, and leave the job dispatchable or ended."""
    charged, over = dict(job.charged), None
    if job.durable_step > job.step_at_attempt_start:
        job = replace(job, fruitless=0, fruitless_failure="")
    if job.failure is not None:
        # What a node under notice takes with it is the notice's doing.
        charged_as = "preemption" if announced(job) and job.failure not in failure.PRIMARY else job.failure
        job = _counted(job, charged_as)
        over = failure.spent(charged, charged_as, job.attempts_limit) or failure.looping(charged_as, job.fruitless)
        charged[charged_as] = charged.get(charged_as, 0) + 1
    durable = parse_save_name(job.saved.save).step if job.saved else 0
    closed = replace(
        counted(job, event.at),
        attempt_open=False,
        charged=charged,
        held_from=event.at if job.held else None,
        lost_steps=job.lost_steps + (max(0, event.step - durable) if job.phase is not Phase.COMPLETED else 0),
        trained_s=round(job.trained_for_s(event.at), 1),
        # Held survivors keep their part of the place.
        reserved=job.reserved.of_nodes(len(job.held)) if job.reserved and job.held else None,
    )
    if closed.phase in ENDED:
        return replace(closed, stage="")
    if job.intent is Intent.EXPIRE:
        limit = recovery.passed(closed, event.at)
        if limit is not None:
            return replace(closed, phase=Phase.FAILED, stage="", failure=limit.failure, reason=limit.reason)
        closed = replace(closed, intent=Intent.RUN, limit=None)
        job = closed
    if job.intent is not Intent.RUN:
        phase = Phase.CANCELLED if job.intent is Intent.CANCEL else Phase.PAUSED
        return replace(closed, phase=phase, stage="", reason=f"{phase} as asked")
    if over:
        return replace(closed, phase=Phase.FAILED, stage="", reason=over)
    waiting_for = "waiting for a place" if job.failure != "capacity" else job.stage
    return replace(closed, stage=waiting_for)


def _counted(job: Job, charged_as: str) -> Job:
    """Count how often in a row attempts ended this way without one new durable step."""
    if charged_as in failure.NEVER_A_LOOP or job.durable_step > job.step_at_attempt_start:
        return job
    repeated = job.fruitless if job.fruitless_failure == charged_as else 0
    return replace(job, fruitless=repeated + 1, fruitless_failure=charged_as)


# -- Warnings that leave the machines at work --------------------------------------------------------------------------


def _early_save_advised(job: Job, event: EarlySaveAdvised, target: Phase) -> Job:
    if not trains(job) or (cooling(job, event.at) and not event.request):
        return job
    return replace(
        job,
        stage="saving early, training goes on",
        save_asked_at=event.at,
        asked_generation=job.version + 1,  # the version that this change gives the row
        advised_until_at=event.until_at or job.advised_until_at,
    )


def _capacity_looked(job: Job, event: CapacityLooked, target: Phase) -> Job:
    if not trains(job) or job.pool is None or job.advised_until_at is None:
        return job
    found = Elsewhere(at=event.at, until=job.advised_until_at, pool=job.pool, words=event.outcome)
    return replace(job, elsewhere=found)


def _answers(job: Job, event: CheckpointSaved) -> bool:
    """A save made since it was asked for answers the ask, whatever order made it."""
    return job.save_asked_at is not None and event.at >= job.save_asked_at


def _move_planned(job: Job, event: MovePlanned, target: Phase) -> Job:
    if job.phase not in (L, R):
        return job
    if event.alone and not may_swap(job):
        return job
    by_at = min(event.by_at, job.move_by_at or event.by_at)
    after_save_at = job.move_after_save_at
    if event.after_save and after_save_at is None:
        after_save_at = event.at
    return replace(
        job,
        move_by_at=by_at,
        move_after_save_at=after_save_at,
        # A date that all machines must keep outweighs a swap of one.
        leaving=(event.instance,) if event.alone else (),
        swaps=job.swaps + event.alone,
    )


def _move_due(job: Job, event: MoveDue, target: Phase) -> Job:
    if job.phase is S:
        return job
    leaving = (event.instance,) if event.instance else job.leaving
    reason = event.cause or "the machines must be left"
    job = replace(job, doomed=(*job.doomed, *(one for one in leaving if one not in job.doomed)))
    if job.phase is L and job.roster_id is None:
        return replace(job, phase=S, stage="releasing machines", reason=reason)
    deadline_at = min(event.by_at, job.deadline_at or event.by_at)
    if job.phase in (N, C):
        return replace(job, deadline_at=deadline_at)
    return replace(job, phase=target, stage="saving before the move", reason=reason, deadline_at=deadline_at)


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
    PlaceWanted: _place_wanted,
    OrderHeard: _order_heard,
    CheckpointSaved: _checkpoint_saved,
    SaveLost: _save_lost,
    StepsSlowed: _steps_slowed,
    FleetLost: _fleet_lost,
    TrainingFinished: _training_finished,
    Failed: _failed,
    AttemptClosed: _attempt_closed,
    LimitPassed: _limit_passed,
    BudgetNearlySpent: _budget_nearly_spent,
    GaveUp: _gave_up,
    SurvivorsHeld: _survivors_held,
    CancelRequested: _cancel_requested,
    PauseRequested: _pause_requested,
    ResumeRequested: _resume_requested,
    PriorityChanged: _priority_changed,
    LimitsExtended: _limits_extended,
    RetryRequested: _retry_requested,
    EarlySaveAdvised: _early_save_advised,
    CapacityLooked: _capacity_looked,
    MovePlanned: _move_planned,
    MoveDue: _move_due,
}

assert RULES.keys() == TABLE.keys()
assert set(ENDS_ATTEMPT) > ALIVE
