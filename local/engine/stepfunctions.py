"""State machines as AWS runs them where ministack doesn't: paths for timeouts, heartbeats, a token step whose function
fails, retries with a cap and jitter and a token of their own, a stop that stays a stop, a limit for the whole run."""

import contextvars
import json
import random
import threading
import time

from ministack.core import responses
from ministack.services import stepfunctions as sfn

NEEDS = {
    "ministack.services.stepfunctions": (
        "_execute_task",
        "_resolve_path_or_ctx",
        "_apply_input_path",
        "_ExecutionError",
        "_invoke_with_callback",
        "_invoke_resource",
        "_call_lambda",
        "_task_tokens",
        "_stop_execution",
        "_start_execution",
        "_fail_execution",
        "_find_matching_retrier",
        "_run_execution",
        "_executions",
        "_state_machines",
        "_add_event",
        "_emit_execution_status_event",
        "_send_task_heartbeat",
        "now_iso",
        "error_response_json",
    ),
    "ministack.core.responses": ("new_uuid",),
}

_LOOK_S = 0.05
_MAX_INPUT_BYTES = 262_144

# The task under way, seen from the functions that ministack gives no execution. A timed task runs in a thread of its
# own with a copy of the context, so a context variable and not a thread-local.
_execution: contextvars.ContextVar[dict | None] = contextvars.ContextVar("execution", default=None)
_context: contextvars.ContextVar[dict | None] = contextvars.ContextVar("context_object", default=None)
_token: contextvars.ContextVar[str | None] = contextvars.ContextVar("token", default=None)
_open_tokens: dict[str, str] = {}


class _Stopped(BaseException):
    """The execution is not RUNNING any more, so its thread ends without another step.

    No Exception: ministack answers any of those by failing the execution.
    """


def apply() -> None:
    for name in (
        "_execute_task",
        "_invoke_with_callback",
        "_invoke_resource",
        "_call_lambda",
        "_fail_execution",
        "_find_matching_retrier",
        "_run_execution",
        "_stop_execution",
        "_start_execution",
        "_send_task_heartbeat",
    ):
        stock, ours = getattr(sfn, name), globals()[name]
        _stock[name] = stock
        setattr(sfn, name, ours)


_stock: dict[str, object] = {}


def _execute_task(state_def: dict, raw_input, execution: dict, ctx: dict):
    state_def = _with_paths_read(state_def, raw_input, ctx)
    _execution.set(execution)
    _context.set(ctx)
    return _stock["_execute_task"](state_def, raw_input, execution, ctx)


def _with_paths_read(state_def: dict, raw_input, ctx: dict) -> dict:
    for name in ("TimeoutSeconds", "HeartbeatSeconds"):
        path = state_def.get(f"{name}Path")
        if path is None:
            continue
        value = sfn._resolve_path_or_ctx(path, sfn._apply_input_path(state_def, raw_input, ctx), ctx)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise sfn._ExecutionError(
                "States.Runtime", f"The {name}Path '{path}' must resolve to a positive integer, got {value!r}"
            )
        state_def = {**state_def, name: value}
    return state_def


def _invoke_with_callback(resource: str, input_data, token: str, state_def: dict):
    execution, ctx = _execution.get(), _context.get()
    _check_running(execution)
    heartbeat_s = state_def.get("HeartbeatSeconds")
    if isinstance(heartbeat_s, int | float):
        watch = contextvars.copy_context()
        threading.Thread(target=watch.run, args=(_watch_heartbeat, token, heartbeat_s), daemon=True).start()
    if execution:
        _open_tokens[execution["executionArn"]] = token
    reset = _token.set(token)
    try:
        result = _stock["_invoke_with_callback"](resource, input_data, token, state_def)
    except sfn._ExecutionError:
        _check_running(execution)
        ctx["Task"] = {"Token": responses.new_uuid()}  # a retry has a token of its own; the old one is dead
        raise
    finally:
        _token.reset(reset)
        if execution:
            _open_tokens.pop(execution["executionArn"], None)
    _check_running(execution)
    return result


