"""The report of a run, beside what the run has made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.application.ports import Ports
from holdfast.domain.report import run_report
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
    steps = asked_steps(ports.store.request(job.id))
    metrics = ports.reports.metrics(prefix)
    report = run_report(job, ports.store.history(job.id), metrics, steps=job.step if steps is None else steps)
    ports.reports.put(f"{prefix}/{REPORT_DATA}", "application/json", json.dumps(report).encode())
    ports.reports.put(f"{prefix}/{REPORT_PAGE}", "text/html; charset=utf-8", report_page(report).encode())
    return prefix


def asked_steps(request: Mapping[str, Any] | None) -> int | None:
    """Return the optimizer steps that an accepted request asks for, None where that is not known."""
    if request is None:
        return None
    steps = json.loads(request["body"]).get("training", {}).get("steps")
    return steps if isinstance(steps, int) else None
