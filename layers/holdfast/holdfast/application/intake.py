"""Accepts a request once, whatever the queue delivers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.application.ports import JobStore
from holdfast.domain.errors import Rejected
from holdfast.domain.job import Job
from job_contract.spec import JobSpec


def accept(job: Job, request: Mapping[str, Any], spec: JobSpec, *, store: JobStore) -> bool:
    """The job is queued; False when the same request had been accepted before.

    `request` holds `body` and `body_sha256`; its `plan`, where there is one, says what a node of the first candidate
    takes of the quotas. Raises Rejected when the identity is taken by another body.
    """
    if store.create(_sized(job, request), request, spec):
        return True
    known = store.request(job.id)
    if known is None or known["body_sha256"] != request["body_sha256"]:
        raise Rejected(
            "identity_conflict",
            f"{job.id}: dedup_id was used before with another body; send the change under a new dedup_id",
        )
    return False


def _sized(job: Job, request: Mapping[str, Any]) -> Job:
    """Return the job with the vCPUs and GPUs of a node; without a plan only its nodes count against quotas."""
    plan = request.get("plan") or {}
    return replace(
        job,
        vcpus_per_node=int(plan.get("vcpus_per_node", job.vcpus_per_node)),
        gpus_per_node=int(plan.get("gpus_per_node", job.gpus_per_node)),
    )
