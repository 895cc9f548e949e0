"""What can happen next in a world, and the world after it.

One step is one call of a port, one step of an execution or of the ranks, or one thing that goes wrong. Deadlines are
steps: those of AWS (the end of a notice) may come at any time, those of the run machine once nothing else is left to
do, and early as long as the budget has some.

A reduced search takes some steps at once, while one function is at work at a time. It is then the only one that writes
to the table, and no step of AWS, the ranks or the deadlines reads there anything but the orders, the rosters and who
has checked in:

* A call that reads the table, or writes what only functions read, commutes with every step that may come in between,
  so it is made with the call before it. A save is such a write while it changes neither the orders nor the phase. So
  are looks at EC2 while no machine can die, a purchase (it only makes more possible), and taking the head over from
  ranks that are done.
* A function begins with its first other call: until then it has only read what nobody else changes, so it might as
  well have begun later.
* A state of the run machine that leaves a token does so at once. Whoever is second, it or the save that answers it,
  sees the other, and both orders lead to the same world.
* A message that can change nothing any more is dropped, see `void`. Delivered, it might repeat what a function owes
  that died; but so does what called that function, and the world is then the same.

A function may still die after each single call that writes: these are steps of their own ("death"). The rules are
asked after each call that writes, also within a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from bench.exploration.activity import Activities, Activity, Call, quiet
from bench.exploration.world import (
    JOB,
    PREFIX,
    WAIT_OF,
    Broken,
    Execution,
    Gang,
    InFlight,
    Message,
    World,
    a_save,
    newest,
    next_state,
)
from holdfast.application.control import obey
from holdfast.application.dispatch import dispatch
from holdfast.application.launch import Launch
from holdfast.application.node_reports import NodeReports
from holdfast.application.notices import interrupted, lost
from holdfast.application.release import close_attempt, end_dead_attempt, release_fleet
from holdfast.application.sweep import START_GRACE_S, Sweep
from holdfast.application.waiting import leave_token
from holdfast.domain.errors import Rejected, Unavailable
from holdfast.domain.ownership import Ownership
from holdfast.domain.phase import Phase
from holdfast.domain.placement import candidates
from holdfast.messages.control_request import Cancel
from job_contract import reports
from job_contract.checkpoint_layout import SavePointer
from job_contract.orders import Action, Orders, Wait, WaitItem
from tests.builders import NOW

CANDIDATES = candidates(instance_types=["c7i.large"], market="spot", zones=(), nodes=2)
A_WHILE_S = 700
"""Longer than every grace and every hold."""

Label = tuple[Any, ...]
Judge = Callable[[World, World], None]


def _launch(ports: Any, attempt: int) -> str:
    answer = Launch(ports).run(JOB, attempt, candidates=CANDIDATES, prefix=PREFIX, time_left_s=1e9)
    return str(answer["outcome"])


def _leave(ports: Any, attempt: int, wait: str, token: str, again: bool) -> None:
    leave_token(WaitItem(job=JOB, attempt=attempt, wait=Wait(wait), token=token), ports, after_silence=again)


def _cancel(ports: Any) -> None:
    obey(Cancel.model_construct(schema_="holdfast.control/1", job=JOB, action="cancel", dedup_id="1"), ports)


DOORS: dict[str, Callable[..., Any]] = {
    "launch": _launch,
    "leave": _leave,
    "release": lambda ports, attempt: release_fleet(JOB, attempt, ports) and None,
    "close": lambda ports, attempt: close_attempt(JOB, attempt, ports) and None,
    "report": lambda ports, report: NodeReports(ports).take(report),
    "warned": lambda ports, instance: interrupted(instance, ports, deadline_at=NOW + 120) and None,
    "gone": lambda ports, instance: lost(instance, ports) and None,
    "aborted": lambda ports, attempt: end_dead_attempt(JOB, attempt, ports, cause="execution aborted"),
    "cancel": _cancel,
    "dispatch": lambda ports: dispatch(ports) and None,
    "sweep": lambda ports: Sweep(ports).run() and None,
}
"""The functions: each is called with ports and what came with its event."""

NEVER_LOST = frozenset({"cancel"})

READS = frozenset(
    {
        *("load", "load_all", "load_for", "ledger", "quotas", "teams", "line", "waiting", "alive", "intent", "node"),
        *("nodes", "roster", "waits", "cold", "patience", "left_notices", "quarantined", "request", "saves"),
    }
)
"""Calls that only read what functions alone write."""

LOOKS = frozenset({"described", "of_job", "of_fleet", "of_stack", "status"})
"""Calls that only read what AWS and the deadlines write."""

CALLS = frozenset({"call", "refuse", "deliver", "again", "execution", "tick", "sweep"})
"""Steps in which a function makes calls."""

COMMUTE = frozenset({"ready", "watch", "checkpoint"})
"""States that leave a token. Whoever is second, this or the save that answers it, sees the other: both orders lead to
the same world."""

PRIVATE = frozenset(
    {
        *("put_wait", "drop_wait", "put_roster", "open_intent", "close_intent", "own", "update_node", "hold", "adopt"),
        *("mark_ending", "suspected", "leave_notice", "explain", "expire", "put_ledger"),
    }
)
"""Calls that write what functions alone read."""


class Steps:
    """Steps of one exploration; the activities they go through are remembered between worlds."""

    def __init__(self, at_once: int = 2, *, reduced: bool = False, judge: Judge = lambda before, after: None) -> None:
        self.activities, self.at_once = Activities(DOORS), at_once
        self.reduced, self.judge = reduced, judge
        self.judged: World
        self.dies_after: int | None = None
        self.changes = 0

    # -- what can happen -------------------------------------------------------------------------------------------

    def enabled(self, world: World) -> Iterator[Label]:
        """Yield everything that can happen next; where one thing commutes with all others, that one alone."""
        for label in self._alive(world):
            yield label
            if self.reduced and world.budgets.crashes and label[0] in CALLS:
                yield from self._deaths(world, label)

    def _alive(self, world: World) -> Iterator[Label]:
        if self.reduced and self.at_once == 1 and not world.flights:
            for attempt, execution in world.executions.items():
                if execution.status == "RUNNING" and execution.state in COMMUTE and not execution.asked:
                    yield ("execution", attempt)
                    return
        work = list(self._work(world))
        yield from work
        yield from self._wrong(world, bool(work))
        if not work and not finished(world):
            yield from self._idle(world)

    def _work(self, world: World) -> Iterator[Label]:
        """What happens by itself, if nothing comes before it."""
        for number, flight in enumerate(world.flights):
            yield ("call", number)
            call = flight.activity.call
            if call and call.method == "buy" and world.budgets.refusals:
                yield ("refuse", number)
        room = len(world.flights) < self.at_once
        for message in dict.fromkeys(world.messages if room else ()):
            yield ("deliver", message)
        for attempt, execution in world.executions.items() if room else ():
            if execution.status == "RUNNING" and not (execution.asked or execution.resting or _busy(world, attempt)):
                yield ("execution", attempt)
        for instance in sorted(world.noticed):
            if world.alive(instance):
                yield ("die", instance)
        for instance in sorted(world.fleets.hidden):
            yield ("show", instance)
        for instance in world.live:
            if self._checks_in(world, instance):
                yield ("ready", instance)
        for step in _gang_steps(world):
            yield ("gang", step)

    def _wrong(self, world: World, busy: bool) -> Iterator[Label]:
        budgets = world.budgets
        if budgets.crashes:
            yield from (("crash", number) for number in range(len(world.flights)))
        for message in dict.fromkeys(world.messages):
            if budgets.lost and message[0] not in NEVER_LOST:
                yield ("lose", message)
            if budgets.duplicated and len(world.flights) < self.at_once:
                yield ("again", message)
        if budgets.cancels and not world.row.over:
            yield ("cancel",)
        if budgets.interruptions and not finished(world):
            # The nodes of a fleet are alike until they are told apart by a notice: the first takes one of them.
            fresh = [instance for instance in world.live if instance not in world.noticed]
            yield from (("notice", instance) for instance in fresh)
        if budgets.sweeps and busy and len(world.flights) < self.at_once:
            yield ("sweep", "early")
        if budgets.timeouts and busy:
            yield from (("timeout", attempt, "early") for attempt in _waiting(world))
        if budgets.aborts:
            yield from (("abort", attempt) for attempt, one in world.executions.items() if one.status == "RUNNING")

    def _idle(self, world: World) -> Iterator[Label]:
        """What happens only once nothing else is left to do: first what is tried every few seconds, then a sweep, and
        when that has found nothing, the long deadlines.
        """
        if world.row.dispatchable and world.row.not_before <= world.clock():
            yield ("tick",)
        elif world.swept < 2:
            yield ("sweep",)
        else:
            yield from (("execution", attempt) for attempt, one in world.executions.items() if one.resting)
            yield from (("timeout", attempt) for attempt in _waiting(world))
            if _waits_for_time(world):
                yield ("later",)

    def _checks_in(self, world: World, instance: str) -> bool:
        """A node says that it is ready until its orders name it; again only where that can change anything."""
        orders = world.store.orders.get(JOB)
        if orders is None or orders.action is not Action.WAIT or orders.roster_id is not None:
            return False
        if orders.attempt <= (world.gang.attempt if instance in world.gang.nodes else 0):
            return False
        if world.said.get(instance, 0) < orders.attempt:
            return True
        if any(told[0] == "report" for told in (*world.messages, *(flight.origin for flight in world.flights))):
            return False
        return world.row.phase is Phase.LAUNCHING and not world.row.roster_id and _unheard(world, instance)

    # -- what it changes -------------------------------------------------------------------------------------------

    def after(self, world: World, label: Label) -> World:
        """The world after the step. Raises Broken when a step shows that an invariant does not hold.

        `judged` is then the last world on the way that the rules were asked about.
        """
        self.judged = world
        world = world.copy()
        if not (label[0] == "call" and world.flights[label[1]].origin == ("sweep",)):
            world.swept = 0
        getattr(self, f"_do_{label[0]}")(world, *label[1:])
        if self.reduced:
            self._drop_void(world)
        return world

    def _do_call(self, world: World, number: int) -> None:
        flight = world.flights[number]
        left = world.flights[:number] + world.flights[number + 1 :]
        self._call(world, left, flight)

    def _do_refuse(self, world: World, number: int) -> None:
        world.spend("refusals")
        world.fleets.short = 0
        self._do_call(world, number)
        world.fleets.short = None

    def _begin(self, world: World, origin: Message, *spec: Any) -> None:
        activity = self.activities.begin(spec, world.clock())  # type: ignore[arg-type]
        self._call(world, world.flights, InFlight(activity, origin), begins=self.reduced and self.at_once == 1)

    def _call(self, world: World, others: tuple[InFlight, ...], flight: InFlight, *, begins: bool = False) -> None:
        following = self._run(world, others, flight, begins)
        if self.dies_after is not None:
            world.fly((*others, InFlight(following, flight.origin)))
        elif following.call is None:
            self._over(world, flight.origin, following.result, following.fault)
        else:
            world.fly((*others, InFlight(following, flight.origin)))

    def _run(self, world: World, others: tuple[InFlight, ...], flight: InFlight, begins: bool) -> Activity:
        """The activity at its next stop, or where it dies; `changes` then says how many calls changed something.

        One that begins stops for the first time after its first call that is no private one.
        """
        call = flight.activity.call
        if call is None:
            raise Broken("every function makes a call", str(flight.activity.spec))
        world.flights = others
        following, self.changes = flight.activity, 0
        free = True
        while following.call is not None:
            call = following.call
            private = self.reduced and self._private(world, call)
            if not (private or quiet(following) or free):
                break
            writes = call.method not in READS and call.method not in LOOKS
            if writes and self.changes == self.dies_after:
                break
            free = free and begins and (private or quiet(following))
            if self.reduced and self.changes and writes:
                seen = world.copy()
                seen.flights = (*others, flight)
                self.judge(self.judged, seen)
                self.judged = seen
            following = self._answered(world, following, call)
            self.changes += writes
        return following

    def _private(self, world: World, call: Call) -> bool:
        """True when nothing else that can happen depends on when this call is made; see the module's text."""
        if self.at_once > 1:
            return False
        if call.method in READS or call.method in PRIVATE:
            return True
        budgets = world.budgets
        if call.method == "save":
            before, after = call.args[:2]
            return bool(
                after.version == world.row.version + 1
                and (before.generation, before.over, before.phase, before.roster_id)
                == (after.generation, after.over, after.phase, after.roster_id)
            )
        if call.method in LOOKS:
            nobody_dies = not (budgets.interruptions or world.fleets.hidden or any(map(world.alive, world.noticed)))
            return nobody_dies and not (budgets.timeouts or budgets.aborts)
        if call.method == "buy":
            return not budgets.refusals and not world.fleets.hidden
        if call.method == "take_over":
            return world.gang.over
        return call.port == "workflow" and not (budgets.timeouts or budgets.aborts)

    def _deaths(self, world: World, label: Label) -> Iterator[Label]:
        """The moments at which a function may die within this step of its own, after it has changed something."""
        judge, self.judge = self.judge, lambda before, after: None
        try:
            tried = self.after(world, label)
        finally:
            self.judge = judge
        over = len(tried.flights) < len(world.flights) + (label[0] not in ("call", "refuse"))
        yield from (("death", label, done) for done in range(1, self.changes + over))

    def _do_death(self, world: World, label: Label, done: int) -> None:
        before = {id(flight) for flight in world.flights}
        self.dies_after = done
        try:
            getattr(self, f"_do_{label[0]}")(world, *label[1:])
        finally:
            self.dies_after = None
        number = next(number for number, flight in enumerate(world.flights) if id(flight) not in before)
        self._do_crash(world, number)

    def _drop_void(self, world: World) -> None:
        left = tuple(message for message in world.messages if not void(world, message))
        if len(left) < len(world.messages):
            world.messages = left

    def _answered(self, world: World, activity: Activity, call: Call) -> Activity:
        """The activity after the answer to its call."""
        try:
            answer = world.answer(call.port, call.method, call.args, call.kwargs)
        except Broken:
            raise
        except Exception as fault:  # noqa: BLE001 whatever a port raises is the activity's to handle
            answer = fault
        return self.activities.go_on(activity, answer, world.clock())

    def _over(self, world: World, origin: Message, result: Any, fault: Exception | None) -> None:
        if fault is not None and not isinstance(fault, (Unavailable, Rejected)):
            raise Broken("no order of events makes a function fail", f"{origin}: {fault!r}")
        if origin[0] == "execution":
            attempt, state = origin[1], origin[2]
            execution = world.executions[attempt]
            if execution.state != state or execution.status != "RUNNING" or state in WAIT_OF:
                return
            if fault is not None:
                world.executions[attempt] = replace(execution, resting=True)
            elif state == "close":
                world.executions[attempt] = Execution("ended", status="SUCCEEDED")
            else:
                world.executions[attempt] = next_state(execution, result or "done")
        elif origin[0] == "sweep":
            world.swept = 2 if world.swept else 0
        elif origin[0] == "report" and fault is None and isinstance(origin[1], reports.CheckpointSaved):
            report = origin[1]
            told = [SavePointer(save=report.save, manifest_sha256=report.manifest_sha256)]
            world.reported = newest([*told, world.reported] if world.reported else told)

    def _do_deliver(self, world: World, message: Message) -> None:
        world.take(message)
        self._begin(world, message, *message)

    def _do_again(self, world: World, message: Message) -> None:
        world.spend("duplicated")
        self._begin(world, message, *message)

    def _do_lose(self, world: World, message: Message) -> None:
        world.spend("lost")
        world.take(message)

    def _do_execution(self, world: World, attempt: int) -> None:
        execution = world.executions[attempt]
        origin = ("execution", attempt, execution.state)
        if execution.state in WAIT_OF:
            execution = world.executions[attempt] = replace(execution, tries=execution.tries + 1, asked=True)
            wait, again = WAIT_OF[execution.state].value, execution.state == "again"
            self._begin(world, origin, "leave", attempt, wait, execution.token(attempt), again)
        else:
            world.executions[attempt] = replace(execution, resting=False)
            self._begin(world, origin, execution.state, attempt)

    def _do_crash(self, world: World, number: int) -> None:
        """The function dies; what called it calls again."""
        world.spend("crashes")
        flight = world.flights[number]
        world.flights = world.flights[:number] + world.flights[number + 1 :]
        origin = flight.origin
        if origin[0] == "execution":
            execution = world.executions[origin[1]]
            if execution.state == origin[2] and execution.state in WAIT_OF:
                # Tried again under a token of its own; this one is dead.
                world.executions[origin[1]] = replace(execution, asked=False)
        elif origin[0] not in ("sweep", "tick"):
            world.send(*origin)

    def _do_timeout(self, world: World, attempt: int, early: str = "") -> None:
        if early:
            world.spend("timeouts")
        execution = world.executions[attempt]
        world.executions[attempt] = Execution("again" if execution.state == "watch" else "release")

    def _do_abort(self, world: World, attempt: int) -> None:
        """Somebody stops the execution; its functions that are at work go on."""
        world.spend("aborts")
        world.executions[attempt] = Execution("ended", status="ABORTED")
        world.send("aborted", attempt)

    def _do_sweep(self, world: World, early: str = "") -> None:
        if early:
            world.spend("sweeps")
        world.swept = 1
        self._begin(world, ("sweep",), "sweep")

    def _do_tick(self, world: World) -> None:
        self._begin(world, ("tick",), "dispatch")

    def _do_later(self, world: World) -> None:
        world.clock.step(A_WHILE_S)

    def _do_cancel(self, world: World) -> None:
        world.spend("cancels")
        world.send("cancel")

    # -- machines --------------------------------------------------------------------------------------------------

    def _do_notice(self, world: World, instance: str) -> None:
        world.spend("interruptions")
        world.noticed |= {instance}
        world.send("warned", instance)

    def _do_die(self, world: World, instance: str) -> None:
        world.fleets.kill(instance)
        world.noticed -= {instance}
        world.send("gone", instance)

    def _do_show(self, world: World, instance: str) -> None:
        world.fleets.hidden = world.fleets.hidden - {instance}

    def _do_ready(self, world: World, instance: str) -> None:
        attempt = world.store.orders[JOB].attempt
        world.said[instance] = attempt
        self._report(
            world, reports.Ready, instance, attempt,
            ip="127.0.0.1", port=4000, interface="lo", instance_type="c7i.large", zone="us-east-1a",
        )  # fmt: skip

    def _report(self, world: World, kind: type[reports.Report], instance: str, attempt: int, **told: Any) -> None:
        world.send("report", kind(job=JOB, attempt=attempt, instance=instance, at=NOW, **told))

    # -- ranks -----------------------------------------------------------------------------------------------------

    def _do_gang(self, world: World, step: str) -> None:
        gang = world.gang
        orders = world.store.orders[JOB]
        speaker = next((node for node in gang.nodes if world.alive(node)), "")
        say: Callable[..., None] = lambda kind, **told: self._report(world, kind, speaker, gang.attempt, **told)  # noqa: E731
        if step == "join":
            self._join(world, orders)
        elif step == "hear":
            world.gang = replace(gang, stop=orders.generation)
            say(reports.Heard, generation=orders.generation, action=orders.action.value)
        elif step == "train":
            world.gang = replace(gang, step=gang.step + 1, started=True)
            if not gang.started:
                say(reports.Started, step=gang.step + 1, world_size=len(gang.nodes))
        elif step == "upload":
            save = a_save(gang.step, gang.attempt, gang.numbered + 1)
            world.gang = replace(gang, uploaded=save.save, numbered=gang.numbered + 1)
            world.listed = (*world.listed, save)
        elif step == "commit":
            self._commit(world, say)
        elif step == "answer":
            world.gang = replace(gang, over=True)
            if gang.saved is None:
                say(reports.Failed, failure="preemption", reason="nothing to save")
            else:
                say(reports.CheckpointSaved, save=gang.saved.save, manifest_sha256=gang.saved.manifest_sha256,
                    step=gang.saved.step, final=True, answers_generation=gang.stop, existing=True)  # fmt: skip
        elif step == "finish":
            assert gang.saved is not None
            world.gang = replace(gang, over=True)
            say(reports.Finished, step=gang.step, loss=1.0, save=gang.saved.save)
        elif step == "break":
            world.gang = replace(gang, over=True)
            say(reports.Failed, failure="peer_lost", reason="a peer is gone")
        elif step == "leave":
            world.gang = replace(gang, over=True)

    def _join(self, world: World, orders: Orders) -> None:
        roster = world.store.rosters[str(orders.roster_id)]
        start = orders.resume_from.pointer if orders.resume_from else None
        if start is not None and start not in world.commits:
            raise Broken(FORGOTTEN, f"attempt {orders.attempt} starts from {start.save}, which was never committed")
        if start != (world.commits[-1] if world.commits else None):
            raise Broken(FORGOTTEN, f"attempt {orders.attempt} starts from {start and start.save}")
        for node in roster.nodes:
            if world.said.get(node.instance) != orders.attempt:
                raise Broken("ranks start only when every node has checked in for this attempt", node.instance)
        stop = orders.generation if orders.action is Action.CHECKPOINT_STOP else 0
        world.gang = Gang(
            attempt=orders.attempt,
            nodes=tuple(node.instance for node in roster.nodes),
            step=start.step if start else 0,
            saved=start,
            stop=stop,
            over=False,
        )

    def _commit(self, world: World, say: Callable[..., None]) -> None:
        gang, head = world.gang, world.head
        assert head is not None
        pointer = next(save for save in world.listed if save.save == gang.uploaded)
        if head.attempt != gang.attempt:
            world.gang = replace(gang, over=True)
            say(reports.Failed, failure="fenced", reason="a later attempt has the head")
            return
        world.head = replace(
            head, step=pointer.step, save=pointer.save, manifest_sha256=pointer.manifest_sha256, parent=head.pointer
        )
        world.commits = (*world.commits, pointer)
        answers = gang.stop > 0
        world.gang = replace(gang, saved=pointer, uploaded=None, over=answers)
        say(reports.CheckpointSaved, save=pointer.save, manifest_sha256=pointer.manifest_sha256, step=pointer.step,
            final=answers, answers_generation=gang.stop)  # fmt: skip


