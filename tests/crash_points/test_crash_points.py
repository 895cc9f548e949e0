"""A function may die just before or just after any call to AWS: the job lives on, once, and leaves nothing behind.

The whole is `make bench BENCH=crash-points`; here ten seeded crashes, and two proofs that a break would be seen.
"""

from __future__ import annotations

import pytest

from bench.crash_points import DAMAGES, MAIN, STORIES, crashes_of, explore, found_by, play, seeded

SEED = 20_261
FEWEST_POINTS = 60


def test_ten_seeded_crashes_leave_one_job_one_fleet_and_no_orphan() -> None:
    points = play(MAIN).points
    assert len(points) >= FEWEST_POINTS
    chosen = seeded(crashes_of(points), 10, SEED)
    calm, verdicts = explore(MAIN, lambda crash: crash in chosen)
    assert calm.problems == ()
    assert sorted(verdicts) == sorted(chosen)
    assert {str(crash): verdict.problems for crash, verdict in verdicts.items() if verdict.problems} == {}
    assert all(verdict.crashes == (crash,) for crash, verdict in verdicts.items())


@pytest.mark.parametrize("name", [name for name in STORIES if name != MAIN])
def test_a_story_that_nothing_disturbs_keeps_every_promise(name: str) -> None:
    assert play(name).problems == ()


def test_the_same_story_passes_the_same_points() -> None:
    assert play("cancelled while launching").points == play("cancelled while launching").points


@pytest.mark.parametrize(
    ("damage", "broken"),
    [("a new client token each time", "one live fleet"), ("no start in the sweep", "the job ends")],
)
def test_a_damaged_supervisor_is_found(damage: str, broken: str) -> None:
    assert damage in DAMAGES
    assert broken in found_by(damage)


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_damage_replaces_is_still_there(damage: str) -> None:
    with DAMAGES[damage]():
        pass
