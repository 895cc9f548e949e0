"""Our own "Training Job Phase Changed" (holdfast.phase-change/1) -> which job it tells of, and whether that is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.messages.aws_event import AwsDetail, parsed


class PhaseChangeDetail(AwsDetail):
    job: str
    over: bool


class PhaseChange(AwsDetail):
    detail: PhaseChangeDetail


def read_phase_change(event: Mapping[str, Any]) -> PhaseChangeDetail:
    """Return what the event tells. Raises Rejected."""
    return parsed(PhaseChange, event).detail
