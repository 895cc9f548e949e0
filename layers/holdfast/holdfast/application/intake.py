"""Accepts a request once, whatever the queue delivers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.application.ports import JobStore
from holdfast.domain.errors import Rejected
from holdfast.domain.job import Job
from job_contract.spec import JobSpec


def accept(job: Job, request: Mapping[str, Any], spec: JobSpec, *, store: JobStore) -> bool:
    """The job is queued; False when the same request had been accepted before.

    `request` holds `body` and `body_sha256`. Raises Rejected when the identity is taken by another body.
    """
    if store.create(job, request, spec):
        return True
    known = store.request(job.id)
    if known is None or known["body_sha256"] != request["body_sha256"]:
        raise Rejected(
            "identity_conflict",
            f"{job.id}: dedup_id was used before with another body; send the change under a new dedup_id",
        )
    return False
