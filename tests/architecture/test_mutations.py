"""The list of bench/mutations.py cannot rot: what it replaces is there, and so are the tests that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.mutation_list import CASES, MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
CASE_TEST = re.compile(r"^def (test_o(\d\d)_\w+)\(", re.MULTILINE)


def case_tests() -> dict[str, str]:
    """Each test of a public case, as pytest names it -> the case."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, number in CASE_TEST.findall(path.read_text()):
            found[f"{path.relative_to(ROOT)}::{name}"] = f"O-{number}"
    return found


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutation_replaces_what_stands_once_in_its_file_and_names_tests_that_exist(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old
    assert mutation.tests
    for test in mutation.tests:
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"


def test_every_case_has_tests_and_a_mutation_that_they_find() -> None:
    tests = case_tests()
    assert {mutation.case for mutation in MUTATIONS} == set(CASES)
    assert set(CASES) - {"C5"} == {case for case in tests.values() if case in CASES}
    found = {tests[test] for mutation in MUTATIONS for test in mutation.tests if test in tests}
    assert found == set(CASES) - {"C5"}


def test_every_test_of_a_case_is_shown_to_fail_by_some_mutation() -> None:
    named = {test for mutation in MUTATIONS for test in mutation.tests}
    assert sorted(set(case_tests()) - named) == []


def test_no_two_mutations_have_one_name() -> None:
    assert len({str(mutation) for mutation in MUTATIONS}) == len(MUTATIONS)
