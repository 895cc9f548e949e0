"""Which node is slow by its own doing, and when that is sure."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.domain.straggler import SLOW_REPORTS, Slow, Straggler, counted, slow_nodes, straggler


def judged(*reports: Sequence[float], every_s: float = 300.0) -> Straggler | None:
    """Return who is a straggler after these reports, each with the nodes' own times."""
    counts: tuple[Slow, ...] = ()
    found = None
    for number, node_ms in enumerate(reports):
        now = every_s * number
        slow = slow_nodes(node_ms)
        counts = counted(counts, 1, slow, now)
        found = straggler(counts, slow, now)
    return found


@pytest.mark.parametrize(
    ("node_ms", "slow"),
    [
        ([100.0, 135.0, 101.0, 99.0], [1]),
        ([100.0, 125.0, 101.0, 99.0], []),
        ([100.0, 200.0], [1]),
        ([100.0, 200.0, 300.0], [2]),
        ([2.0, 4.0], []),
        ([100.0], []),
        ([], []),
        ([0.0, 100.0], []),
    ],
    ids=["35 %", "25 %", "two nodes", "three speeds", "noise", "alone", "none", "not measured"],
)
def test_a_node_is_slow_against_the_median_of_the_others(node_ms: list[float], slow: list[int]) -> None:
    assert list(slow_nodes(node_ms)) == slow


def test_one_report_too_few_is_no_straggler_and_one_good_one_starts_anew() -> None:
    bad, good = [100.0, 100.0, 150.0], [100.0, 100.0, 101.0]
    assert judged(*[bad] * (SLOW_REPORTS - 1)) is None
    assert judged(*[bad] * (SLOW_REPORTS - 1), good, bad) is None
    found = judged(*[bad] * SLOW_REPORTS)
    assert (found and (found.node_rank, found.own_ms, found.median_ms)) == (2, 150.0, 100.0)
    assert found is not None
    assert "i-2 needs 150 ms a step where the others need 100" in found.sentence("i-2")


def test_the_slowest_of_several_is_named() -> None:
    found = judged(*[[100.0, 150.0, 100.0, 300.0, 100.0]] * SLOW_REPORTS)
    assert found is not None
    assert found.node_rank == 3


def test_five_reports_within_seconds_are_no_straggler_yet() -> None:
    assert judged(*[[100.0, 200.0]] * 10, every_s=2.0) is None
    assert judged(*[[100.0, 200.0]] * 200, every_s=2.0) is not None


def test_counts_of_another_attempt_are_forgotten_since_ranks_change_hands() -> None:
    slow = slow_nodes([100.0, 200.0])
    before = (
        Slow(attempt=1, node_rank=1, reports=4, since_at=1.0),
        Slow(attempt=2, node_rank=0, reports=3, since_at=2.0),
    )
    assert counted(before, 2, slow, 9.0) == (Slow(attempt=2, node_rank=1, reports=1, since_at=9.0),)
