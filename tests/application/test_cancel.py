"""O-05: a cancel is a fence at every point of a launch, also of one that is a recovery."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from holdfast.application.control import obey
from holdfast.application.dispatch import dispatch
from holdfast.application.launch import Launch
from holdfast.application.node_reports import NodeReports
from holdfast.application.record import record
from holdfast.application.release import close_attempt, release_fleet
from holdfast.application.sweep import Sweep
from holdfast.application.waiting import leave_token
from holdfast.domain.errors import Rejected, Unavailable
from holdfast.domain.job import Job
from holdfast.domain.ownership import ORPHAN_GRACE_S
from holdfast.domain.phase import Phase
from holdfast.domain.placement import candidates
from holdfast.messages.control_request import Cancel
from job_contract import reports
from job_contract.orders import Wait, WaitItem
from tests import builders as b
from tests.application.fakes import FakePorts

JOB = "demo-0123456789"
PREFIX = f"teams/research/jobs/{JOB}"
ASKED = candidates(instance_types=("c7i.large", "c6i.large"), market="spot", zones=(), nodes=2)
PORTS = ("store", "workflow", "fleets", "checkpoints", "catalogue", "outbox")


class Died(BaseException):
    """The function's environment is gone: no handler may answer this."""


@dataclass
class Between:
    """Does the deed just before the n-th call of any port, and dies so many calls later if told to.

    `calls` are those that were begun, in order.
    """

    number: int
    deed: Callable[[], None]
    dies_after: int | None = None
    calls: list[str] = field(default_factory=list)

    def begins(self, call: str) -> None:
        self.calls.append(call)
        if len(self.calls) == self.number:
            self.deed()
        if self.dies_after is not None and len(self.calls) == self.number + self.dies_after:
            raise Died

    @property
    def struck(self) -> bool:
        return len(self.calls) >= self.number


class Watched:
    """A port whose calls are told to `between` before they are made."""

    def __init__(self, port: Any, between: Between) -> None:
        self._port, self._between = port, between

    def __getattr__(self, name: str) -> Any:
        known = getattr(self._port, name)
        if not callable(known):
            return known

        def call(*args: Any, **kwargs: Any) -> Any:
            self._between.begins(name)
            return known(*args, **kwargs)

        return call


def watched(ports: FakePorts, between: Between) -> FakePorts:
    """The same world, seen by a function whose every call can be preceded by something else."""
    seen = copy.copy(ports)
    for name in PORTS:
        setattr(seen, name, Watched(getattr(ports, name), between))
    return seen


def recovering(*, survivor: bool) -> tuple[FakePorts, int]:
    """A job that lost a node and is launched again; with a held survivor, or with nobody left."""
    ports = FakePorts()
    gone = (b.OTHER,) if survivor else (b.LEADER, b.OTHER)
    job = ports.holding(b.after(b.a_running_job(), b.saved(25), b.lost(*gone)))
    ports.owning(job, b.LEADER, b.OTHER)
    for instance in gone:
        ports.fleets.kill(instance)
    ports.workflow.executions[f"{JOB}-1"] = "SUCCEEDED"
    release_fleet(JOB, 1, ports)
    close_attempt(JOB, 1, ports)
    assert dispatch(ports) == [JOB]
    assert len(now(ports).held) == survivor
    return ports, now(ports).attempt


def now(ports: FakePorts) -> Job:
    return ports.store.rows[JOB]


def cancel(ports: FakePorts) -> None:
    obey(Cancel.model_validate({"schema": "holdfast.control/1", "job": JOB, "action": "cancel"}), ports)


def launch(ports: FakePorts, attempt: int) -> str:
    answer = Launch(ports).run(JOB, attempt, candidates=ASKED, prefix=PREFIX, time_left_s=120)
    return str(answer["outcome"])


def every_point(*, survivor: bool, deed: Callable[[FakePorts], None]) -> Iterator[tuple[FakePorts, int, str, str]]:
    """Each way that a launch can be met by the deed: (world, attempt, answer of the step, where it was met)."""
    for number in itertools.count(1):
        ports, attempt = recovering(survivor=survivor)
        between = Between(number, lambda ports=ports: deed(ports))  # type: ignore[misc]
        outcome = launch(watched(ports, between), attempt)
        if not between.struck:
            # The launch is over: the last point is after it.
            assert outcome == "launched"
            deed(ports)
            yield ports, attempt, outcome, "after the launch"
            return
        yield ports, attempt, outcome, f"before call {number}, {between.calls[number - 1]}"


