"""SQS node reports -> what a member node told of itself is recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from aws_lambda_powertools.utilities.batch import BatchProcessor, EventType, process_partial_response
from aws_lambda_powertools.utilities.typing import LambdaContext

from holdfast.application.node_reports import LOG_TAIL_CHARACTERS, NodeReports
from holdfast.domain.errors import Rejected
from holdfast.messages.node_report import read_report
from holdfast.runtime.observability import logger, measure, set_aside, tracer
from holdfast.runtime.wiring import supervisor
from job_contract.reports import Failed, Report

processor = BatchProcessor(event_type=EventType.SQS)


def take(record: Any, reports: NodeReports) -> None:
    try:
        report, _ = read_report(record.raw_event)
        reports.take(report)
    except Rejected as refusal:
        # Nobody waits for an answer, and the message would be no better the next time.
        set_aside(refusal, "report")
        return
    if isinstance(report, Failed):
        logger.warning(
            "ranks failed", job_id=report.job, failure=report.failure, log_tail=report.log_tail[-LOG_TAIL_CHARACTERS:]
        )
    logger.info("report", job_id=report.job, attempt=report.attempt, instance_id=report.instance, kind=report.kind)


def readable(records: Iterable[Any]) -> Iterator[Report]:
    for record in records:
        with suppress(Rejected):
            yield read_report(record)[0]


@logger.inject_lambda_context(clear_state=True)
@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: LambdaContext) -> Any:
    reports = NodeReports(supervisor(), list(readable(event["Records"])))
    taking = partial(take, reports=reports)
    try:
        return process_partial_response(event=event, record_handler=taking, processor=processor, context=context)
    finally:
        for name, value in reports.found.items():
            measure(name, value)
