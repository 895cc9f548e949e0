"""Which saves may go, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.domain.job import Job
from holdfast.domain.retention import expired
from job_contract.checkpoint_layout import Manifest, SavePointer, save_name
from tests import builders as b


def manifest(step: int, attempt: int = 1, number: int = 1, *, finite: bool = True) -> Manifest:
    return Manifest(
        job="demo-0123456789", attempt=attempt, step=step, save=save_name(step, attempt, number), world_size=1,
        mesh=(1,), config_hash="c", corpus_digest="d", versions={}, facts={"finite": finite}, files=(),
    )  # fmt: skip


LINE = [manifest(10 * number, 1, number) for number in (5, 4, 3, 2, 1)]
NAMES = [one.save for one in LINE]


def job(keep: int = 2, **changes: object) -> Job:
    """Return a running job of attempt 1 whose newest save is the first of LINE."""
    return replace(b.after(b.a_running_job(), b.saved(50, 1, 5)), keep=keep, **changes)


def test_what_is_older_than_the_newest_kept_saves_goes() -> None:
    assert expired(job(), NAMES, LINE[:2]) == [NAMES[4], NAMES[3], NAMES[2]]
    assert expired(job(keep=5), NAMES, LINE) == []
    assert expired(job(keep=6), NAMES, LINE) == []


def test_a_save_in_flight_is_newer_and_stays_and_an_abandoned_one_goes_with_its_time() -> None:
    in_flight, abandoned = save_name(60, 1, 6), save_name(15, 1, 1)
    assert expired(job(), [in_flight, abandoned, *NAMES[:2]], LINE[:2]) == [abandoned]


def test_saves_that_were_not_finite_are_not_counted() -> None:
    line = [LINE[0], manifest(40, 1, 4, finite=False), LINE[2]]
    assert expired(job(), NAMES, line) == [NAMES[4], NAMES[3]]


@pytest.mark.parametrize(
    "hinder",
    [
        {"attempt": 2},
        {"attempt_open": False},
        {"saved": None},
    ],
    ids=["a new attempt without a save of its own", "no live attempt", "nothing reported"],
)
def test_nothing_goes_while_an_attempt_may_still_fall_back(hinder: dict[str, object]) -> None:
    assert expired(job(**hinder), NAMES, LINE) == []


def test_the_first_commit_of_the_new_attempt_lets_older_saves_go_with_the_leftovers_of_the_old_attempt() -> None:
    leftover = save_name(60, 1, 6)
    now = replace(b.after(job(keep=1), replace(b.saved(55, 2, 1), attempt=1)), attempt=2)
    assert expired(now, [leftover, *NAMES, save_name(55, 2, 1)], [manifest(55, 2)]) == [*reversed(NAMES), leftover]


def test_nothing_goes_where_the_line_cannot_be_read() -> None:
    assert expired(job(), NAMES, LINE[:1]) == []
    assert expired(job(), NAMES, []) == []


def test_the_save_at_which_a_branch_began_stays() -> None:
    start = SavePointer(save=NAMES[4], manifest_sha256="a" * 64)
    assert expired(job(retry_from=start), NAMES, LINE[:2]) == [NAMES[3], NAMES[2]]


def test_of_a_job_that_is_over_the_kept_saves_are_left_if_its_last_attempt_made_the_newest() -> None:
    over = b.after(job(), b.finished(), b.closed())
    assert over.over
    assert expired(over, NAMES, LINE[:2]) == [NAMES[4], NAMES[3], NAMES[2]]
    assert expired(replace(over, attempt=2), NAMES, LINE[:2]) == []
