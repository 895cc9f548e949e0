"""holdfast.result/1 -> what leaves on the result queue: how a job ended, or why a request was refused."""

from __future__ import annotations

import hashlib
from typing import Any

from holdfast.domain.cost import Cost, cost
from holdfast.domain.errors import Rejected
from holdfast.domain.job import Job
from holdfast.domain.phase import Phase
from holdfast.messages.envelope import open_envelope
from job_contract.checkpoint_layout import file_key, job_prefix

SCHEMA = "holdfast.result/1"
ECHOED_CHARACTERS = 128
REPORT_PAGE, REPORT_DATA = "report.html", "report.json"


def result_message(job: Job, *, bucket: str) -> dict[str, Any]:
    """Return the body of a job's one result. What is not known is left out, failure class and checkpoint included.

    `lost_steps` counts steps that a node had told and no committed save held when an attempt was closed.
    """
    total = cost(job, job.ended_at or job.phase_at)
    optional = {
        "failure": job.failure,
        "artifacts": artifacts(job, bucket),
        "cost_usd": known_usd(total),
        "unpriced_node_seconds": total.unpriced_s or None,
    }
    return {
        "schema": SCHEMA,
        "job": job.id,
        "name": job.name,
        "team": job.team,
        "phase": job.phase.value,
        "exit_class": exit_class(job),
        "reason": job.reason,
        "attempts": job.attempt,
        "step": job.step,
        "lost_steps": job.lost_steps,
        "interruptions": job.interruptions,
        "node_seconds": job.node_seconds,
        "submitted_at": job.submitted_at,
        "ended_at": job.ended_at,
        **{key: value for key, value in optional.items() if value is not None},
    }


def known_usd(total: Cost) -> float | None:
    """Return US dollars as they are told, to the hundredth of a cent."""
    return None if total.known_usd is None else round(total.known_usd, 4)


def exit_class(job: Job) -> str:
    """Return `completed`, `cancelled`, a class of failure.py, or `gave_up` for a job that never got to train."""
    if job.phase is not Phase.FAILED:
        return job.phase.value
    return job.failure or "gave_up"


def artifacts(job: Job, bucket: str) -> dict[str, str]:
    """Return the s3:// addresses of what the job leaves. The report is there moments after the result."""
    checkpoint = checkpoint_uri(job, bucket)
    report = f"s3://{bucket}/{job_prefix(job.team, job.id)}/{REPORT_PAGE}"
    return {"report": report, **({"checkpoint": checkpoint} if checkpoint else {})}


def checkpoint_uri(job: Job, bucket: str) -> str | None:
    """Return the s3:// address of the newest committed save, which `init_from` takes."""
    if job.saved is None:
        return None
    return f"s3://{bucket}/{file_key(job_prefix(job.team, job.id), job.saved.save, '')}"


def result_id(job: Job) -> str:
    """Return the deduplication id of a job's result: the same however often it is sent, another one for each branch."""
    return f"{job.id}#result" + (f"#{job.branch}" if job.branch else "")


def refusal_message(rejected: Rejected, body: str) -> dict[str, Any]:
    """Return the body of a refusal, with what identifies it to the sender, as far as that can be read."""
    return {"schema": SCHEMA, "refused": True, "code": rejected.code, "reason": rejected.reason, **_echo(body)}


def refusal_id(body: str) -> str:
    """Return the deduplication id of a refusal: the same whenever the same body is refused."""
    return f"refused#{hashlib.sha256(body.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _echo(body: str) -> dict[str, str]:
    try:
        message = open_envelope(body)
    except Rejected:
        return {}
    known = {key: message.get(key) for key in ("name", "team", "dedup_id", "job")}
    return {key: value[:ECHOED_CHARACTERS] for key, value in known.items() if isinstance(value, str)}
