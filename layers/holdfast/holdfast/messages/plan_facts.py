"""A request as a plan sees it, and a plan as it is stored and shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.domain.estimate import trained_parameters
from holdfast.domain.plan import Plan
from holdfast.domain.sizing import PlanRequest
from holdfast.messages.job_request import JobRequest, checkpoint_spec
from job_contract.version import plain

STORED_OPTIONS = 5
"""A request may name twenty types; what is stored beside it stays small."""


def plan_request(request: JobRequest, *, brought_bytes: int = 0) -> PlanRequest:
    """Return what the plan needs to know of the request; each node is brought so many bytes of data."""
    training, fleet, limits = request.training, request.fleet, request.limits
    interval = checkpoint_spec(request)
    return PlanRequest(
        nodes=fleet.nodes,
        min_nodes=fleet.fewest_nodes,
        instance_types=fleet.instance_types,
        market=fleet.market,
        zones=() if fleet.zones == "any" else fleet.zones,
        model=training.model.as_spec(),
        steps=training.steps,
        global_batch=training.global_batch,
        sequence_length=training.sequence_length,
        micro_batch=training.micro_batch,
        parallel=training.parallel,
        precision=training.precision,
        interval_steps=interval.interval_steps,
        interval_s=interval.interval_s,
        attempts=limits.attempts,
        run_s=limits.run_s,
        budget_usd=limits.budget_usd,
        finish_by_at=limits.finish_by_at,
        own_image=request.image is not None,
        trained=trained_parameters(training.model.as_spec(), training.lora_spec),
        checkpointing=training.activation_checkpointing or "none",
        brought_bytes=brought_bytes,
    )


def plan_data(made: Plan) -> Mapping[str, Any]:
    """Return the plan as JSON-ready data; what is not known is left out."""
    return {**plain(made), "options": [plain(option) for option in made.options[:STORED_OPTIONS]]}
