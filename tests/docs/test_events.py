"""What leaves the supervisor is what docs/events.md and the samples say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from holdfast.application.news import BUDGET_WARNING, PHASE_CHANGED, budget_warned, phase_change
from holdfast.domain.errors import Rejected
from holdfast.domain.events import BudgetNearlySpent
from holdfast.domain.failure import CLASSES
from holdfast.domain.job import Job
from holdfast.domain.phase import Phase
from holdfast.messages.result_message import exit_class, refusal_id, refusal_message, result_id, result_message
from tests import builders as b

TEXT = (b.ROOT / "docs" / "events.md").read_text()
ENVELOPE = {"version", "id", "source", "account", "time", "region", "resources"}


def table(head: str) -> dict[str, str]:
    """Return first cell -> second cell of the table whose first head is `head`."""
    rows = TEXT.split(f"| {head} |", 1)[1].splitlines()[2:]
    cells = [row.split("|") for row in rows[: next((n for n, row in enumerate(rows) if not row.startswith("|")), None)]]
    return {cell[1].strip().strip("`"): cell[2].strip() for cell in cells}


def interrupted() -> Job:
    return replace(b.after(b.a_running_job(), b.saved(25), b.noticed()), id="demo-0123456789")


def ended(**changes: Any) -> Job:
    done = b.after(b.a_running_job(), b.saved(120, number=5), b.finished(), b.closed())
    return replace(done, **changes)


def test_the_event_of_a_change_of_phase_has_the_fields_that_are_documented_and_no_other() -> None:
    assert list(phase_change(interrupted())) == list(table("Field of the event"))


def test_the_sample_of_a_change_of_phase_is_one() -> None:
    sample = b.sample("news-phase-change.json")
    assert set(sample) == {*ENVELOPE, "detail-type", "detail"}
    assert (sample["source"], sample["detail-type"]) == ("holdfast", PHASE_CHANGED)
    assert sample["detail"] == json.loads(json.dumps(phase_change(interrupted())))


def test_the_event_of_a_budget_that_is_nearly_spent_has_the_documented_fields_and_a_sample() -> None:
    spent = BudgetNearlySpent(at=b.NOW + 7200, attempt=1, budget_usd=5.0, cost_usd=4.0)
    job = replace(b.after(b.a_running_job(budget_usd=5.0), spent), id="demo-0123456789")
    assert job.budget_warned is not None
    detail = budget_warned(job, job.budget_warned)
    assert list(detail) == list(table("Field of the warning"))
    sample = b.sample("news-budget-warning.json")
    assert (sample["source"], sample["detail-type"]) == ("holdfast", BUDGET_WARNING)
    assert sample["detail"] == json.loads(json.dumps(detail))


def test_a_result_has_the_fields_that_are_documented_and_no_other() -> None:
    most = result_message(ended(failure="crash", unpriced_s=30.0), bucket="saves")
    assert ["id", *sorted(most)] == ["id", *sorted(set(table("Field of the result")) - {"id"})]


def test_the_sample_of_a_result_is_one() -> None:
    job = ended()
    assert b.sample("result-completed.json") == {"id": result_id(job), **result_message(job, bucket="saves")}


def test_the_sample_of_a_refusal_is_one() -> None:
    body = json.dumps({"schema": "holdfast.job-request/1", "name": "x", "team": "research", "stepz": 1})
    refused = refusal_message(Rejected("unknown_field", "stepz is not a known field"), body)
    assert b.sample("result-refused.json") == {"id": refusal_id(body), **refused}
    assert set(refused) | {"id", "dedup_id", "job"} == set(table("Field of the refusal"))


def test_every_way_to_end_has_its_word_in_the_documents() -> None:
    told = set(table("Exit class"))
    assert told == {"completed", "cancelled", "gave_up", *CLASSES}
    for phase in (Phase.COMPLETED, Phase.CANCELLED, Phase.FAILED):
        for failure in (None, *CLASSES):
            assert exit_class(ended(phase=phase, failure=failure)) in told


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_is_told_of(phase: Phase) -> None:
    assert re.search(rf"`{phase.value}`", TEXT)


def test_an_event_and_a_result_of_a_gang_of_256_stay_small() -> None:
    gang = tuple(f"i-{number:017x}" for number in range(256))
    job = replace(ended(), held=gang, doomed=gang, reason="x" * 1_003)
    assert len(json.dumps(phase_change(job))) < 2_048
    assert len(json.dumps(result_message(job, bucket="saves"))) < 2_560
