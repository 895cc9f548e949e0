"""Schedule -> whatever an event should have told is found and set right; `{"dry_run": true}` only lists it."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.metrics import MetricUnit
from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.sweep import Finding, Sweep
from holdfast.runtime.observability import logger, measure, tracer
from holdfast.runtime.wiring import supervisor

LISTED = 500
"""Lambda answers with at most 6 MB."""


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    dry_run = event.get("dry_run") is True
    sweep = Sweep(supervisor(), dry_run=dry_run)
    try:
        findings = sweep.run()
    finally:
        # A round that could not look at every job tells what it found all the same, and then fails.
        report(sweep)
    if "dry_run" not in event:
        return {"findings": len(findings)}
    listed = [told(finding, supervisor().clock()) for finding in findings[:LISTED]]
    return {"findings": len(findings), "dry_run": dry_run, "listed": listed}


def report(sweep: Sweep) -> None:
    """What the round found is logged, and measured where it was not a dry run."""
    for finding in sweep.found:
        logger.warning("found" if sweep.dry_run else "swept", what=finding.what, who=finding.who, done=finding.done)
    for name, value in sweep.vitals.found.items() if not sweep.dry_run else ():
        measure(name, value, MetricUnit.Seconds if name.endswith("Seconds") else MetricUnit.Count)


def told(finding: Finding, now: float) -> dict[str, Any]:
    facts: dict[str, Any] = {"what": finding.what, "who": finding.who, "done": finding.done}
    machine = finding.orphan
    if machine is None:
        return facts
    return {
        **facts,
        "age_s": round(now - machine.launched_at),
        "instance_type": machine.instance_type,
        "zone": machine.zone,
    }
