"""job_contract.reports version 1, off the report queue -> a report, and the instance that really sent it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.domain.errors import Rejected
from holdfast.messages.aws_event import instance_id
from job_contract.reports import Report, decode_report
from job_contract.version import ContractError


def read_report(record: Mapping[str, Any]) -> tuple[Report, str]:
    """Return the report and its sender's instance id, both the same instance. Raises Rejected.

    SQS sets SenderId to `<role id>:<session>`, and the session of an instance role is the instance id: a node cannot
    speak for another one.
    """
    report = _decoded(record["body"])
    sender_id = str(record.get("attributes", {}).get("SenderId", ""))
    role_id, _, session = sender_id.rpartition(":")
    if not role_id or session != report.instance:
        raise Rejected(
            "wrong_sender", f"{report.kind} claims to come from {report.instance}, SenderId is {sender_id!r}"
        )
    return report, instance_id(session)


def _decoded(body: str) -> Report:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Rejected("not_json", f"the report is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise Rejected("not_json", f"the report must be a JSON object, not {type(message).__name__}")
    try:
        return decode_report(message)
    except ContractError as error:
        raise Rejected("bad_report", str(error)) from error
