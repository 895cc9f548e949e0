"""Accepts a request once, whatever the queue delivers, if it can work at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.application.datasets import pinned
from holdfast.application.ports import Catalogue, JobStore, Ports
from holdfast.application.requests import read_order
from holdfast.domain.errors import Rejected
from holdfast.domain.job import Job
from holdfast.domain.plan import Plan, plan
from holdfast.messages.acceptance import Acceptance, planned
from holdfast.messages.plan_facts import plan_request
from job_contract.spec import JobSpec


@dataclass(frozen=True)
class Taken:
    """The job of a request; `plan` None = the request had been accepted before."""

    job: Job
    plan: Plan | None


def take_in(body: str, ports: Ports, *, bucket: str | None = None) -> Taken:
    """The job is queued with its plan. Raises Rejected for what cannot work, Unavailable when AWS cannot say now.

    What was accepted once stays accepted: a second delivery is not judged again by what AWS offers by then.
    """
    order = read_order(body, templates=ports.store, files=ports.request_files, now=ports.clock(), bucket=bucket)
    if accepted_before(order.job, order.request, ports.store):
        return Taken(order.job, None)
    order = pinned(order, registry=ports.store, files=ports.request_files, bucket=bucket)
    made = plan_for(order, ports.catalogue, now=ports.clock())
    if made.refusal is not None:
        raise Rejected(made.refusal.code, made.refusal.text)
    order = planned(order, made)
    new = accept(order.job, order.request, order.spec, store=ports.store)
    return Taken(order.job, made if new else None)


def plan_for(order: Acceptance, catalogue: Catalogue, *, now: float) -> Plan:
    """Return the plan of an order against what AWS offers now. Raises Unavailable."""
    fleet = order.asked.fleet
    return plan(
        plan_request(order.asked, brought_bytes=order.brought_bytes),
        catalogue.offers(fleet.instance_types, fleet.market),
        now=now,
    )


def accept(job: Job, request: Mapping[str, Any], spec: JobSpec, *, store: JobStore) -> bool:
    """The job is queued; False when the same request had been accepted before.

    `request` holds `body` and `body_sha256`; its `plan`, where there is one, says what a node of the first candidate
    takes of the quotas. Raises Rejected when the identity is taken by another body.
    """
    if store.create(_sized(job, request), request, spec):
        return True
    accepted_before(job, request, store)
    return False


def accepted_before(job: Job, request: Mapping[str, Any], store: JobStore) -> bool:
    """Return whether the same request was accepted before. Raises Rejected when another one was, with the way out.

    A job's id is made of its name too, so another name under one dedup_id is looked for by the identity itself.
    """
    identity = request.get("identity")
    holder = store.holder(identity) if identity else None
    if holder is not None and holder["job"] != job.id:
        raise Rejected(
            "identity_conflict",
            f"dedup_id was used before for {holder['job']}, under the name {holder['name']!r}; send the same request "
            "under that name, or another one under a new dedup_id",
        )
    known = store.request(job.id)
    if known is None:
        return False
    if known["body_sha256"] != request["body_sha256"]:
        raise Rejected(
            "identity_conflict",
            f"{job.id}: dedup_id {_dedup_id(request)!r} was used before with another body; send the change under a new "
            "dedup_id",
        )
    return True


def _dedup_id(request: Mapping[str, Any]) -> Any:
    return json.loads(request["body"]).get("dedup_id")


def _sized(job: Job, request: Mapping[str, Any]) -> Job:
    """Return the job with the vCPUs and GPUs of a node; without a plan only its nodes count against quotas."""
    plan = request.get("plan") or {}
    return replace(
        job,
        vcpus_per_node=int(plan.get("vcpus_per_node", job.vcpus_per_node)),
        gpus_per_node=int(plan.get("gpus_per_node", job.gpus_per_node)),
    )