def the_machine_goes_on(ports: FakePorts, attempt: int, outcome: str) -> None:
    """What the run machine does after the launch step: the release is repeated until it holds."""
    if outcome == "launched":
        leave_token(WaitItem(job=JOB, attempt=attempt, wait=Wait.READY, token="t"), ports)
        assert ports.workflow.settled == [("t", "withdrawn")], "a cancelled launch is not waited for"
    for _ in range(10):
        with suppress(Unavailable):
            release_fleet(JOB, attempt, ports)
            break
        ports.clock.step(30)
    close_attempt(JOB, attempt, ports)
    ports.workflow.executions[f"{JOB}-{attempt}"] = "SUCCEEDED"


def late_news(ports: FakePorts, attempt: int) -> None:
    """Machines say that they run, and a purchase that it is done, after everything is over."""
    fleet = f"{JOB}-{attempt}-0"
    for instance in list(ports.fleets.instances):
        report = reports.Ready(
            job=JOB, attempt=attempt, instance=instance, at=b.NOW, ip="10.0.0.1", port=4, interface="eth0",
            instance_type="c7i.large", zone="us-east-1a",
        )  # fmt: skip
        with suppress(Rejected):
            NodeReports(ports).take(report)
    record(b.intended(attempt, fleet), JOB, ports)
    record(b.bought(attempt), JOB, ports)
    record(b.ready(attempt), JOB, ports)
    record(b.training(attempt), JOB, ports)


def is_cancelled_for_good(ports: FakePorts, where: str) -> None:
    ended = now(ports)
    assert (ended.phase, ended.over) == (Phase.CANCELLED, True), where
    assert ports.fleets.live == [], where
    assert dispatch(ports) == [], where


@pytest.mark.parametrize("survivor", [False, True], ids=["whole gang", "with a survivor"])
def test_o05_a_cancel_at_any_point_of_a_launch_leaves_no_machine_and_a_cancelled_job(survivor: bool) -> None:
    points = 0
    for ports, attempt, outcome, where in every_point(survivor=survivor, deed=cancel):
        points += 1
        bought = len(ports.fleets.calls)
        the_machine_goes_on(ports, attempt, outcome)
        is_cancelled_for_good(ports, where)
        late_news(ports, attempt)
        is_cancelled_for_good(ports, where)
        assert len(ports.fleets.calls) == bought <= 1, where
    assert points > 15


@pytest.mark.parametrize("survivor", [False, True], ids=["whole gang", "with a survivor"])
def test_o05_nothing_is_bought_when_the_cancel_came_before_the_fleet_was_intended(survivor: bool) -> None:
    before_it = 0
    for ports, _, outcome, where in every_point(survivor=survivor, deed=cancel):
        order = [type(event).__name__ for event in ports.store.events[JOB].values()]
        told = order.index("CancelRequested")
        if "FleetIntended" in order[:told]:
            continue
        before_it += 1
        assert (outcome, ports.fleets.calls) == ("withdrawn", []), where
    assert before_it > 5


def cancelled_and_stopped(ports: FakePorts) -> None:
    """The cancel, and somebody stopped the execution: the launch goes on alone."""
    cancel(ports)
    ports.workflow.executions[f"{JOB}-2"] = "ABORTED"
    with suppress(Unavailable):
        Sweep(ports).run()


def swept(ports: FakePorts) -> None:
    """The sweep has run until even an orphan is past its grace."""
    for _ in range(8):
        with suppress(Unavailable):
            Sweep(ports).run()
        ports.clock.step(ORPHAN_GRACE_S / 4)


@pytest.mark.parametrize("survivor", [False, True], ids=["whole gang", "with a survivor"])
def test_o05_where_the_run_is_stopped_too_the_sweep_alone_leaves_no_machine(survivor: bool) -> None:
    for ports, _, _, where in every_point(survivor=survivor, deed=cancelled_and_stopped):
        bought = len(ports.fleets.calls)
        swept(ports)
        is_cancelled_for_good(ports, where)
        assert len(ports.fleets.calls) == bought <= 1, where


@pytest.mark.parametrize("survivor", [False, True], ids=["whole gang", "with a survivor"])
@pytest.mark.parametrize("dies_after", range(1, 7))
def test_o05_where_the_launch_dies_after_that_what_it_owned_by_then_is_swept(survivor: bool, dies_after: int) -> None:
    deaths = 0
    for number in itertools.count(1):
        ports, attempt = recovering(survivor=survivor)
        between = Between(number, lambda ports=ports: cancelled_and_stopped(ports), dies_after)  # type: ignore[misc]
        try:
            launch(watched(ports, between), attempt)
        except Died:
            deaths += 1
        if not between.struck:
            break
        swept(ports)
        is_cancelled_for_good(ports, f"before call {number}, {between.calls[number - 1]}, dead {dies_after} later")
    assert deaths > 3