FORGOTTEN = "no committed checkpoint is forgotten"


def finished(world: World) -> bool:
    """True when nothing is left: the job is over, its machines and executions ended, everything told."""
    if world.messages or world.flights or not world.row.over:
        return False
    running = any(execution.status == "RUNNING" for execution in world.executions.values())
    return not (running or world.live)


def void(world: World, message: Message) -> bool:
    """True when the message cannot change anything any more: it is about an attempt that is closed."""
    job, owners = world.row, world.store.owners
    if message[0] == "report":
        report = message[1]
        node = owners.get(report.instance)
        if node is None:
            return False
        if isinstance(report, reports.Ready):
            return report.attempt < node.attempt or node.state is not Ownership.MEMBER
        if report.attempt > job.attempt or (report.attempt == job.attempt and job.attempt_open):
            return False
        if isinstance(report, reports.CheckpointSaved):
            saved = SavePointer(save=report.save, manifest_sha256=report.manifest_sha256)
            return job.saved is not None and newest([saved, job.saved]) is job.saved
        return True
    if message[0] in ("warned", "gone"):
        node = owners.get(message[1])
        if node is None or node.state is Ownership.HELD:
            return False
        if message[0] == "gone" and node.state is Ownership.ENDING:
            return True
        return node.attempt < job.attempt or (node.attempt == job.attempt and not job.attempt_open)
    return False


