"""Alarm, runbook and command belong together, in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from holdfast_cli import main
from local.deploy import load

ROOT = Path(__file__).resolve().parents[2]
BOOKS = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
ALARMS: dict[str, dict[str, Any]] = {
    name: one["Properties"]
    for name, one in load(ROOT / "template.yaml")["Resources"].items()
    if one["Type"] == "AWS::CloudWatch::Alarm"
}
COMMAND = re.compile(r"`(holdfast [^`]+)`")
BOOK = re.compile(r"docs/runbooks/([a-z-]+)\.md")
HEADINGS = ["What it means", "Look", "Do", "Wake somebody when"]


def verbs(group: Any = None, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every verb of the command line, words of a group first."""
    for name, command in (group or typer.main.get_command(main.app)).commands.items():
        yield (*before, name)
        if hasattr(command, "commands"):
            yield from verbs(command, (*before, name))


VERBS = set(verbs())


def is_known(command: str) -> bool:
    words = tuple(command.split()[1:])
    return words[:2] in VERBS or (words[:1] in VERBS and words[0] != "dlq")


def named(alarm: str) -> tuple[str, str]:
    """The one command and the one runbook that an alarm's text names."""
    text = ALARMS[alarm]["AlarmDescription"]
    [command], [book] = COMMAND.findall(text), BOOK.findall(text)
    return command, book


@pytest.mark.parametrize("alarm", ALARMS)
def test_an_alarm_names_a_runbook_that_names_it_and_a_command_that_exists(alarm: str) -> None:
    command, book = named(alarm)
    text = (ROOT / "docs" / "runbooks" / f"{book}.md").read_text()
    assert f"`{alarm}`" in text.split("## ")[0]
    assert is_known(command)
    assert ALARMS[alarm]["AlarmActions"] == [{"Ref": "AlarmTopic"}]
    # Of three queues with one runbook the text names its own.
    assert command in text or command.startswith("holdfast dlq show ")


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_a_runbook_serves_alarms_that_exist_and_name_it(book: Path) -> None:
    alarms = re.findall(r"`(\w+)`", book.read_text().split("## ")[0])
    assert alarms
    for alarm in alarms:
        assert named(alarm)[1] == book.stem


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_a_runbook_is_half_a_page_with_one_command_to_look_and_one_to_do(book: Path) -> None:
    text = book.read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    assert len(text) < 2_500
    blocks = re.findall(r"```\n(.+?)\n```", text, re.DOTALL)
    assert len(blocks) == 2
    for command in [*blocks, *COMMAND.findall(text)]:
        assert is_known(command), command
