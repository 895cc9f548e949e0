"""The shipped machine, run through all its endings by two interpreters with scripted functions."""

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("interpreters", Path(__file__).resolve().parent / "interpreters.py")
interpreters = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(interpreters)
Play = interpreters.Play

BUYING = ["Launch fleet", "Fleet bought?"]
READY = ["Await ready", "Training started?"]
CLOSING = ["Release fleet", "Close attempt"]
TRAINING = [*BUYING, *READY, "Watch training"]
TRAINED = {"launch_fleet": ["launched"], "ready": ["started"]}

PLAYS = {
    "finished": Play({**TRAINED, "training": ["ended"]}),
    "told-at-once": Play({**TRAINED, "training": ["at_once"]}),
    "interrupted": Play({**TRAINED, "training": ["interrupted"], "checkpoint": ["ended"]}),
    "checkpoint-late": Play(
        {**TRAINED, "training": ["interrupted"], "checkpoint": ["silent"]}, {"checkpoint_wait_s": 1}
    ),
    "refused": Play({"launch_fleet": ["refused"]}),
    "withdrawn": Play({"launch_fleet": ["withdrawn"]}),
    "again": Play({"launch_fleet": ["again", "again", "launched"], "ready": ["started"], "training": ["ended"]}),
    "launch-fails-once": Play({"launch_fleet": ["raises", "launched"], "ready": ["started"]}),
    "launch-fails": Play({"launch_fleet": ["raises"]}),
    "never-ready": Play({"launch_fleet": ["launched"], "ready": ["silent"]}, {"ready_wait_s": 1}),
    "not-started": Play({"launch_fleet": ["launched"], "ready": ["withdrawn"]}),
    "ready-fails": Play({"launch_fleet": ["launched"], "ready": ["raises"]}),
    "token-fails-once": Play({**TRAINED, "training": ["raises", "ended"]}),
    "training-fails": Play({**TRAINED, "training": ["raises"]}),
    "checkpoint-fails": Play({**TRAINED, "training": ["interrupted"], "checkpoint": ["raises"]}),
    "beating": Play({**TRAINED, "training": ["beating"]}, {"heartbeat_s": 2}, beats_s=3.5),
    "run-limit": Play({**TRAINED, "training": ["beating"]}, {"run_s": 3, "heartbeat_s": 2}),
    "silent-once": Play({**TRAINED, "training": ["silent", "ended"]}, {"heartbeat_s": 2}),
    "silent-then-late": Play({**TRAINED, "training": ["silent", "late"]}, {"heartbeat_s": 2}),
    "silent-then-interrupted": Play({**TRAINED, "training": ["silent", "interrupted"]}, {"heartbeat_s": 2}),
    "silent-twice": Play({**TRAINED, "training": ["silent"]}, {"heartbeat_s": 1}),
    "again-fails": Play({**TRAINED, "training": ["silent", "raises"]}, {"heartbeat_s": 2}),
    "release-fails-twice": Play({"launch_fleet": ["refused"], "release_fleet": ["raises", "raises", "ended"]}),
    "close-fails-twice": Play({"launch_fleet": ["refused"], "close_attempt": ["raises", "raises", "ended"]}),
}

PATHS = {
    "finished": [*TRAINING, "Interrupted?", *CLOSING],
    "told-at-once": [*TRAINING, "Interrupted?", *CLOSING],
    "interrupted": [*TRAINING, "Interrupted?", "Await checkpoint", *CLOSING],
    "checkpoint-late": [*TRAINING, "Interrupted?", "Await checkpoint", *CLOSING],
    "refused": [*BUYING, *CLOSING],
    "withdrawn": [*BUYING, *CLOSING],
    "again": [*BUYING, *BUYING, *TRAINING, "Interrupted?", *CLOSING],
    "launch-fails-once": [*TRAINING, "Interrupted?", *CLOSING],
    "launch-fails": ["Launch fleet", *CLOSING],
    "never-ready": [*BUYING, "Await ready", *CLOSING],
    "not-started": [*BUYING, *READY, *CLOSING],
    "ready-fails": [*BUYING, "Await ready", *CLOSING],
    "token-fails-once": [*TRAINING, "Interrupted?", *CLOSING],
    "training-fails": [*TRAINING, *CLOSING],
    "checkpoint-fails": [*TRAINING, "Interrupted?", "Await checkpoint", *CLOSING],
    "beating": [*TRAINING, "Interrupted?", *CLOSING],
    "run-limit": [*TRAINING, *CLOSING],
    "silent-once": [*TRAINING, "Watch again", "Interrupted?", *CLOSING],
    "silent-then-late": [*TRAINING, "Watch again", "Interrupted?", *CLOSING],
    "silent-then-interrupted": [*TRAINING, "Watch again", "Interrupted?", "Await checkpoint", *CLOSING],
    "silent-twice": [*TRAINING, "Watch again", *CLOSING],
    "again-fails": [*TRAINING, "Watch again", *CLOSING],
    "release-fails-twice": [*BUYING, *CLOSING],
    "close-fails-twice": [*BUYING, *CLOSING],
}


