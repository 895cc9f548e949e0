"""Jobs table stream (a job waits, a place, a hold or a quota moved) and a tick -> attempts are started."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.adapters.job_table import wakes_dispatch
from holdfast.application.dispatch import dispatch
from holdfast.runtime.observability import logger, tracer
from holdfast.runtime.wiring import supervisor


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, list[str]]:
    records = event.get("Records", [])
    if records and not any(wakes_dispatch(record["dynamodb"]) for record in records):
        return {"started": []}
    started = dispatch(supervisor())
    logger.info("dispatched", started=started)
    return {"started": started}
