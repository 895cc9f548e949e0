"""Each rule of docs/rules.md names the test that holds it, and that test exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = [line for line in (ROOT / "docs" / "rules.md").read_text().splitlines() if line.startswith("- ")]
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`$")


def test_there_are_rules() -> None:
    assert len(RULES) > 30
    assert len(set(RULES)) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule[2:42])
def test_a_rule_is_one_line_and_the_test_that_it_names_exists(rule: str) -> None:
    found = TEST.search(rule)
    assert found, "a rule ends with `tests/...::test_...`"
    path, name = found.groups()
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path} has no {name}"
