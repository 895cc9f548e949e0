"""Jobs table stream -> each change of phase is on our bus, each end on the result queue, what has ended gets a date."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.batch import BatchProcessor, EventType, process_partial_response
from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.adapters.job_table import job_of
from holdfast.application.news import publish, remember
from holdfast.runtime.observability import logger, tracer
from holdfast.runtime.settings import settings
from holdfast.runtime.wiring import supervisor

processor = BatchProcessor(event_type=EventType.DynamoDBStreams)


def tell(record: Any) -> None:
    images = record.raw_event["dynamodb"]
    before, after = job_of(images.get("OldImage", {})), job_of(images.get("NewImage", {}))
    if after is not None and publish(before, after, bucket=settings().bucket, outbox=supervisor().outbox):
        remember(before, after, supervisor().store)
        logger.info("told", job_id=after.id, attempt=after.attempt, phase=after.phase, news=after.news)


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> Any:
    return process_partial_response(event=event, record_handler=tell, processor=processor, context=context)