# moto 5.2.5 calls a silence States.Timeout, keeps the token of a retried wait and forgets an answer given at once.
FOR_MOTO = (
    "finished",
    "interrupted",
    "checkpoint-late",
    "refused",
    "again",
    "launch-fails-once",
    "never-ready",
    "not-started",
)


@pytest.fixture(scope="module")
def in_moto(tmp_path_factory):
    """The plays that moto's interpreter can run, run once."""
    folder = tmp_path_factory.mktemp("plays")
    with pytest.MonkeyPatch.context() as monkeypatch, interpreters.moto_machine(folder, monkeypatch) as machine:
        return interpreters.run_all(machine[0], folder, machine[1], {job: PLAYS[job] for job in FOR_MOTO})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every play, run once in the embedded cloud."""
    folder = tmp_path_factory.mktemp("plays")
    with interpreters.cloud_machine(folder, tmp_path_factory.mktemp("cloud")) as machine:
        return interpreters.run_all(machine[0], folder, machine[1], PLAYS)


def test_every_play_has_a_path():
    assert set(PLAYS) == set(PATHS)


@pytest.mark.parametrize("job", FOR_MOTO)
def test_another_interpreter_takes_the_same_path(in_moto, job):
    assert in_moto[job].states == PATHS[job]
    assert in_moto[job].status == "SUCCEEDED"
    assert in_moto[job].events("close_attempt") == [{"job": job, "attempt": 1}]


@pytest.mark.parametrize("job", PLAYS)
@pytest.mark.cloud
def test_the_run_takes_its_path_and_always_gives_the_fleet_back(runs, job):
    assert runs[job].states == PATHS[job]
    assert runs[job].status == "SUCCEEDED"
    assert runs[job].events("release_fleet")[-1] == runs[job].events("close_attempt")[-1] == {"job": job, "attempt": 1}


@pytest.mark.parametrize("job", PLAYS)
@pytest.mark.cloud
def test_the_attempt_is_closed_after_its_fleet_was_released_and_only_then(runs, job):
    last_of_all = [call["role"] for call in runs[job].calls if call["role"] in ("release_fleet", "close_attempt")]
    assert last_of_all == sorted(last_of_all, reverse=True)


@pytest.mark.cloud
def test_a_wait_names_its_job_its_attempt_what_it_waits_for_and_a_token(runs):
    for wait in ("ready", "training", "checkpoint"):
        [event] = runs["interrupted"].events(wait)
        assert len(event.pop("token")) > 10
        assert event == {"job": "interrupted", "attempt": 1, "wait": wait}


@pytest.mark.cloud
def test_the_wait_after_a_silence_says_so_and_has_a_token_of_its_own(runs):
    first, second = runs["silent-once"].events("training")
    assert "again" not in first
    assert second["again"] is True
    assert first["token"] != second["token"]


@pytest.mark.cloud
def test_the_token_of_a_silent_wait_is_dead(runs):
    assert runs["silent-then-late"].late_answer in ("TaskTimedOut", "TaskDoesNotExist")


@pytest.mark.cloud
def test_a_wait_whose_function_failed_is_left_again_with_another_token(runs):
    first, second = runs["token-fails-once"].events("training")
    assert first["token"] != second["token"]


@pytest.mark.parametrize(
    ("job", "role"),
    [
        ("launch-fails", "launch_fleet"),
        ("ready-fails", "ready"),
        ("training-fails", "training"),
        ("checkpoint-fails", "checkpoint"),
    ],
)
@pytest.mark.cloud
def test_a_step_that_goes_on_failing_is_tried_four_times_before_the_fleet_is_released(runs, job, role):
    assert len(runs[job].of(role)) == 4


@pytest.mark.parametrize(
    ("job", "role"), [("never-ready", "ready"), ("checkpoint-late", "checkpoint"), ("run-limit", "training")]
)
@pytest.mark.cloud
def test_a_passed_deadline_is_not_waited_for_again(runs, job, role):
    assert len(runs[job].of(role)) == 1


@pytest.mark.cloud
def test_release_and_close_are_repeated_until_they_succeed(runs):
    assert len(runs["release-fails-twice"].of("release_fleet")) == 3
    assert len(runs["release-fails-twice"].of("close_attempt")) == 1
    assert len(runs["close-fails-twice"].of("close_attempt")) == 3


@pytest.mark.cloud
def test_heartbeats_keep_a_wait_alive_for_longer_than_one_silence(runs):
    assert len(runs["beating"].of("training")) == 1
