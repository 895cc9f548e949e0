"""Eight ways to build the supervisor wrongly; each must be found. They were mistakes of drafts, or of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from bench.exploration import world as world_module
from bench.exploration.invariants import ONE_FLEET, ORDERS, OURS, TOKENS
from bench.exploration.steps import FORGOTTEN
from bench.exploration.world import NEWS, Budgets, World, newest
from holdfast.application import record as record_module
from holdfast.application import survivors
from holdfast.application.ports import Outbox, Ports
from holdfast.application.sweep import Finding, Sweep
from holdfast.domain.errors import Raced
from holdfast.domain.events import Event
from holdfast.domain.job import Job
from holdfast.domain.obligations import projection
from holdfast.domain.ownership import Ownership, suspect
from holdfast.domain.phase import WAITING, Intent
from holdfast.domain.queueing import Waiter
from job_contract.checkpoint_layout import Head
from tests.application.fakes import FakeStore


@dataclass(frozen=True)
class Fault:
    """What is patched in place of what, how much must go wrong for it to show, and the rule that it breaks.

    `at_once`: how many functions must be at work for it to show. `also` is patched too, where a second guard would
    catch the mistake.
    """

    name: str
    owner: Any
    attribute: str
    wrong: Any
    budgets: Budgets
    breaks: str
    at_once: int = 1
    also: tuple[tuple[Any, str, Any], ...] = ()

    @contextmanager
    def injected(self) -> Iterator[None]:
        patches = [(self.owner, self.attribute, self.wrong), *self.also]
        kept = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in patches]
        for owner, attribute, wrong in patches:
            setattr(owner, attribute, wrong)
        try:
            yield
        finally:
            for owner, attribute, right in kept:
                setattr(owner, attribute, right)


def _token_in_the_row(save: Callable[..., None]) -> Callable[..., None]:
    def wrong(store: FakeStore, *args: Any) -> None:
        save(store, *args)
        # The whole row is put, and `Job` knows of no token.
        store.wait_items.clear()

    return wrong


def _dispatch_before_close(job: Job) -> bool:
    return job.phase in WAITING and job.intent is Intent.RUN


def _waiter_of_a_closed_attempt(of: Callable[[Job], Waiter]) -> Any:
    return staticmethod(lambda job: replace(of(job), attempt_open=False))


def _counter_generation(advance: Callable[[Job, Event], Job]) -> Callable[[Job, Event], Job]:
    """The generation counts the orders of an attempt instead of being the row's version."""

    def wrong(job: Job, event: Event) -> Job:
        after = advance(job, event)
        if projection(after) == projection(job):
            return after
        return replace(after, generation=job.generation + 1 if after.attempt == job.attempt else 1)

    return wrong


def _claims_before_ec2(sweep: Sweep, stuck: frozenset[str]) -> list[Finding]:
    owners = {node.instance: node for node in sweep.ports.store.all_owners()}  # type: ignore[attr-defined]
    now = sweep.ports.clock()
    for instance in sweep.ports.fleets.of_stack():
        intent = sweep.ports.store.intent(instance.fleet) if instance.fleet else None
        if suspect(instance, owners.get(instance.id), intent, now) and sweep.ports.store.suspected(instance.id, now):
            sweep.ports.fleets.terminate([instance.id])
    return []


def _news_from_the_phase(before: Job | None, after: Job, *, bucket: str, outbox: Outbox) -> bool:
    if before is not None and before.phase is after.phase:
        return False
    outbox.publish(f"{after.id}#{after.phase}", "", {})
    if after.over:
        outbox.result(after.id, after.id, {})
    return True


def _resume_by_listing(take_over: Callable[..., Head]) -> Callable[..., Head]:
    def wrong(world: World, *args: Any) -> Head:
        head, last = take_over(world, *args), newest(world.listed)
        return replace(head, save=last.save, manifest_sha256=last.manifest_sha256) if last else head

    return wrong


def _ignored_conflict(save: Callable[..., None]) -> Callable[..., None]:
    def wrong(world: World, *args: Any) -> None:
        try:
            save(world, *args)
        except Raced:
            return

    return wrong


def _held_fenced_by_attempt(job: Job, fleet: str, ports: Ports) -> tuple[list[str], list[str]]:
    ours = {
        node.instance
        for node in ports.store.nodes(job.held)
        if node.attempt == job.attempt and node.state is not Ownership.ENDING
    }
    return sorted(found.id for found in ports.fleets.described(job.held) if found.live and found.id in ours), []


FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("token in the row", FakeStore, "save", _token_in_the_row(FakeStore.save), Budgets(), TOKENS),
        Fault(
            "dispatch before close", Job, "dispatchable", property(_dispatch_before_close),
            Budgets(interruptions=1), ONE_FLEET, also=((Waiter, "of", _waiter_of_a_closed_attempt(Waiter.of)),),
        ),
        Fault(
            "counter generation", record_module, "advance", _counter_generation(record_module.advance),
            Budgets(interruptions=1), ORDERS,
        ),
        Fault("claims read before EC2", Sweep, "_orphans", _claims_before_ec2, Budgets(sweeps=1), OURS, 2),
        Fault("news from the phase", world_module, "publish", _news_from_the_phase, Budgets(interruptions=1), NEWS),
        Fault(
            "resume by listing", World, "take_over", _resume_by_listing(World.take_over),
            Budgets(interruptions=1), FORGOTTEN,
        ),
        Fault("ignored conflict", World, "_save", _ignored_conflict(World._save), Budgets(), FORGOTTEN, 2),
        Fault(
            "held node fenced by attempt", survivors, "_still_there", _held_fenced_by_attempt,
            Budgets(interruptions=1), ONE_FLEET,
        ),
    )
}  # fmt: skip

# No port lists all owners, for this reason; the fault needs one that does.
FakeStore.all_owners = lambda store: list(store.owners.values())  # type: ignore[attr-defined]
