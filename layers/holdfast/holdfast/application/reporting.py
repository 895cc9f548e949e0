"""The report of a run, beside what the run has made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.application.ports import Ports
from holdfast.domain.baseline import Baseline, model_of, one_node
from holdfast.domain.report import History, run_report, speed_of, steadiest, where_of
from holdfast.messages.report_page import report_page
from holdfast.messages.result_message import REPORT_DATA, REPORT_PAGE
from job_contract.checkpoint_layout import job_prefix


def write_report(job_id: str, ports: Ports) -> str | None:
    """report.json and report.html of an ended job are in the bucket; returns the prefix, None for a job that goes on.

    Told twice, it writes the same again; of a job that is tried again, the next end replaces it.
    """
    job = ports.store.load(job_id)
    if job is None or not job.over:
        return None
    prefix = job_prefix(job.team, job.id)
    request, history, metrics = (
        ports.store.request(job.id),
        ports.store.history(job.id),
        list(ports.reports.metrics(prefix)),
    )
    steps = asked_steps(request)
    speed = speed_of(history, metrics, alone(request, history, metrics, ports))
    report = run_report(job, history, metrics, steps=job.step if steps is None else steps, speed=speed)
    ports.reports.put(f"{prefix}/{REPORT_DATA}", "application/json", json.dumps(report).encode())
    ports.reports.put(f"{prefix}/{REPORT_PAGE}", "text/html; charset=utf-8", report_page(report).encode())
    return prefix


def alone(
    request: Mapping[str, Any] | None, history: History, metrics: Sequence[Mapping[str, Any]], ports: Ports
) -> Baseline | None:
    """Return the fastest known run of this model on one node of the type that the report is about, None without one."""
    line = steadiest(metrics)
    instance_type = where_of(history, line["attempt"]).get("instance_type") if line else None
    if request is None or not instance_type:
        return None
    return one_node(ports.store.baselines(model_of(json.loads(request["body"])), instance_type))


def asked_steps(request: Mapping[str, Any] | None) -> int | None:
    """Return the optimizer steps that an accepted request asks for, None where that is not known."""
    if request is None:
        return None
    steps = json.loads(request["body"]).get("training", {}).get("steps")
    return steps if isinstance(steps, int) else None
