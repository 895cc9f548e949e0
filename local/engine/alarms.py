"""Alarms as CloudWatch evaluates them: by dimension, with missing data, datapoints to alarm and the way back to OK.

Also the metrics they look at: queue depth and age, executions by how they ended, and what functions write as EMF.
"""

import json
import logging
import threading
import time
from collections.abc import Callable

from ministack.core import responses
from ministack.services import cloudwatch, lambda_svc, stepfunctions
from ministack.services import sqs as queues

from local.engine.events import EventSource
from local.engine.settings import ACCOUNT, REGION

NEEDS = {
    "ministack.services.cloudwatch": (
        "_evaluate_alarm",
        "_evaluate_all_alarms",
        "record_metric",
        "_metrics",
        "_calc_stats",
        "_stat_value",
        "_record_history",
        "_dispatch_alarm_actions",
        "_evaluate_parent_alarms",
    ),
    "ministack.services.stepfunctions": ("_emit_execution_status_event",),
    "ministack.services.lambda_svc": ("_emit_lambda_logs",),
    "ministack.services.sqs": ("_queues",),
    "ministack.core.responses": ("request_scope",),
}

_TICK_S = 1.0
_KEPT_POINTS = 900
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "GreaterThanOrEqualToThreshold": lambda value, threshold: value >= threshold,
    "GreaterThanThreshold": lambda value, threshold: value > threshold,
    "LessThanThreshold": lambda value, threshold: value < threshold,
    "LessThanOrEqualToThreshold": lambda value, threshold: value <= threshold,
}
_MISSING = {"breaching": True, "notBreaching": False}
_logger = logging.getLogger("alarms")


def apply(events: EventSource, period_factor: float) -> None:
    """Alarms of the account are evaluated each second; a period of 60 s lasts 60 * period_factor."""
    cloudwatch._evaluate_alarm = lambda alarm: _evaluate(alarm, events, period_factor)
    stepfunctions._emit_execution_status_event = _counted(stepfunctions._emit_execution_status_event)
    lambda_svc._emit_lambda_logs = _read(lambda_svc._emit_lambda_logs)
    threading.Thread(target=_tick, name="alarms", daemon=True).start()


def verdict(values: list[float | None], alarm: dict) -> str:
    """The state that the values of the last periods (newest first, None = no data) make of the alarm."""
    breaches = _COMPARE[alarm["ComparisonOperator"]]
    treat = alarm.get("TreatMissingData") or "missing"
    threshold = float(alarm["Threshold"])
    seen = [_MISSING.get(treat) if value is None else breaches(value, threshold) for value in values]
    needed = int(alarm.get("DatapointsToAlarm") or alarm.get("EvaluationPeriods") or 1)
    if seen.count(True) >= needed:
        return "ALARM"
    if any(one is not None for one in seen):
        return "OK"
    return alarm["StateValue"] if treat == "ignore" else "INSUFFICIENT_DATA"


def _evaluate(alarm: dict, events: EventSource, period_factor: float) -> None:
    if not alarm.get("Namespace") or not alarm.get("MetricName"):
        return
    old, new = alarm["StateValue"], verdict(_values(alarm, period_factor), alarm)
    if old == new:
        return
    reason = f"Threshold Crossed: {alarm['MetricName']} {alarm['ComparisonOperator']} {alarm['Threshold']}"
    alarm.update(StateValue=new, StateReason=reason, StateUpdatedTimestamp=int(time.time()))
    cloudwatch._record_history(alarm["AlarmName"], old, new, reason)
    cloudwatch._dispatch_alarm_actions(alarm, old, new, reason)
    cloudwatch._evaluate_parent_alarms(alarm)
    detail = {
        "alarmName": alarm["AlarmName"],
        "state": {"value": new, "reason": reason},
        "previousState": {"value": old},
    }
    events.put("aws.cloudwatch", "CloudWatch Alarm State Change", detail, [alarm["AlarmArn"]])


def _values(alarm: dict, period_factor: float) -> list[float | None]:
    dimensions = {one["Name"]: one["Value"] for one in alarm.get("Dimensions") or []}
    wanted = (alarm["Namespace"], alarm["MetricName"])
    points = [
        point
        for (namespace, name, _), bucket in list(cloudwatch._metrics.items())
        if (namespace, name) == wanted
        for point in list(bucket)
        if (point.get("Dimensions") or {}) == dimensions
    ]
    period_s, now = float(alarm.get("Period") or 60) * period_factor, time.time()
    statistic = alarm.get("ExtendedStatistic") or alarm.get("Statistic") or "Average"
    values: list[float | None] = []
    for number in range(int(alarm.get("EvaluationPeriods") or 1)):
        end = now - number * period_s
        window = [point for point in points if end - period_s < point["Timestamp"] <= end]
        values.append(cloudwatch._stat_value(cloudwatch._calc_stats(window), statistic, window) if window else None)
    return values


def _tick() -> None:
    while True:
        time.sleep(_TICK_S)
        with responses.request_scope(ACCOUNT, REGION):
            for queue in list(queues._queues.values()):
                _measure(queue)
            cloudwatch._evaluate_all_alarms()


def _measure(queue: dict) -> None:
    now, messages = time.time(), list(queue["messages"])
    visible = sum(message["visible_at"] <= now for message in messages)
    oldest = min((message["sent_at"] for message in messages), default=now)
    metrics = {
        "ApproximateNumberOfMessagesVisible": (visible, "Count"),
        "ApproximateNumberOfMessagesNotVisible": (len(messages) - visible, "Count"),
        "ApproximateAgeOfOldestMessage": (now - oldest, "Seconds"),
    }
    name = queue["attributes"]["QueueArn"].rsplit(":", 1)[-1]
    for metric, (value, unit) in metrics.items():
        cloudwatch.record_metric("AWS/SQS", metric, value, unit, {"QueueName": name})
    for (namespace, _, _), points in list(cloudwatch._metrics.items()):
        if namespace == "AWS/SQS":
            del points[:-_KEPT_POINTS]


def _counted(emit: Callable) -> Callable:
    names = {
        "RUNNING": "Started",
        "SUCCEEDED": "Succeeded",
        "FAILED": "Failed",
        "ABORTED": "Aborted",
        "TIMED_OUT": "TimedOut",
    }

    def emit_execution_status_event(execution: dict):
        dimensions = {"StateMachineArn": execution["stateMachineArn"]}
        metric = f"Executions{names[execution['status']]}"
        cloudwatch.record_metric("AWS/States", metric, 1, "Count", dimensions)
        return emit(execution)

    return emit_execution_status_event


def _read(emit: Callable) -> Callable:
    def emit_lambda_logs(func: dict, request_id: str, text: str, *rest, **options):
        for line in text.splitlines():
            if '"_aws"' in line:
                _record_embedded(line)
        return emit(func, request_id, text, *rest, **options)

    return emit_lambda_logs


def _record_embedded(line: str) -> None:
    """The metrics of one line in the embedded metric format; Powertools writes values as lists."""
    try:
        document = json.loads(line)
    except ValueError:
        _logger.warning("a line that looks like embedded metrics is no JSON: %.200s", line)
        return
    for directive in document["_aws"]["CloudWatchMetrics"]:
        for keys in directive["Dimensions"]:
            dimensions = {key: str(document[key]) for key in keys}
            for metric in directive["Metrics"]:
                values = document[metric["Name"]]
                for value in values if isinstance(values, list) else [values]:
                    unit = metric.get("Unit", "None")
                    cloudwatch.record_metric(directive["Namespace"], metric["Name"], value, unit, dimensions)
