"""The node's state machine: waiting -> running -> draining -> uploading -> waiting, and stopped when it is released.

Orders are level-triggered: what counts is the newest item, and an order acts once, when its (attempt, generation) is
first seen. All decisions are made in `tick`, in the main thread; the threads around it only poll, send and copy.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from agent.attempt import NOTHING_TO_SAVE, Attempt, State, Tools
from agent.fitness import unfit
from agent.heartbeat import Heartbeat
from agent.host import disk_free_bytes, memory_free_bytes
from agent.identity import Identity
from agent.imds import Notice
from agent.logs import Follower, TailShipper
from agent.notices import NoticePoller, WarningPoller
from agent.orders import OrdersPoller, Seen
from agent.port import HeldPort
from agent.records import keep_newest, keep_records
from agent.reports import Reporter
from agent.secrets import SecretUnavailable
from agent.threads import Loop, guarded
from job_contract.node_files import ControlKind
from job_contract.orders import Action, Orders
from job_contract.reports import CheckpointSaved, Failed, Heard, NoticeSeen, Ready, Report, Unfit

CONTROLS = {
    Action.CHECKPOINT: ControlKind.CHECKPOINT,
    Action.CHECKPOINT_STOP: ControlKind.CHECKPOINT_STOP,
    Action.STOP: ControlKind.STOP,
}


class Agent:
    """`attempt` is the newest one that this node has had a part in, kept when it is over."""

    def __init__(
        self,
        identity: Identity,
        tools: Tools,
        *,
        orders: OrdersPoller,
        notices: NoticePoller,
        heartbeat: Heartbeat,
        reporter: Reporter,
        warnings: WarningPoller | None = None,
        logs: TailShipper | None = None,
        follower: Follower | None = None,
    ) -> None:
        self.identity, self.tools = identity, tools
        self.orders, self.notices, self.heartbeat, self.reporter = orders, notices, heartbeat, reporter
        self.warnings, self.logs = warnings, logs
        self._follower = follower
        self._following = Loop("follow", self._follow, tools.journal)
        self.attempt: Attempt | None = None
        self.stopping = False
        self._heard = (0, 0)
        self._level: Orders | None = None
        self._notice: Notice | None = None
        self._warned: set[tuple[int, Notice]] = set()
        self._port = HeldPort(identity.ip)
        self._born_at = tools.clock()
        self._next_ready_at = 0.0
        self._ready_pause_s = tools.pace.ready_s
        self._faults = 0
        self._unfit: str | None = None
        self._looked_after = self._shipped = 0
        self._curve_of = (0, 0)
        self._room: dict[str, float | None] = {}

    def run(self) -> int:
        """Return the exit code once the node has been released or `stopping` was set; nothing of it runs any more."""
        loops = [self.orders.loop, self.notices.loop, self.heartbeat.loop, self.reporter.loop]
        loops += [self.warnings.loop] if self.warnings else []
        loops += [self.logs.loop] if self.logs else []
        loops += [self._following] if self._follower else []
        for loop in loops:
            loop.start()
        while not self.stopping:
            time.sleep(guarded(self._round, self.tools.journal, "agent", self.tools.pace.tick_s))
        if self.attempt:
            self.attempt.leave()
            self._ship_logs()
        self.reporter.flush(within_s=self.tools.pace.flush_s)
        if self.logs:
            self.logs.flush(within_s=self.tools.pace.flush_s)
        for loop in loops:
            loop.close()
        self.tools.journal.note("agent_stopped")
        return 0

    def _round(self) -> float:
        self._faults += 1
        if self._faults > self.tools.pace.faults_in_a_row:
            reason = f"the agent itself failed {self.tools.pace.faults_in_a_row} times in a row; see its journal"
            self._say(Failed, attempt=self._ran or self._heard[0], failure="crash", reason=reason)
            self.stopping = True
            return self.tools.pace.tick_s
        self.tick()
        self._faults = 0
        return self.tools.pace.tick_s

    def tick(self) -> None:
        """One look at notice, orders and attempt. A notice first: its checkpoint must not wait for the network."""
        self._look_for_notice()
        self._look_for_warnings()
        seen = self.orders.latest()
        if seen and seen.order > self._heard:
            self._obey(seen)
        if self.attempt:
            self.attempt.tick()
        self._ship_curve()
        self._beat_while_busy()
        if not self._busy:
            self._ship_logs()
            self._look_whether_fit()
            self._wait()

    def orders_interval_s(self) -> float:
        """Seconds until the next look at the orders; any thread may ask."""
        pace, attempt = self.tools.pace, self.attempt
        if attempt is None or attempt.state is not State.RUNNING:
            return pace.orders_idle_s
        if attempt.node_rank == 0:
            return pace.orders_leader_s
        return pace.orders_other_s * random.uniform(*pace.jitter)

    @property
    def state(self) -> str:
        """waiting, running, draining, uploading or stopped."""
        if self.stopping:
            return "stopped"
        return self.attempt.state.value if self._busy and self.attempt else "waiting"

    @property
    def _busy(self) -> bool:
        return self.attempt is not None and self.attempt.busy

    @property
    def _ran(self) -> int:
        return self.attempt.number if self.attempt else 0

    # Orders

    def _obey(self, seen: Seen) -> None:
        orders = seen.orders
        if orders.attempt > self._heard[0]:
            self._next_ready_at, self._ready_pause_s, self._room = 0.0, self.tools.pace.ready_s, {}
        self._heard, self._level = seen.order, orders
        self.tools.journal.note(
            "order_seen", attempt=orders.attempt, generation=orders.generation, action=orders.action.value
        )
        if orders.action is Action.RELEASE:
            self.stopping = True
        elif orders.attempt > self._ran:
            self._leave_older()
            self._join(seen)
        elif orders.attempt == self._ran and self.attempt:
            self._relay(orders, self.attempt)

    def _relay(self, orders: Orders, attempt: Attempt) -> None:
        if orders.action is Action.RUN:
            attempt.raise_generation(orders.generation)
        elif orders.action is Action.WAIT:
            attempt.abandon()
        elif orders.action in CONTROLS and attempt.busy:
            deadlines = [at for at in (orders.deadline_at, self._notice and self._notice.deadline_at) if at]
            attempt.order(
                CONTROLS[orders.action],
                generation=orders.generation,
                deadline_at=min(deadlines, default=None),
                doomed=orders.doomed,
            )
            self._say(Heard, attempt=attempt.number, generation=orders.generation, action=orders.action.value)

    def _leave_older(self) -> None:
        """A later attempt has begun, so nothing of this one counts any more."""
        if self._busy and self.attempt:
            self.tools.journal.note("attempt_left", attempt=self.attempt.number)
        if self.attempt:
            self.attempt.leave()
            self._ship_logs()

    def _join(self, seen: Seen) -> None:
        """The ranks of the attempt run here, if its roster names this node."""
        node_rank = seen.roster.rank_of(self.identity.instance) if seen.roster else None
        if seen.roster is None or node_rank is None:
            return
        if seen.orders.action is not Action.RUN:
            self._answer_unstarted(seen.orders)
            return
        try:
            if self.attempt:
                keep_newest(self.attempt, self.tools.settings)
                keep_records(self.attempt, self.tools.settings)
            self.attempt = Attempt(seen, seen.roster, node_rank, self.tools)
            self.attempt.start(free_port=self._port.release)
        except OSError as error:
            if self._busy and self.attempt:
                self.attempt.leave()
            reason = f"the ranks could not be started: {error}"
            self._say(Failed, attempt=seen.orders.attempt, failure="crash", reason=reason)
            return
        except SecretUnavailable as error:
            self.attempt.leave()
            failure = "user_error" if error.final else "crash"
            self._say(Failed, attempt=seen.orders.attempt, failure=failure, reason=str(error))
            return
        if node_rank < self.tools.pace.heartbeat_nodes:
            self.heartbeat.begin(self.attempt.number)
        if self._notice:
            self._checkpoint_alone(self._notice)

    def _answer_unstarted(self, orders: Orders) -> None:
        """An attempt that stops before this node has joined it has no new step: the save to restore answers."""
        resume = orders.resume_from
        if orders.action is not Action.CHECKPOINT_STOP:
            return
        if resume is None:
            self._say(Failed, attempt=orders.attempt, failure="preemption", reason=NOTHING_TO_SAVE)
            return
        self._say(
            CheckpointSaved,
            attempt=orders.attempt,
            save=resume.save,
            manifest_sha256=resume.manifest_sha256,
            step=resume.pointer.step,
            final=True,
            answers_generation=orders.generation,
            existing=True,
            parent=resume.parent,
        )

    # Notice

    def _look_for_notice(self) -> None:
        notice = self.notices.latest()
        if notice is None or self._notice is not None:
            return
        self._notice = notice
        self.tools.journal.note("notice_seen", action=notice.action, deadline_at=notice.deadline_at)
        if self._busy:
            self._checkpoint_alone(notice)
        attempt = self._ran or self._heard[0]
        self._say(NoticeSeen, attempt=attempt, action=notice.action, deadline_at=notice.deadline_at)
        self.orders.loop.poke()

    def _look_for_warnings(self) -> None:
        """Each warning is told once an attempt; what it calls for is the supervisor's to say."""
        for warning in self.warnings.latest() if self.warnings and self._busy else ():
            if (self._ran, warning) not in self._warned:
                self._warned.add((self._ran, warning))
                self.tools.journal.note("warning_seen", action=warning.action, at=warning.deadline_at)
                self._say(NoticeSeen, attempt=self._ran, action=warning.action, deadline_at=warning.deadline_at)

    def _checkpoint_alone(self, notice: Notice) -> None:
        """The ranks save and stop under the generation they have; the supervisor's order will only raise it."""
        if self.attempt:
            self.attempt.order(
                ControlKind.CHECKPOINT_STOP,
                generation=self.attempt.control.generation,
                deadline_at=notice.deadline_at,
                doomed=(self.identity.instance,),
            )

    # Waiting

    def _beat_while_busy(self) -> None:
        if not self._busy:
            self.heartbeat.end()

    def _ship_curve(self) -> None:
        """With each save: what was measured up to it is on its way, so that a loss takes no more than the steps do."""
        if self.logs and self.attempt and self._curve_of != (self.attempt.number, self.attempt.commits):
            self._curve_of = (self.attempt.number, self.attempt.commits)
            if self.attempt.commits:
                self.logs.ship(self.attempt.curve())

    def _ship_logs(self) -> None:
        """Once an attempt: the end of what its ranks printed is on its way to the bucket, and looked at once more."""
        if self.logs is None or self.attempt is None or self._shipped == self.attempt.number:
            return
        self._shipped = self.attempt.number
        self._following.poke()
        self.logs.ship(self.attempt.log_tails() | self.attempt.curve())

    def _follow(self) -> float:
        if self._follower and self.attempt:
            self.attempt.follow(self._follower)
        return self.tools.pace.follow_s

    def _look_whether_fit(self) -> None:
        """Once after each attempt; a node that is not fit says so at once, and then in place of checking in."""
        if self.attempt is None or self._looked_after == self._ran:
            return
        self._looked_after = self._ran
        tools = self.tools
        self._unfit = unfit(
            root=tools.settings.root,
            pids=self.attempt.pids,
            gpus=tools.gpu_figures(),
            kernel=tools.kernel.lines(),
            clock_offset_s=tools.clock_offset_s(),
        )
        if self._unfit:
            tools.journal.note("unfit", reason=self._unfit)
            self._say(Unfit, attempt=self._ran, reason=self._unfit, host=tools.host.name)

    def _wait(self) -> None:
        level = self._level
        if level and level.action is Action.STOP and level.attempt == self._ran:
            self.stopping = True
        elif self._ran == 0 or self._heard[0] > self._ran:
            self._say_ready()

    def _say_ready(self) -> None:
        now = self.tools.clock()
        # The first orders carry the attempt's number; they are given a moment to come.
        if now < self._next_ready_at or (self._level is None and now < self._born_at + self.tools.pace.orders_idle_s):
            return
        self._next_ready_at = now + self._ready_pause_s
        self._ready_pause_s = min(2 * self._ready_pause_s, self.tools.pace.ready_most_s)
        me, host = self.identity, self.tools.host
        if self._unfit:
            self._say(Unfit, attempt=self._heard[0], reason=self._unfit, host=host.name)
            return
        # Looked at once a wait: a figure that wavers would be news each time.
        self._room = self._room or {
            "disk_free_bytes": disk_free_bytes(self.tools.settings.root),
            "memory_free_bytes": memory_free_bytes(),
            "clock_offset_s": round(self.tools.clock_offset_s(), 1),
        }
        self._say(
            Ready,
            attempt=self._heard[0],
            ip=me.ip,
            port=self._port.hold(),
            interface=me.interface,
            instance_type=me.instance_type,
            zone=me.zone,
            gpus=me.gpus,
            efa_devices=me.efa_devices,
            driver=host.driver,
            placement_group=host.placement_group,
            host=host.name,
            efa_provider=host.efa_provider,
            **self._room,
            topology=tuple(map(str, host.gpus)) or None,
        )

    def _say(self, kind: type[Report], **fields: object) -> None:
        self.tools.say(kind, **fields)


def speaker(identity: Identity, reporter: Reporter, clock: Callable[[], float] = time.time) -> Callable[..., None]:
    """Return the function that sends a report of a kind in this node's name."""

    def say(kind: type[Report], **fields: object) -> None:
        reporter.say(kind(job=identity.job, instance=identity.instance, at=clock(), **fields))  # type: ignore[arg-type]

    return say
