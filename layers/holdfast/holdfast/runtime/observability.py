"""One logger, tracer and metrics sink for every door."""

from __future__ import annotations

from aws_lambda_powertools.logging import Logger
from aws_lambda_powertools.metrics import Metrics, MetricUnit, single_metric
from aws_lambda_powertools.tracing import Tracer

from holdfast.runtime.settings import settings

logger = Logger(service="holdfast")
metrics = Metrics(namespace="Holdfast", service="holdfast")
# Patching botocore costs 140 ms of every cold start; the doors' own segments say what we need.
tracer = Tracer(service="holdfast", auto_patch=False)


def measure(name: str, value: float = 1.0, unit: MetricUnit = MetricUnit.Count) -> None:
    """The value is in the metrics of this stack; a zero is never sent, so that an idle stack sends nothing."""
    if value > 0:
        with single_metric(name=name, unit=unit, value=value, namespace="Holdfast") as metric:
            metric.add_dimension(name="stack", value=settings().stack)
