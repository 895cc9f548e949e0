"""Three of the scenarios; `make run SCENARIO=all` plays them all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from local.scenarios import Verdict, chosen, perform_all
from local.scenes.plays import SCENARIOS

pytestmark = [pytest.mark.cloud, pytest.mark.ranks, pytest.mark.timeout(280)]
PLAYED = ("survivors-held", "pause-resume", "no-capacity")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Verdict]]]:
    folder = tmp_path_factory.mktemp("scenarios")
    verdicts = perform_all(chosen(PLAYED), folder, lanes=len(PLAYED))
    yield folder, {verdict.name: verdict for verdict in verdicts}


@pytest.mark.parametrize("name", PLAYED)
def test_the_scenario_is_kept(played: tuple[Path, dict[str, Verdict]], name: str) -> None:
    folder, verdicts = played
    assert verdicts[name].word == "ok", verdicts[name].checked
    record = {path.name for path in (folder / name).iterdir()}
    assert record >= {"request.json", "end.json", "checks.json", "timeline.jsonl", "metrics.jsonl", "fleets.jsonl"}
    assert json.loads((folder / name / "verdict.json").read_text())["word"] == "ok"


def test_no_two_scenarios_share_an_instance_type() -> None:
    """A fault is set for a type, and must not reach another scenario's machines."""
    types = [kind for scenario in SCENARIOS for kind in scenario.types]
    assert len(set(types)) == len(types)


def test_an_unknown_scenario_is_answered_with_what_there_is() -> None:
    with pytest.raises(SystemExit, match=r"no such scenario: nonsense; there are all, failures, .*survivors-held"):
        chosen(["nonsense"])
