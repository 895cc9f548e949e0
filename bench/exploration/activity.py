"""Activities that stop before every call of a port: the same code as in the functions, one call at a time.

An activity is told by its answers alone: what it does next is a pure function of its kind, its arguments and the
answers it has had, so it is run again from the start with the answers replayed, and what it asked next is remembered.
The clock is no step: it is read at the time of the last answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from holdfast.application import account as account_module
from holdfast.application import dispatch as dispatch_module
from holdfast.application import record as record_module
from holdfast.domain.errors import Raced
from holdfast.domain.events import InterruptionNoticed
from holdfast.domain.job import Job
from holdfast.domain.ledger import Ledger, Quotas
from holdfast.domain.network_cards import MachineType
from holdfast.domain.purchase import Subnet, Template
from holdfast.domain.queueing import Waiter

Spec = tuple[str, Hashable]

FRESH = (Waiter, Subnet, MachineType, Template)
"""Answers that are made anew by every call: to know them by identity would keep all of them."""


@dataclass(frozen=True)
class Call:
    """What an activity asks of a port next."""

    port: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Activity:
    """One activity after some answers: it waits for `call`, or is over (with `fault` when it raised)."""

    number: int
    spec: Spec
    now: float
    answers: tuple[tuple[Any, float], ...]
    before: Activity | None = None
    call: Call | None = None
    result: Any = None
    fault: Exception | None = None
    next: dict[tuple[int, float], Activity] = field(default_factory=dict)


class _Suspended(BaseException):
    """Raised out of the first call without an answer; no handler of the application catches it."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.method)
        self.call = call


QUIET = frozenset(
    {
        *("subnets", "machine_types", "base_template", "template_for", "console_tail", "groups", "templates"),
        *("quotas", "ledger", "teams", "alive", "line", "cold", "cool", "warm", "patience", "keep_patience"),
        *("claim", "request", "left_notices", "troubled"),
    }
)
"""Calls that are part of the step before them, or of the function's first: what they read does not change while one
job is explored, or what rests on it is checked again by the write that follows."""


def quiet(activity: Activity) -> bool:
    """True when the next call is no step of its own."""
    call = activity.call
    if call is None:
        return False
    if call.method == "load_all":
        return not any(call.args)
    # The step to which a job is charged that closes: it decides nothing.
    return call.method in QUIET or (activity.spec[0] == "close" and call.method in ("load", "intent", "nodes"))


def _kept(argument: Any) -> Any:
    """Return what can be read once in every world."""
    return tuple(argument) if isinstance(argument, Iterator) else argument


class _Port:
    def __init__(self, name: str, ask: Callable[[Call], Any]) -> None:
        self._name, self._ask = name, ask

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._ask(Call(self._name, method, tuple(map(_kept, args)), kwargs))


class _Replay:
    """Ports that give the recorded answers, then suspend."""

    def __init__(self, now: float, answers: tuple[tuple[Any, float], ...]) -> None:
        self._answers, self._asked, self._now = answers, 0, now
        self.store, self.workflow, self.fleets, self.checkpoints, self.outbox = (
            _Port(name, self._ask) for name in ("store", "workflow", "fleets", "checkpoints", "outbox")
        )

    def clock(self) -> float:
        return self._now

    def pause(self, seconds: float) -> None:
        """The pauses between two tries of a save are not worth exploring: a race may last as long as it likes."""

    def _ask(self, call: Call) -> Any:
        if self._asked == len(self._answers):
            raise _Suspended(call)
        answer, self._now = self._answers[self._asked]
        self._asked += 1
        if isinstance(answer, Exception):
            raise answer.with_traceback(None)
        return answer


class Activities:
    """Every activity that was ever reached, each run once."""

    def __init__(self, doors: dict[str, Callable[..., Any]]) -> None:
        self.doors, self.all = doors, list[Activity]()
        self.serials = Serials()
        self._begun: dict[tuple[Spec, float], Activity] = {}

    def begin(self, spec: Spec, now: float) -> Activity:
        """The activity before its first call."""
        known = self._begun.get((spec, now))
        if known is None:
            known = self._begun[spec, now] = self._run(spec, now, ())
        return known

    def go_on(self, activity: Activity, answer: Any, now: float) -> Activity:
        """The activity after one more answer."""
        key = (self.serials.of(answer), now)
        known = activity.next.get(key)
        if known is None:
            known = activity.next[key] = self._after(activity, answer, now)
        return known

    def _after(self, activity: Activity, answer: Any, now: float) -> Activity:
        before = activity.before
        if isinstance(answer, Raced) and before is not None and before.call and before.call.method == "load_for":
            assert activity.call is not None
            if not any(isinstance(told, InterruptionNoticed) for told in activity.call.args):
                # `record` loads again and remembers nothing of its first try: it is where it was before it loaded.
                return before
        return self._run(activity.spec, activity.now, (*activity.answers, (answer, now)), activity)

    def _run(
        self, spec: Spec, now: float, answers: tuple[tuple[Any, float], ...], before: Activity | None = None
    ) -> Activity:
        activity = Activity(len(self.all), spec, now, answers, before)
        self.all.append(activity)
        ports = _Replay(now, answers)
        try:
            activity.result = self.doors[spec[0]](ports, *spec[1:])
        except _Suspended as suspended:
            activity.call = suspended.call
        except Exception as fault:  # noqa: BLE001 what an activity raised is judged by the explorer
            activity.fault = fault.with_traceback(None)
        return activity


class Serials:
    """Equal values get the same number; known objects by their identity, without being looked into."""

    def __init__(self) -> None:
        self._by_id: dict[int, int] = {}
        self._by_value: dict[Hashable, int] = {}
        self._kept: list[Any] = []

    def of(self, value: Any) -> int:
        serial = self._by_id.get(id(value))
        if serial is None:
            serial = self._by_value.setdefault(self._value(value), len(self._by_value))
            if is_dataclass(value) and not isinstance(value, FRESH):
                # Kept for ever, so that its id is never another object's.
                self._by_id[id(value)] = serial
                self._kept.append(value)
        return serial

    def _value(self, value: Any) -> Hashable:
        if isinstance(value, (Job, Ledger, Quotas)):
            fields = vars(value).values()
            return (type(value).__name__, *(tuple(sorted(v.items())) if isinstance(v, dict) else v for v in fields))
        if isinstance(value, dict):
            return ("map", *((known, self.of(item)) for known, item in value.items()))
        if isinstance(value, (list, tuple)):
            return ("many", *(self.of(item) for item in value))
        if isinstance(value, Exception):
            return (type(value).__name__, str(value))
        return (type(value).__name__, value)


@contextmanager
def without_pauses() -> Iterator[None]:
    """Whoever lost a race tries again at once, and the same answers always lead to the same call."""
    modules: tuple[Any, ...] = (record_module, dispatch_module, account_module)
    kept = [module.random for module in modules]
    for module in modules:
        module.random = random.Random(0)
    try:
        yield
    finally:
        for module, chance in zip(modules, kept, strict=True):
            module.random = chance
