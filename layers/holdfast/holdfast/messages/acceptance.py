"""A request as the supervisor takes it in: the job's first row, the spec for its nodes, the machines to ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.domain.errors import Rejected
from holdfast.domain.job import Job
from holdfast.domain.locations import dataset_place, team_key
from holdfast.domain.placement import Candidate, candidates
from holdfast.domain.plan import Plan
from holdfast.messages.job_request import (
    JobRequest,
    body_sha256,
    canonical_body,
    job_id,
    node_spec,
    read_request,
    request_identity,
)
from holdfast.messages.plan_facts import plan_data
from job_contract.checkpoint_layout import job_prefix
from job_contract.spec import DataSpec, EvaluationSpec, JobSpec

ONE_RANK_PER_GPU = 0


@dataclass(frozen=True)
class Acceptance:
    """`brought_bytes` is what each node keeps of data on its disk at least, as far as that is known."""

    job: Job
    request: Mapping[str, Any]
    spec: JobSpec
    asked: JobRequest
    brought_bytes: int = 0


def read_acceptance(body: str, *, now: float, bucket: str | None = None) -> Acceptance:
    """Return what is to be stored for the request in a message's body. Raises Rejected.

    `bucket` is the stack's own, None where it is not known.
    """
    return acceptance_of(read_request(body), now=now, bucket=bucket)


def acceptance_of(request: JobRequest, *, now: float, bucket: str | None = None) -> Acceptance:
    """Return what is to be stored for the request. Raises Rejected."""
    _refuse_foreign_places(request, bucket)
    _refuse_what_is_not_built(request)
    identity = job_id(request)
    spec = node_spec(request, identity, ranks_per_node=ONE_RANK_PER_GPU)
    job = Job(
        id=identity,
        team=request.team,
        name=request.name,
        priority=request.priority,
        submitted_at=now,
        phase_at=now,
        spec_id=spec.spec_id,
        nodes=request.fleet.nodes,
        market=request.fleet.market,
        attempts_limit=request.limits.attempts,
        run_s=request.limits.run_s,
        wait_s=request.limits.wait_s,
        min_nodes=request.fleet.fewest_nodes,
        budget_usd=request.limits.budget_usd,
        report_s=request.report_s,
        keep=request.checkpoint.keep,
        finish_by_at=request.limits.finish_by_at,
    )
    stored = {"body": canonical_body(request).decode(), "body_sha256": body_sha256(request)}
    if request.dedup_id is not None:
        stored["identity"] = request_identity(request)
    return Acceptance(job, stored, spec, request)


def planned(order: Acceptance, made: Plan) -> Acceptance:
    """Return the order with its plan: stored beside the body, and with the spec that the plan chose."""
    spec = node_spec(
        order.asked,
        order.job.id,
        ranks_per_node=ONE_RANK_PER_GPU,
        parallel=made.parallel,
        data=order.spec.training.data,
        evaluation=order.spec.training.evaluation,
        init_sha256=order.spec.training.init_sha256,
    )
    return Acceptance(
        replace(order.job, spec_id=spec.spec_id), {**order.request, "plan": plan_data(made)}, spec, order.asked
    )


def with_data(
    order: Acceptance, data: DataSpec, evaluation: EvaluationSpec | None, *, init_sha256: str | None = None
) -> Acceptance:
    """Return the order whose nodes train on these data, evaluate so, and start from the weights of this digest."""
    spec = node_spec(
        order.asked,
        order.job.id,
        ranks_per_node=ONE_RANK_PER_GPU,
        data=data,
        evaluation=evaluation,
        init_sha256=init_sha256,
    )
    return replace(order, job=replace(order.job, spec_id=spec.spec_id), spec=spec)


def candidates_of(request: JobRequest, nodes: int | None = None) -> tuple[Candidate, ...]:
    """Return the machines to ask for, best first; so many as the request says, or as a resume has made of it."""
    fleet = request.fleet
    wanted = nodes or fleet.nodes
    zones = () if fleet.zones == "any" else fleet.zones
    return candidates(
        instance_types=fleet.instance_types,
        market=fleet.market,
        zones=zones,
        nodes=wanted,
        fewest=min(fleet.min_nodes, wanted) if fleet.min_nodes is not None else None,
        on_demand_floor=fleet.on_demand_floor,
        reservation=fleet.reservation,
    )


def prefix_of(request: JobRequest) -> str:
    """Return where the job's checkpoints live in the bucket."""
    return job_prefix(request.team, job_id(request))


def _refuse_foreign_places(request: JobRequest, bucket: str | None) -> None:
    """No address leaves the team's own part of the checkpoint bucket, however it is written."""
    evaluation = request.training.evaluation
    places = {
        "training.data.uri": request.training.data.uri,
        "training.evaluation.data.uri": evaluation.data.uri if evaluation else None,
    }
    for field, uri in places.items():
        if uri is not None:
            dataset_place(uri, field, bucket=bucket, team=request.team)
    saves = {
        "training.init_from": _in_a_bucket(request.training.init_from),
        "checkpoint.resume_from": request.checkpoint.resume_from,
    }
    for field, uri in saves.items():
        if uri is not None:
            team_key(uri, field, bucket=bucket, team=request.team)


def _in_a_bucket(uri: str | None) -> str | None:
    return uri if uri is not None and uri.startswith("s3://") else None


def _refuse_what_is_not_built(request: JobRequest) -> None:
    """The format has fields whose work comes with a later release: better refused than silently left out."""
    later = request.checkpoint.resume_from
    if later is not None:
        raise Rejected(
            "not_in_this_release", f"checkpoint.resume_from = {later!r}: this release cannot do that yet; leave it out"
        )