def _waiting(world: World) -> list[int]:
    return [attempt for attempt, one in world.executions.items() if one.state in WAIT_OF and one.asked]


def _unheard(world: World, instance: str) -> bool:
    node = world.store.owners.get(instance)
    intent = world.store.intents.get(node.fleet) if node else None
    if node is None or intent is None or not intent.instances or node.attempt != world.row.attempt:
        return False
    gang = [world.store.owners.get(member) for member in intent.instances]
    return node.state is Ownership.MEMBER and (node.ready is None or all(member and member.ready for member in gang))


def _waits_for_time(world: World) -> bool:
    """True while something is held back by the clock alone."""
    job, now = world.row, world.clock()
    if (job.dispatchable and job.not_before > now) or (job.held and (job.held_until or 0) >= now):
        return True
    execution = world.executions.get(job.attempt)
    if job.attempt_open and execution is None and now - job.phase_at < START_GRACE_S:
        return True
    to_be_ended = execution is not None and (execution.resting or execution.status != "RUNNING")
    if (to_be_ended or job.over) and any(intent.may_still_show(now) for intent in world.store.intents.values()):
        return True
    owners = (world.store.owners.get(instance) for instance in world.live)
    return any(
        node and node.state is not Ownership.MEMBER and max(node.since_at, node.until or 0.0) >= now for node in owners
    )


