"""What holds in every world that can be reached."""

from __future__ import annotations

from dataclasses import replace

from bench.exploration.steps import FORGOTTEN, finished
from bench.exploration.world import JOB, WAIT_OF, Broken, World
from holdfast.domain.job import Job, Saved
from holdfast.domain.obligations import action_for
from holdfast.domain.ownership import Ownership
from holdfast.domain.phase import ENDED, Phase
from job_contract.checkpoint_layout import SavePointer

ONE_FLEET = "at most one live fleet a job, survivors counted in"
ATTEMPTS = "attempts and versions only grow"
ORDERS = "changed orders have a higher generation"
OWNED = "every machine has an owner or an open intent"
OURS = "no sweep takes a machine at work for nobody's"
TOKENS = "the token of a waiting state lies where news will find it"
ONE_RESULT = "a job has one result"
OUTLIVED = "no machine outlives its job"
SENTENCE = "every state has a code and a sentence"


def check(before: World, after: World) -> None:
    """Raises Broken with the rule that the step or the world it led to does not keep."""
    if before.row is not after.row:
        _row(before, after)
    _machines(after)
    _tokens(after)
    if after.reported is not None and (after.row.saved is None or after.row.saved.order < _order(after.reported)):
        raise Broken(FORGOTTEN, f"{after.reported.save} was reported, the row has {after.row.saved}")
    if finished(after) and len(after.results) != 1:
        raise Broken(ONE_RESULT, str(sorted(after.results)))


def _row(before: World, after: World) -> None:
    old, new = before.row, after.row
    if new == replace(old, waiting=new.waiting):
        # Why a job waits is written beside the row's versions.
        return
    if not (old.attempt <= new.attempt <= old.attempt + 1 and new.version == old.version + 1):
        raise Broken(ATTEMPTS, f"attempt {old.attempt} -> {new.attempt}, version {old.version} -> {new.version}")
    was, told = before.store.orders.get(JOB), after.store.orders.get(JOB)
    if told is not None and was is not None and told != was and told.generation <= was.generation:
        raise Broken(ORDERS, f"{was.generation} -> {told.generation}")
    if told is not None and (told.attempt, told.action, told.roster_id) != (
        new.attempt,
        action_for(new),
        new.roster_id,
    ):
        raise Broken(ORDERS, f"the row wants {action_for(new)}, the nodes read {told.action}")
    _saves(old, new, after)
    _sentence(new)


def _saves(old: Job, new: Job, world: World) -> None:
    if old.saved and (new.saved is None or new.saved.order < old.saved.order):
        raise Broken(FORGOTTEN, f"{old.saved.save} -> {new.saved and new.saved.save}")
    if new.saved and new.saved.save not in {save.save for save in world.commits}:
        raise Broken(FORGOTTEN, f"{new.saved.save} was never committed")


def _sentence(job: Job) -> None:
    """The phase and, where it has ended badly or waits, the class are the code; stage or reason are the sentence."""
    if not (job.stage or job.reason):
        raise Broken(SENTENCE, f"{job.phase} has neither stage nor reason")
    if job.phase is Phase.FAILED and not (job.failure and job.reason):
        raise Broken(SENTENCE, f"failed without a class or a reason: {job.failure}, {job.reason!r}")
    if job.phase in ENDED and job.over and not job.reason:
        raise Broken(SENTENCE, f"{job.phase} without a reason")


def _machines(world: World) -> None:
    job = world.row
    live = world.live
    if len(live) > job.nodes:
        raise Broken(ONE_FLEET, f"{len(live)} live machines of a job of {job.nodes}")
    running = any(execution.status == "RUNNING" for execution in world.executions.values())
    if job.over and live and not (world.messages or world.flights or running):
        raise Broken(OUTLIVED, f"{job.phase}, and {', '.join(live)} at work")
    for instance in live:
        if instance in world.store.owners:
            continue
        intent = world.store.intents.get(world.fleets.instances[instance].fleet or "")
        if intent is None or intent.closed_at is not None:
            raise Broken(OWNED, instance)
    for instance in world.store.suspects:
        node = world.store.owners.get(instance)
        if node is None or node.state is not Ownership.MEMBER or not world.alive(instance):
            continue
        # A survivor may have been seen past its time before the next attempt took it: its fleet is not the tagged one.
        bought_for_this = node.attempt == job.attempt and node.fleet == world.fleets.instances[instance].fleet
        if job.attempt_open and bought_for_this:
            raise Broken(OURS, instance)


def _tokens(world: World) -> None:
    for attempt, execution in world.executions.items():
        if not (execution.state in WAIT_OF and execution.asked):
            continue
        if any(flight.origin == ("execution", attempt, execution.state) for flight in world.flights):
            continue
        item = world.store.wait_items.get((JOB, WAIT_OF[execution.state]))
        if item is None or item.token != execution.token(attempt):
            raise Broken(TOKENS, f"{execution.token(attempt)}: {item and item.token}")


def _order(pointer: SavePointer) -> tuple[int, int, int]:
    return Saved(save=pointer.save, manifest_sha256="", at=0.0).order
