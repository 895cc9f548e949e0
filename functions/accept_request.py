"""SQS requests -> the job is queued once, or its sender is told why not."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.batch import BatchProcessor, EventType, process_partial_response
from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.intake import take_in
from holdfast.domain.errors import Rejected
from holdfast.messages.result_message import refusal_id, refusal_message
from holdfast.runtime.observability import logger, tracer
from holdfast.runtime.wiring import supervisor

processor = BatchProcessor(event_type=EventType.SQS)


def take(record: Any) -> None:
    try:
        taken = take_in(record.body, supervisor(), bucket=supervisor().bucket)
    except Rejected as refusal:
        # A bad request stays bad: answered and acknowledged, it never reaches the dead-letter queue.
        logger.info("request refused", code=refusal.code, reason=refusal.reason)
        supervisor().outbox.result(refusal_id(record.body), "refused", refusal_message(refusal, record.body))
        return
    warnings = [note.code for note in taken.plan.warnings] if taken.plan else []
    logger.info("request accepted" if taken.plan else "request repeated", job_id=taken.job.id, warnings=warnings)


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> Any:
    return process_partial_response(event=event, record_handler=take, processor=processor, context=context)
