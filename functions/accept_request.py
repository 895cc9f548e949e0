"""SQS requests -> the job is queued once, or its sender is told why not."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.batch import BatchProcessor, EventType, process_partial_response
from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.intake import accept
from holdfast.domain.errors import Rejected
from holdfast.messages.acceptance import read_acceptance
from holdfast.messages.result_message import refusal_id, refusal_message
from holdfast.runtime.observability import logger, tracer
from holdfast.runtime.wiring import supervisor

processor = BatchProcessor(event_type=EventType.SQS)


def take(record: Any) -> None:
    try:
        order = read_acceptance(record.body, now=supervisor().clock())
        new = accept(order.job, order.request, order.spec, store=supervisor().store)
    except Rejected as refusal:
        # A bad request stays bad: answered and acknowledged, it never reaches the dead-letter queue.
        logger.info("request refused", code=refusal.code, reason=refusal.reason)
        supervisor().outbox.result(refusal_id(record.body), "refused", refusal_message(refusal, record.body))
        return
    logger.info("request accepted" if new else "request repeated", job_id=order.job.id)


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> Any:
    return process_partial_response(event=event, record_handler=take, processor=processor, context=context)
