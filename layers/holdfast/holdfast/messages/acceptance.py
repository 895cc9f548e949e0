"""A request as the supervisor takes it in: the job's first row, the spec for its nodes, the machines to ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.domain.errors import Rejected
from holdfast.domain.job import Job
from holdfast.domain.placement import Candidate, candidates
from holdfast.messages.job_request import JobRequest, body_sha256, canonical_body, job_id, node_spec, read_request
from job_contract.checkpoint_layout import job_prefix
from job_contract.spec import JobSpec

ONE_RANK_PER_GPU = 0


@dataclass(frozen=True)
class Acceptance:
    job: Job
    request: Mapping[str, Any]
    spec: JobSpec


def read_acceptance(body: str, *, now: float) -> Acceptance:
    """Return what is to be stored for the request in a message's body. Raises Rejected."""
    request = read_request(body)
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
    )
    stored = {"body": canonical_body(request).decode(), "body_sha256": body_sha256(request)}
    return Acceptance(job, stored, spec)


def candidates_of(request: JobRequest) -> tuple[Candidate, ...]:
    """Return the machines to ask for, best first."""
    fleet = request.fleet
    zones = () if fleet.zones == "any" else fleet.zones
    return candidates(
        instance_types=fleet.instance_types,
        market=fleet.market,
        zones=zones,
        nodes=fleet.nodes,
        fewest=fleet.min_nodes,
        on_demand_floor=fleet.on_demand_floor,
        reservation=fleet.reservation,
    )


def prefix_of(request: JobRequest) -> str:
    """Return where the job's checkpoints live in the bucket."""
    return job_prefix(request.team, job_id(request))


def _refuse_what_is_not_built(request: JobRequest) -> None:
    """The format has fields whose work comes with a later release: better refused than silently left out."""
    later = {
        "training.data.uri": request.training.data.uri,
        "training.init_from": request.training.init_from,
        "checkpoint.resume_from": request.checkpoint.resume_from,
    }
    asked = [f"{name} = {value!r}" for name, value in later.items() if value is not None]
    if asked:
        raise Rejected("not_in_this_release", f"{', '.join(asked)}: this release cannot do that yet; leave it out")
