"""What the documents name exists: files, targets, phases, doors, parameters; and the README's sample is a request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.domain.phase import Phase
from holdfast.messages.acceptance import read_acceptance
from holdfast.messages.job_request import read_request
from job_contract.node_files import EXIT_CODES
from job_contract.orders import Action
from job_contract.reports import KINDS
from local.deploy import load

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {".venv", ".venv-sam", ".aws-sam", ".git", "out", ".pytest_cache"}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"^([a-z]+):", re.MULTILINE)
CALL = re.compile(r"\bmake ([a-z]+)(?: |`|$)", re.MULTILINE)


def documents() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*.md")):
        if not SKIPPED & set(path.relative_to(ROOT).parts):
            yield path


DOCUMENTS = [path.relative_to(ROOT).as_posix() for path in documents()]


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def headings(text: str) -> set[str]:
    """Return the anchors of the text's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def first_cells(name: str, head: str) -> list[str]:
    """Return the code words in the first column of the table whose first head is `head`."""
    lines = text_of(name).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {head} |"))
    cells = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells.append(line.split("|")[1].strip().strip("`"))
    return cells


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_relative_link_leads_somewhere(name: str) -> None:
    document = ROOT / name
    for link in LINK.findall(FENCED.sub("", document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{name}: {link}"
        assert target.is_relative_to(ROOT), f"{name}: {link}"
        if anchor:
            assert anchor in headings(target.read_text()), f"{name}: {link}"


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if "make" in text_of(name)])
def test_every_target_that_is_named_is_in_the_makefile(name: str) -> None:
    code = "\n".join(FENCED.findall(text_of(name)) + re.findall(r"`[^`\n]+`", text_of(name)))
    missing = set(CALL.findall(code)) - set(TARGET.findall(text_of("Makefile")))
    assert not missing


def test_the_readme_tells_every_phase() -> None:
    assert first_cells("README.md", "Phase") == [phase.value for phase in Phase]


def test_the_readme_tells_every_door() -> None:
    doors = {path.stem for path in (ROOT / "functions").glob("*.py")}
    assert sorted(first_cells("README.md", "Door")) == sorted(doors)


def test_the_readme_tells_every_parameter() -> None:
    assert first_cells("README.md", "Parameter") == list(load(ROOT / "template.yaml")["Parameters"])


def test_the_sample_in_the_readme_is_the_sample_in_events_and_is_accepted() -> None:
    [sample] = [block for block in FENCED.findall(text_of("README.md")) if '"holdfast.job-request/1"' in block]
    body = sample.split("\n", 1)[1].rsplit("```", 1)[0]
    assert read_request(body) == read_request(text_of("events/job-request.json"))
    assert read_acceptance(body, now=0.0).job.phase is Phase.QUEUED


def test_the_contract_page_tells_every_action_kind_and_exit_code() -> None:
    assert sorted(first_cells("docs/contract.md", "Action")) == sorted(action.value for action in Action)
    assert sorted(first_cells("docs/contract.md", "Kind")) == sorted(KINDS)
    codes = [cell for cell in first_cells("docs/contract.md", "Code") if cell.isdigit()]
    assert [int(code) for code in codes] == sorted(EXIT_CODES)


def test_every_repair_of_the_engine_is_explained() -> None:
    told = set(re.findall(r"`(\w+\.py)`", text_of("docs/local-cloud.md")))
    engine = {path.name for path in (ROOT / "local" / "engine").glob("*.py")}
    assert engine - told - {"__init__.py", "main.py", "seams.py", "settings.py"} == set()


def test_every_pin_has_its_reason() -> None:
    pins = re.findall(r"^([A-Za-z0-9-]+)(?:\[[^\]]*\])?==(\S+)$", text_of("requirements.in"), re.MULTILINE)
    reasons = text_of("docs/decisions/0002-pins.md")
    assert [f"`{name}` {version}" for name, version in pins if f"`{name}` {version}" not in reasons] == []
