"""One logger, tracer and metrics sink for every door."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.logging import Logger
from aws_lambda_powertools.metrics import Metrics, MetricUnit, single_metric
from aws_lambda_powertools.tracing import Tracer

from holdfast.application.notices import Fate, Told
from holdfast.domain.errors import Rejected
from holdfast.runtime.settings import settings

NAMESPACE = "Holdfast"

logger = Logger(service="holdfast")
metrics = Metrics(namespace=NAMESPACE, service="holdfast")
# Patching botocore costs 140 ms of every cold start; the doors' own segments say what we need.
tracer = Tracer(service="holdfast", auto_patch=False)

COUNTED = {Fate.FOREIGN: "ForeignInstance", Fate.LATE: "LateNotice"}
"""A steady number of foreign instances is normal: rules of EventBridge cannot tell our machines from others."""


def count(name: str) -> None:
    """One more of `name` is in the metrics; what does not happen is never sent."""
    with single_metric(name=name, unit=MetricUnit.Count, value=1, namespace=NAMESPACE) as metric:
        metric.add_dimension(name="service", value="holdfast")


def set_aside(refusal: Rejected, what: str = "event") -> None:
    """What can never be used is acknowledged, logged with the reason, and counted."""
    logger.warning(f"{what} set aside", code=refusal.code, reason=refusal.reason)
    count("SetAside")


def tell(what: str, told: Told, **more: Any) -> None:
    """What became of a notice is logged, and counted when it changed nothing."""
    job = told.job
    logger.info(
        what, instance_id=told.instance, fate=told.fate, job_id=job and job.id, phase=job and job.phase.value, **more
    )
    if told.fate in COUNTED:
        count(COUNTED[told.fate])


def measure(name: str, value: float = 1.0, unit: MetricUnit = MetricUnit.Count) -> None:
    """The value is in the metrics of this stack; a zero is never sent, so that an idle stack sends nothing."""
    if value > 0:
        with single_metric(name=name, unit=unit, value=value, namespace="Holdfast") as metric:
            metric.add_dimension(name="stack", value=settings().stack)
