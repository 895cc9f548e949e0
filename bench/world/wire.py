"""The botocore hook: every AWS call of the doors passes here, is counted, may be answered by a model, or be the last.

A point is one mutating call: the door that makes it, the operation, and its ordinal among the calls of that door and
operation. A crash just before it leaves the call undone, just after it done and unanswered; nothing of the invocation
runs any further.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

import boto3.session

MUTATING = frozenset(
    {
        "PutItem",
        "UpdateItem",
        "DeleteItem",
        "TransactWriteItems",
        "SendMessage",
        "PutEvents",
        "StartExecution",
        "SendTaskSuccess",
        "CreateFleet",
        "TerminateInstances",
        "PutObject",
    }
)

Answer = Callable[[str, Mapping[str, Any]], dict[str, Any] | None]
Effect = Callable[[str, Mapping[str, Any]], None]


class Crashed(BaseException):
    """The environment of a function died; no handler of the product may answer this."""


class ApiError(Exception):
    """A model refuses a call with this code."""

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(code, message)
        self.code, self.message = code, message or code


class Moment(StrEnum):
    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True, order=True)
class Point:
    door: str
    operation: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.door} {self.operation} #{self.ordinal}"


@dataclass(frozen=True, order=True)
class Crash:
    point: Point
    moment: Moment

    def __str__(self) -> str:
        return f"{self.moment} {self.point}"


@dataclass(frozen=True)
class _Http:
    status_code: int


@dataclass
class Wire:
    """`door` is the one at work, None while nobody's calls count. `strikes` is asked at each moment of each point.

    Models answer for their services (`answers`); None leaves the call to moto. `effects` are told of what was done.
    """

    answers: dict[str, Answer] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    strikes: Callable[[Crash], bool] = lambda crash: False
    door: str | None = None
    crashed: list[Crash] = field(default_factory=list)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    points: list[Point] = field(default_factory=list)

    @contextlib.contextmanager
    def used_by(self, door: str) -> Any:
        """Calls made inside are the door's."""
        self.door = door
        try:
            yield
        finally:
            self.door = None

    def before(self, operation: str, service: str, context: dict[str, Any]) -> tuple[_Http, dict[str, Any]] | None:
        if self.door is not None and operation in MUTATING:
            self.calls[self.door, operation] += 1
            context["point"] = Point(self.door, operation, self.calls[self.door, operation])
            self.points.append(context["point"])
            self._crash_if_due(context["point"], Moment.BEFORE)
        answer = self.answers.get(service)
        if answer is None:
            return None
        try:
            given = answer(operation, context["api_params"])
        except ApiError as refusal:
            return _Http(400), {"Error": {"Code": refusal.code, "Message": refusal.message}, "ResponseMetadata": {}}
        return None if given is None else (_Http(200), {**given, "ResponseMetadata": {}})

    def after(self, operation: str, status: int, context: Mapping[str, Any]) -> None:
        if status < 300 and operation in MUTATING:
            for effect in self.effects:
                effect(operation, context["api_params"])
        if "point" in context:
            self._crash_if_due(context["point"], Moment.AFTER)

    def _crash_if_due(self, point: Point, moment: Moment) -> None:
        crash = Crash(point, moment)
        if self.strikes(crash):
            self.crashed.append(crash)
            raise Crashed(str(crash))


class _Current:
    """Which wire the one session of this process is on: making clients takes longer than a whole life of a job."""

    wire = Wire()


def put_in(wire: Wire) -> None:
    """The calls of every client of `wired_session` pass this wire."""
    _Current.wire = wire


@cache
def wired_session() -> boto3.session.Session:
    """Return the process's session, its calls on the wire."""
    session = boto3.session.Session(region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test")
    session.events.register("before-parameter-build", _keep_params)
    session.events.register("before-call", _before_call)
    session.events.register("after-call", _after_call)
    return session


@cache
def wired_client(service: str) -> Any:
    """Return the process's client of the service, its calls on the wire."""
    return wired_session().client(service)


def _keep_params(params: Mapping[str, Any], context: dict[str, Any], **_: object) -> None:
    context["api_params"] = dict(params)


def _before_call(model: Any, context: dict[str, Any], **_: object) -> tuple[_Http, dict[str, Any]] | None:
    return _Current.wire.before(model.name, model.service_model.service_name, context)


def _after_call(http_response: Any, model: Any, context: dict[str, Any], **_: object) -> None:
    _Current.wire.after(model.name, http_response.status_code, context)
