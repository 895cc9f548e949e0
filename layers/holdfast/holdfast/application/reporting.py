"""The report of a run, beside what the run has made."""

from __future__ import annotations

import json

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
    request = ports.store.request(job.id) or {"body": "{}"}
    steps = json.loads(request["body"]).get("training", {}).get("steps", job.step)
    report = run_report(job, ports.store.history(job.id), ports.reports.metrics(prefix), steps=steps)
    ports.reports.put(f"{prefix}/{REPORT_DATA}", "application/json", json.dumps(report).encode())
    ports.reports.put(f"{prefix}/{REPORT_PAGE}", "text/html; charset=utf-8", report_page(report).encode())
    return prefix
