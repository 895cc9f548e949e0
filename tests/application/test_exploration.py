"""A small part of bench.explore and bench.shuffle: every order of calls near some moments, and seeded chaos."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import shuffle
from bench.exploration.faults import FAULTS
from bench.exploration.invariants import check
from bench.exploration.search import explore, harsh_time
from bench.exploration.steps import Steps
from bench.exploration.world import Broken, Budgets, a_world
from bench.explore import BOUNDED, FAULT_STATES, UNDISTURBED, Scenario

pytestmark = pytest.mark.searches
QUICK_FAULTS = (
    "token in the row",
    "dispatch before close",
    "counter generation",
    "claims read before EC2",
    "ignored conflict",
)


def test_every_order_of_an_undisturbed_job_ends_well() -> None:
    found = UNDISTURBED.run(until=float("inf"))
    assert found.broken is None, found.path
    assert found.complete
    assert found.states > 2_000


@pytest.mark.parametrize("scenario", BOUNDED, ids=lambda scenario: scenario.name)
def test_no_rule_is_broken_near_any_moment_whatever_goes_wrong(scenario: Scenario) -> None:
    found = replace(scenario, most_states=250).run(until=float("inf"))
    assert found.broken is None, found.path
    assert found.states >= 250


@pytest.mark.parametrize("budgets", [Budgets(crashes=1), Budgets(cancels=1), Budgets(lost=1), Budgets(duplicated=1)])
def test_a_reduced_search_ends_where_the_whole_one_does(budgets: Budgets) -> None:
    whole, reduced = (explore(a_world(budgets, steps=1), at_once=1, reduced=how) for how in (False, True))
    assert whole.complete and reduced.complete
    assert reduced.states < whole.states / 10
    assert reduced.outcomes == whole.outcomes


@pytest.mark.parametrize("name", [name for name in QUICK_FAULTS if FAULTS[name].at_once == 1])
def test_a_reduced_search_finds_a_fault_by_the_same_rule(name: str) -> None:
    fault = FAULTS[name]
    with fault.injected():
        found = explore(a_world(fault.budgets), at_once=1, most_states=FAULT_STATES, reduced=True)
    assert (found.broken or "").startswith(fault.breaks)


def test_one_mishap_of_each_kind_but_an_interruption_breaks_no_rule() -> None:
    found = explore(a_world(Budgets(cancels=1, lost=1, duplicated=1), steps=1), at_once=1, reduced=True)
    assert found.broken is None, found.path
    assert found.complete


@pytest.mark.parametrize("name", QUICK_FAULTS)
def test_a_fault_that_is_built_in_is_found_by_the_rule_it_breaks(name: str) -> None:
    fault = FAULTS[name]
    with fault.injected():
        found = explore(a_world(fault.budgets), at_once=fault.at_once, most_states=FAULT_STATES)
    assert found.broken is not None
    assert found.broken.startswith(fault.breaks)


def test_a_state_without_a_sentence_is_found() -> None:
    """The rule that every state has a code and a sentence can fail: all states of the searches above are held to it."""
    steps, world = Steps(), a_world(Budgets())
    with harsh_time():
        while world.row.attempt == 0:
            before, world = world, steps.after(world, next(iter(steps.enabled(world))))
    world.store.rows[world.row.id] = replace(world.row, stage="", reason="")
    with pytest.raises(Broken, match="a code and a sentence"):
        check(before, world)


def test_300_events_shuffled_repeated_delayed_and_dropped_end_as_they_should() -> None:
    rows = list(shuffle.rows(7, events=300, jobs=5))
    assert [row for row in rows if not row.ok] == []
