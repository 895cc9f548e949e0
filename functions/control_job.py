"""SQS control -> the job, or the queue, does what its user wants, or the sender is told why not."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.utilities.batch import BatchProcessor, EventType, process_partial_response
from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.control import obey, overtook_its_submit
from holdfast.domain.errors import Rejected
from holdfast.messages.control_request import read_control
from holdfast.messages.result_message import refusal_id, refusal_message
from holdfast.runtime.observability import logger, tracer
from holdfast.runtime.wiring import supervisor

processor = BatchProcessor(event_type=EventType.SQS)


def take(record: Any) -> None:
    try:
        job = obey(read_control(record.body), supervisor(), bucket=supervisor().bucket)
    except Rejected as refusal:
        if overtook_its_submit(refusal, received=int(record.attributes.approximate_receive_count)):
            raise
        logger.info("control refused", code=refusal.code, reason=refusal.reason)
        supervisor().outbox.result(refusal_id(record.body), "refused", refusal_message(refusal, record.body))
        return
    logger.info("control taken", job_id=job and job.id, phase=job and job.phase, intent=job and job.intent)


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> Any:
    return process_partial_response(event=event, record_handler=take, processor=processor, context=context)
