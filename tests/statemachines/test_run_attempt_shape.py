"""What can be read off the shipped machine without running it."""

import ast
import json
import re
from pathlib import Path

import pytest
from statelint.linter import Linter

from holdfast.application.launch import READY_WAIT_S
from holdfast.domain.notices import checkpoint_wait_s
from holdfast.domain.obligations import answers_for
from holdfast.domain.placement import CALLS_AN_HOUR
from holdfast.messages.job_request import Limits
from job_contract.orders import Wait
from local.deploy import load
from tests import builders as b

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "statemachines" / "run_attempt.asl.json").read_text()
MACHINE = json.loads(TEXT)
STATES = MACHINE["States"]
TASKS = {name: state for name, state in STATES.items() if state["Type"] == "Task"}
WAITS = {name: state for name, state in TASKS.items() if state["Resource"].endswith(".waitForTaskToken")}
LAST_TWO = ("Release fleet", "Close attempt")
DAY_S = 24 * 3600


def ways_out(state: dict) -> list[str]:
    """Every state that may come next."""
    arcs = [state.get("Next"), state.get("Default")]
    arcs += [branch["Next"] for branch in state.get("Choices", []) + state.get("Catch", [])]
    return [arc for arc in arcs if arc]


def retried_for_s(retrier: dict) -> float:
    """Seconds that a retrier goes on for; full jitter halves each pause on average."""
    pauses = (
        min(retrier["IntervalSeconds"] * retrier["BackoffRate"] ** min(count, 40), retrier["MaxDelaySeconds"])
        for count in range(retrier["MaxAttempts"])
    )
    return sum(pauses) / (2 if retrier.get("JitterStrategy") == "FULL" else 1)


def is_of_a_busy_account(retrier: dict) -> bool:
    return retrier["ErrorEquals"] == ["Lambda.TooManyRequestsException"]


def words_of(module: str) -> set[str]:
    """Every literal that a module of the product has."""
    tree = ast.parse((ROOT / "layers" / "holdfast" / "holdfast" / module).read_text())
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_statelint_finds_nothing():
    assert Linter.validate(MACHINE) == []


def test_the_substitutions_of_the_template_are_those_of_the_machine():
    substitutions = load(ROOT / "template.yaml")["Resources"]["RunAttempt"]["Properties"]["DefinitionSubstitutions"]
    assert set(re.findall(r"\$\{(\w+)\}", TEXT)) == set(substitutions)


def test_every_way_leads_to_the_release_and_the_close():
    for name in STATES:
        seen, front = set(), {name}
        while front - seen:
            seen |= front
            front = {arc for state in front for arc in ways_out(STATES[state])}
        assert "Close attempt" in seen
        assert "Release fleet" in seen or name == "Close attempt"


def test_only_the_close_ends_a_run_and_only_the_release_comes_before_it():
    assert [name for name, state in STATES.items() if state.get("End") or state["Type"] in ("Succeed", "Fail")] == [
        "Close attempt"
    ]
    assert [name for name, state in STATES.items() if "Close attempt" in ways_out(state)] == ["Release fleet"]


@pytest.mark.parametrize("name", [name for name in TASKS if name not in LAST_TWO])
def test_whatever_fails_releases_the_fleet(name):
    catch_all = TASKS[name]["Catch"][-1]
    assert catch_all["ErrorEquals"] == ["States.ALL"]
    assert catch_all["Next"] == "Release fleet"
    assert catch_all["ResultPath"] != "$"


@pytest.mark.parametrize("name", LAST_TWO)
def test_release_and_close_are_retried_for_a_day_and_nothing_stops_them(name):
    [retrier] = TASKS[name]["Retry"]
    assert retrier["ErrorEquals"] == ["States.ALL"]
    assert retried_for_s(retrier) >= DAY_S
    assert "Catch" not in TASKS[name]


@pytest.mark.parametrize("name", [name for name in TASKS if name not in LAST_TWO])
def test_a_step_before_the_release_gives_up_within_a_minute_of_failures(name):
    failures = [
        retrier for retrier in TASKS[name]["Retry"] if retrier["MaxAttempts"] and not is_of_a_busy_account(retrier)
    ]
    assert sum(retried_for_s(retrier) for retrier in failures) < 60


@pytest.mark.parametrize("name", [name for name in TASKS if name not in LAST_TWO])
def test_a_fleet_is_not_given_back_because_the_account_was_busy_for_a_minute(name):
    [busy] = [retrier for retrier in TASKS[name]["Retry"] if is_of_a_busy_account(retrier)]
    assert 60 < retried_for_s(busy) < 600
    assert TASKS[name]["Retry"].index(busy) < len(TASKS[name]["Retry"]) - 1


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_has_a_deadline_from_the_step_before_and_does_not_repeat_it(name):
    assert WAITS[name]["TimeoutSecondsPath"].startswith("$.")
    first = WAITS[name]["Retry"][0]
    assert first["MaxAttempts"] == 0
    assert "States.Timeout" in first["ErrorEquals"]
    assert ("States.HeartbeatTimeout" in first["ErrorEquals"]) == ("HeartbeatSecondsPath" in WAITS[name])


def test_only_the_two_watches_expect_heartbeats():
    assert [name for name in WAITS if "HeartbeatSecondsPath" in WAITS[name]] == ["Watch training", "Watch again"]


