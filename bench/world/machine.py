"""Step Functions in virtual time: an interpreter of the state types and fields that the shipped machine uses.

Anything else in the file raises, so that nothing of the machine is passed over in silence.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.world.agenda import Agenda
from bench.world.wire import ApiError

Invoke = Callable[[str, Mapping[str, Any]], Any]
WAITS = "arn:aws:states:::lambda:invoke.waitForTaskToken"
CALLS = "arn:aws:states:::lambda:invoke"
HOP_S = 0.05
KNOWN = {
    "Choice": {"Type", "Choices", "Default"},
    "Task": {
        "Comment", "Type", "Resource", "Parameters", "ResultSelector", "ResultPath", "TimeoutSecondsPath",
        "HeartbeatSecondsPath", "Retry", "Catch", "Next", "End",
    },
}  # fmt: skip


class StepFailed(Exception):
    """The function of a step failed."""


@dataclass
class Execution:
    """`visit` counts entered tasks, retries included, and `settled` is the last that ended. A token is of one visit."""

    name: str
    input: str
    started_at: float
    data: Any
    status: str = "RUNNING"
    state: str = ""
    visit: int = 0
    settled: int = 0
    beats_at: float = 0.0
    retries: Counter[int] = field(default_factory=Counter)
    path: list[str] = field(default_factory=list)


class Machine:
    """`invoke(function, payload)` runs a step and raises StepFailed; `ended` is told of each execution that ends."""

    def __init__(
        self, definition: Mapping[str, Any], agenda: Agenda, *, invoke: Invoke, ended: Callable[[Execution], None]
    ) -> None:
        self.definition, self.agenda, self.invoke, self.ended = definition, agenda, invoke, ended
        self.executions: dict[str, Execution] = {}
        for name, state in definition["States"].items():
            unknown = state.keys() - KNOWN[state["Type"]]
            if unknown:
                raise ValueError(f"state {name!r} has {', '.join(sorted(unknown))}, which this interpreter cannot read")

    # -- the API ---------------------------------------------------------------------------------------------------

    def answer(self, operation: str, params: Mapping[str, Any]) -> dict[str, Any]:
        match operation:
            case "StartExecution":
                self._start(params["name"], params["input"])
                return {"executionArn": params["name"]}
            case "DescribeExecution":
                name = params["executionArn"].rpartition(":")[2]
                if name not in self.executions:
                    raise ApiError("ExecutionDoesNotExist")
                return {"status": self.executions[name].status}
            case "SendTaskSuccess":
                self._settle(params["taskToken"], json.loads(params["output"]))
                return {}
        raise ValueError(f"the machine does not answer {operation}")

    def heartbeat(self, token: str) -> bool:
        """The waiting state goes on waiting; False when the token is dead."""
        execution = self._holder(token)
        if execution is None:
            return False
        execution.beats_at = self.agenda.now
        return True

    def abort(self, name: str) -> None:
        """Someone stopped the execution by hand."""
        self._end(self.executions[name], "ABORTED")

    def _start(self, name: str, text: str) -> None:
        known = self.executions.get(name)
        if known is not None:
            if known.status == "RUNNING" and known.input == text:
                return
            raise ApiError("ExecutionAlreadyExists")
        execution = Execution(name=name, input=text, started_at=self.agenda.now, data=json.loads(text))
        self.executions[name] = execution
        self.agenda.after(self.definition["TimeoutSeconds"], lambda: self._end(execution, "TIMED_OUT"))
        self._later(execution, lambda: self._enter(execution, self.definition["StartAt"]))

    def _holder(self, token: str) -> Execution | None:
        name, _, visit = token.rpartition("/")
        execution = self.executions[name]
        return execution if self._is_open(execution, int(visit)) else None

    def _settle(self, token: str, output: Any) -> None:
        execution = self._holder(token)
        if execution is None:
            raise ApiError("TaskTimedOut")
        self._succeed(execution, execution.visit, output)

    # -- the states ------------------------------------------------------------------------------------------------

    def _later(self, execution: Execution, deed: Callable[[], None], delay_s: float = HOP_S) -> None:
        self.agenda.after(delay_s, lambda: deed() if execution.status == "RUNNING" else None)

    def _is_open(self, execution: Execution, visit: int) -> bool:
        return execution.status == "RUNNING" and execution.visit == visit and execution.settled < visit

    def _enter(self, execution: Execution, name: str) -> None:
        execution.state = name
        execution.path.append(name)
        state = self.definition["States"][name]
        if state["Type"] == "Choice":
            self._later(execution, lambda: self._enter(execution, self._choose(execution, state)))
            return
        execution.retries.clear()
        self._visit(execution)

    def _choose(self, execution: Execution, state: Mapping[str, Any]) -> str:
        for choice in state["Choices"]:
            if _at(execution.data, choice["Variable"]) == choice["StringEquals"]:
                return str(choice["Next"])
        return str(state["Default"])

    def _visit(self, execution: Execution) -> None:
        execution.visit += 1
        execution.beats_at = self.agenda.now
        visit, state = execution.visit, self.definition["States"][execution.state]
        waits = {WAITS: True, CALLS: False}[state["Resource"]]
        payload = _rendered(state["Parameters"], execution.data, token=f"{execution.name}/{visit}")
        if waits:
            self._watch(execution, visit, state)
        try:
            result = self.invoke(payload["FunctionName"], payload["Payload"])
        except StepFailed:
            self._fail(execution, visit, "Lambda.Unknown")
            return
        if not waits:
            self._succeed(execution, visit, {"Payload": json.loads(json.dumps(result))})

    def _watch(self, execution: Execution, visit: int, state: Mapping[str, Any]) -> None:
        timeout_s = _at(execution.data, state["TimeoutSecondsPath"])
        self._later(execution, lambda: self._fail(execution, visit, "States.Timeout"), timeout_s)
        if "HeartbeatSecondsPath" not in state:
            return
        heartbeat_s = _at(execution.data, state["HeartbeatSecondsPath"])

        def listen() -> None:
            silent_s = self.agenda.now - execution.beats_at
            if not self._is_open(execution, visit):
                return
            if silent_s >= heartbeat_s:
                self._fail(execution, visit, "States.HeartbeatTimeout")
                return
            self._later(execution, listen, heartbeat_s - silent_s)

        self._later(execution, listen, heartbeat_s)

    def _succeed(self, execution: Execution, visit: int, output: Any) -> None:
        if not self._is_open(execution, visit):
            return
        execution.settled = visit
        state = self.definition["States"][execution.state]
        if "ResultSelector" in state:
            output = _rendered(state["ResultSelector"], output)
        execution.data = _placed(execution.data, state.get("ResultPath", "$"), output)
        if state.get("End"):
            self._end(execution, "SUCCEEDED")
            return
        self._later(execution, lambda: self._enter(execution, state["Next"]))

    def _fail(self, execution: Execution, visit: int, error: str) -> None:
        """The first rule that names the error says whether to retry; then come the catchers, then the end."""
        if not self._is_open(execution, visit):
            return
        execution.settled = visit
        state = self.definition["States"][execution.state]
        number, rule = next(((n, r) for n, r in enumerate(state.get("Retry", ())) if _names(r, error)), (0, None))
        if rule is not None and execution.retries[number] < rule["MaxAttempts"]:
            # FULL jitter draws between nothing and this; the whole of it leaves other events the most room.
            delay_s = rule["IntervalSeconds"] * rule["BackoffRate"] ** execution.retries[number]
            execution.retries[number] += 1
            self._later(execution, lambda: self._visit(execution), min(delay_s, rule["MaxDelaySeconds"]))
            return
        catcher = next((catcher for catcher in state.get("Catch", ()) if _names(catcher, error)), None)
        if catcher is None:
            self._end(execution, "FAILED")
            return
        execution.data = _placed(execution.data, catcher["ResultPath"], {"Error": error, "Cause": ""})
        self._later(execution, lambda: self._enter(execution, catcher["Next"]))

    def _end(self, execution: Execution, status: str) -> None:
        if execution.status == "RUNNING":
            execution.status = status
            self.ended(execution)


def _names(rule: Mapping[str, Any], error: str) -> bool:
    return error in rule["ErrorEquals"] or "States.ALL" in rule["ErrorEquals"]


def _at(data: Any, path: str) -> Any:
    """Return what lies at a path of the form $.a.b."""
    if path == "$":
        return data
    if not path.startswith("$."):
        raise ValueError(f"this interpreter cannot read the path {path!r}")
    for step in path[2:].split("."):
        data = data[step]
    return data


def _rendered(template: Any, data: Any, token: str = "") -> Any:
    if not isinstance(template, dict):
        return template
    rendered = {}
    for key, value in template.items():
        if key.endswith(".$"):
            rendered[key[:-2]] = token if value == "$$.Task.Token" else _at(data, value)
        else:
            rendered[key] = _rendered(value, data, token)
    return rendered


def _placed(data: Any, path: str | None, output: Any) -> Any:
    if path is None:
        return data
    if path == "$":
        return output
    key = path.removeprefix("$.")
    if "." in key:
        raise ValueError(f"this interpreter cannot write to the path {path!r}")
    return {**data, key: output}
