"""Jobs table stream (a job became dispatchable) and a tick -> attempts are started."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.adapters.job_table import job_of
from holdfast.application.dispatch import dispatch
from holdfast.runtime.observability import logger, tracer
from holdfast.runtime.wiring import supervisor


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, list[str]]:
    images = [record["dynamodb"].get("NewImage", {}) for record in event.get("Records", [])]
    teams = {job.team for image in images if (job := job_of(image))} or supervisor().store.teams()
    started = dispatch(sorted(teams), supervisor())
    logger.info("dispatched", teams=sorted(teams), started=started)
    return {"started": started}