def _busy(world: World, attempt: int) -> bool:
    """A function of this state of the execution is at work."""
    state = world.executions[attempt].state
    return any(flight.origin == ("execution", attempt, state) for flight in world.flights)


def _gang_steps(world: World) -> Iterator[str]:
    orders = world.store.orders.get(JOB)
    if orders is None:
        return
    gang = world.gang
    if gang.attempt < orders.attempt:
        yield from _newer(world, orders)
        return
    if gang.over:
        return
    alive = [node for node in gang.nodes if world.alive(node)]
    if orders.action is Action.RELEASE and alive:
        yield "leave"
    if gang.uploaded and alive:
        # The parts of a node that is gone are in already: who is left commits.
        yield "commit"
    if len(alive) < len(gang.nodes):
        if alive:
            yield "break"
        return
    if orders.action is Action.CHECKPOINT_STOP and gang.stop == 0:
        yield "hear"
    if gang.uploaded is None:
        yield _progress(gang, world.steps)


def _newer(world: World, orders: Orders) -> Iterator[str]:
    """The nodes of a new roster join when all of them are there; until then an older gang goes on with its commit."""
    roster = world.store.rosters.get(str(orders.roster_id))
    if roster is not None and orders.action in (Action.RUN, Action.CHECKPOINT_STOP):
        if all(world.alive(node.instance) for node in roster.nodes):
            yield "join"
        return
    if not world.gang.over and any(world.alive(node) for node in world.gang.nodes):
        yield "commit" if world.gang.uploaded else "leave"


def _progress(gang: Gang, steps: int) -> str:
    at_last_save = gang.saved is not None and gang.saved.step == gang.step
    if gang.stop:
        return "answer" if at_last_save or not gang.started else "upload"
    if gang.step < steps and (at_last_save or not gang.started):
        return "train"
    return "finish" if at_last_save else "upload"