def _watch_heartbeat(token: str, heartbeat_s: float) -> None:
    """The task fails with States.HeartbeatTimeout once it was silent for `heartbeat_s`; ends with the task."""
    last, since = None, time.monotonic()
    while True:
        time.sleep(_LOOK_S)
        task = sfn._task_tokens.get(token)
        if task is None or task["event"].is_set():
            return
        if task.get("beats") != last:
            last, since = task.get("beats"), time.monotonic()
        if time.monotonic() - since > heartbeat_s:
            _fail_token(token, "States.HeartbeatTimeout", "")
            return


def _send_task_heartbeat(data: dict):
    task = sfn._task_tokens.get(data.get("taskToken"))
    if task:  # counted: two beats in one second have the same time stamp
        task["beats"] = task.get("beats", 0) + 1
    return _stock["_send_task_heartbeat"](data)


def _fail_token(token: str | None, error: str, cause: str) -> None:
    task = sfn._task_tokens.get(token)
    if task and not task["event"].is_set():
        task["error"] = {"Error": error, "Cause": cause}
        task["event"].set()


def _call_lambda(func_ref: str, event):
    _check_running(_execution.get())
    try:
        return _stock["_call_lambda"](func_ref, event)
    except sfn._ExecutionError as error:
        _fail_token(_token.get(), error.error, error.cause)  # else a token step would wait for its timeout
        raise


def _invoke_resource(resource: str, input_data):
    _check_running(_execution.get())
    return _stock["_invoke_resource"](resource, input_data)


def _check_running(execution: dict | None) -> None:
    if execution and execution["status"] != "RUNNING":
        raise _Stopped


def _find_matching_retrier(retriers: list, error: str, retry_counts: dict):
    _check_running(_execution.get())
    retrier, index = _stock["_find_matching_retrier"](retriers, error, retry_counts)
    if retrier is None:
        return retrier, index
    pause_s = retry_pause_s(retrier, retry_counts.get(index, 0))
    return {**retrier, "IntervalSeconds": pause_s, "BackoffRate": 1.0}, index


def retry_pause_s(retrier: dict, count: int) -> float:
    """Seconds before retry number `count` (0 is the first): capped by MaxDelaySeconds, then jittered."""
    pause_s = retrier.get("IntervalSeconds", 1) * retrier.get("BackoffRate", 2.0) ** min(count, 60)
    pause_s = min(pause_s, retrier.get("MaxDelaySeconds", pause_s))
    return random.uniform(0, pause_s) if retrier.get("JitterStrategy") == "FULL" else pause_s


def _fail_execution(execution: dict, error: str, cause: str) -> None:
    if execution["status"] == "RUNNING":  # an aborted run stays ABORTED when its timeout passes
        _stock["_fail_execution"](execution, error, cause)


def _stop_execution(data: dict):
    answer = _stock["_stop_execution"](data)
    _release(data.get("executionArn", ""))
    return answer


def _release(execution_arn: str) -> None:
    """The token the execution waits for is dead, and its thread goes on to see that it was stopped."""
    task = sfn._task_tokens.pop(_open_tokens.get(execution_arn), None)
    if task:
        task["error"] = {"Error": "States.Aborted", "Cause": ""}
        task["event"].set()


def _start_execution(data: dict):
    if len(data.get("input", "").encode()) > _MAX_INPUT_BYTES:
        return sfn.error_response_json("InvalidExecutionInput", "Input is too large", 400)
    return _stock["_start_execution"](data)


def _run_execution(execution_arn: str) -> None:
    limit_s = _limit_s(execution_arn)
    timer = threading.Timer(limit_s or 0, contextvars.copy_context().run, (_time_out, execution_arn))
    timer.daemon = True
    if limit_s:
        timer.start()
    try:
        _stock["_run_execution"](execution_arn)
    except _Stopped:
        return
    finally:
        timer.cancel()


def _limit_s(execution_arn: str) -> float | None:
    execution = sfn._executions.get(execution_arn)
    machine = execution and sfn._state_machines.get(execution["stateMachineArn"])
    return json.loads(machine["definition"]).get("TimeoutSeconds") if machine else None


def _time_out(execution_arn: str) -> None:
    execution = sfn._executions[execution_arn]
    if execution["status"] != "RUNNING":
        return
    execution.update(status="TIMED_OUT", stopDate=sfn.now_iso())
    sfn._add_event(execution, "ExecutionTimedOut", {"executionTimedOutEventDetails": {}})
    sfn._emit_execution_status_event(execution)
    _release(execution_arn)