def test_the_waits_are_those_of_the_contract():
    assert {state["Parameters"]["Payload"]["wait"] for state in WAITS.values()} == {wait.value for wait in Wait}


@pytest.mark.parametrize("name", TASKS)
def test_a_payload_is_job_and_attempt_and_for_a_wait_its_token(name):
    payload = TASKS[name]["Parameters"]["Payload"]
    more = {key for key in payload if key not in ("job.$", "attempt.$")}
    assert more - {"again"} == ({"wait", "token.$"} if name in WAITS else set())


def test_the_words_that_choices_test_are_words_that_the_supervisor_says():
    said = words_of("domain/obligations.py") | words_of("application/launch.py")
    tested = {rule["StringEquals"] for state in STATES.values() for rule in state.get("Choices", [])}
    assert tested <= said


def test_the_seconds_that_waits_read_are_seconds_that_the_supervisor_gives():
    said = words_of("domain/obligations.py") | words_of("application/launch.py")
    paths = [state.get(key) for state in WAITS.values() for key in ("TimeoutSecondsPath", "HeartbeatSecondsPath")]
    assert {path.rsplit(".", 1)[1] for path in paths if path} <= said


def test_no_intrinsic_function_and_no_filter_is_used():
    assert not re.search(r"States\.(?!ALL|Timeout|HeartbeatTimeout)\w+\(?|\[\?", TEXT)


def test_a_choice_tests_one_string_made_by_one_function():
    for state in STATES.values():
        for rule in state.get("Choices", []):
            assert set(rule) == {"Variable", "StringEquals", "Next"}
        assert len({rule["Variable"] for rule in state.get("Choices", [])}) <= 1


# -- O-14 --------------------------------------------------------------------------------------------------------------

HISTORY_EVENTS = 25_000
"""Events that one execution of a standard workflow may have; then it fails."""

A_TRY = 4
"""Scheduled, started, submitted (where a token is waited for), and how it ended. A heartbeat is no event."""


def most_events(state: dict) -> int:
    """History events of one visit of a state, every retry that it may make counted in."""
    if state["Type"] == "Choice":
        return 2
    return 2 + A_TRY * (1 + sum(retrier["MaxAttempts"] for retrier in state["Retry"]))


def turns_back() -> set[tuple[str, str]]:
    """Arcs that close a circle: a depth-first walk meets a state that it is still inside of."""
    found, done = set(), set()

    def walk(name: str, inside: tuple[str, ...]) -> None:
        for arc in ways_out(STATES[name]):
            if arc in (*inside, name):
                found.add((name, arc))
            elif arc not in done:
                walk(arc, (*inside, name))
        done.add(name)

    walk(MACHINE["StartAt"], ())
    return found


def test_o14_an_execution_never_polls_so_its_history_does_not_grow_with_the_jobs_length() -> None:
    """An attempt is one execution and waits on tokens: each interruption hands the job over to a new execution.

    So 14 days with 40 interruptions are 41 histories, and the longest that one can get is what its states may bring at
    worst. The one circle is a launch whose time ran out, and a job makes a bounded number of calls before it waits
    outside of any execution (test_launch.py holds it to one turn a call).
    """
    assert turns_back() == {("Fleet bought?", "Launch fleet")}
    once = sum(most_events(state) for state in STATES.values())
    turn = most_events(STATES["Launch fleet"]) + most_events(STATES["Fleet bought?"])
    assert 2 + once + CALLS_AN_HOUR * turn < 20_000 < HISTORY_EVENTS
    assert not [name for name, state in STATES.items() if state["Type"] in ("Wait", "Map", "Parallel")]


def test_o14_a_run_may_last_as_long_as_any_job_may_train() -> None:
    [longest] = [rule.le for rule in Limits.model_fields["run_s"].metadata if hasattr(rule, "le")]
    assert MACHINE["TimeoutSeconds"] >= longest


# -- O-15 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAITS)
def test_o15_a_wait_has_a_deadline_and_where_agents_are_at_work_a_heartbeat(name: str) -> None:
    """Before the start order no agent is known to be there, and after the order to stop ranks end at different times:
    those two waits have short deadlines instead, and what comes after either is the release.
    """
    state = WAITS[name]
    assert "TimeoutSecondsPath" in state
    assert ("HeartbeatSecondsPath" in state) == (state["Parameters"]["Payload"]["wait"] == "training")
    expired = next(catch for catch in state["Catch"] if set(catch["ErrorEquals"]) & {"States.Timeout", "States.ALL"})
    assert expired["Next"] == "Release fleet"
    if "HeartbeatSecondsPath" in state:
        silent = next(
            catch for catch in state["Catch"] if set(catch["ErrorEquals"]) & {"States.HeartbeatTimeout", "States.ALL"}
        )
        assert silent["Next"] in ("Watch again", "Release fleet")


def test_o15_two_silences_are_noticed_within_a_notice_and_other_waits_are_short() -> None:
    job = b.a_running_job(run_s=86_400)
    told = answers_for(job, b.NOW).get(Wait.READY)
    assert told is not None
    assert 2 * told["heartbeat_s"] < 120
    assert told["run_s"] >= job.run_s
    assert 0 < READY_WAIT_S <= 900
    assert 0 < checkpoint_wait_s(b.after(job, b.noticed()), b.NOW) <= 900
    assert 0 < checkpoint_wait_s(b.after(job, b.cancelled()), b.NOW) <= 900
