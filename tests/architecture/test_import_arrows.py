"""Who may import whom, read from the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYER = ROOT / "layers" / "holdfast"

PYDANTIC = {"pydantic"}
AWS = {"boto3", "botocore"}
POWERTOOLS = {"aws_lambda_powertools"}

ALLOWED = {
    "layers/holdfast/job_contract": {"job_contract"},
    "layers/holdfast/holdfast/domain": {"job_contract", "holdfast.domain"},
    "layers/holdfast/holdfast/messages": {"job_contract", "holdfast.domain", "holdfast.messages"} | PYDANTIC,
    "layers/holdfast/holdfast/application": {
        "job_contract",
        "holdfast.domain",
        "holdfast.messages",
        "holdfast.application",
    },
    "layers/holdfast/holdfast/adapters": {
        "job_contract",
        "holdfast.domain",
        "holdfast.application.ports",
        "holdfast.adapters",
    }
    | AWS,
    "layers/holdfast/holdfast/runtime": {
        "job_contract",
        "holdfast.domain",
        "holdfast.application",
        "holdfast.adapters",
        "holdfast.runtime",
    }
    | AWS
    | POWERTOOLS,
    "functions": {
        "job_contract",
        "holdfast.domain",
        "holdfast.messages",
        "holdfast.application",
        "holdfast.adapters.job_table",
        "holdfast.runtime",
    }
    | POWERTOOLS,
    "training_image/trainer": {"job_contract", "trainer", "safetensors", "torch", "numpy"},
    "training_image/callbacks": {"job_contract", "callbacks", "torch", "transformers", "lightning"},
    "training_image/agent": {"job_contract", "agent", "pynvml"} | AWS,
}


def imports(file: Path) -> Iterator[str]:
    """Return every module that the file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"{folder} is empty"
    strangers = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in files
        for module in imports(file)
        if module.split(".")[0] not in sys.stdlib_module_names and not within(module, ALLOWED[folder])
    ]
    assert strangers == []


def test_the_product_never_imports_the_embedded_cloud() -> None:
    product = [file for folder in (*ALLOWED, "cli") for file in (ROOT / folder).rglob("*.py")]
    strangers = [file for file in product for module in imports(file) if within(module, {"local", "tests", "bench"})]
    assert strangers == []


@pytest.mark.parametrize("file", sorted((ROOT / "functions").glob("*.py")), ids=lambda file: file.stem)
def test_a_door_is_thin(file: Path) -> None:
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    assert functions
    for function in functions:
        assert (function.end_lineno or 0) - function.lineno <= 15, f"{file.name}: {function.name} thinks too much"


def test_the_application_has_the_time_and_its_pauses_from_a_port() -> None:
    for file in (LAYER / "holdfast" / "application").rglob("*.py"):
        assert not {"time", "datetime", "asyncio"} & {module.split(".")[0] for module in imports(file)}, file


def test_the_domain_reads_no_clock_and_no_environment() -> None:
    banned = {"time", "datetime", "os", "random", "uuid"}
    for file in (LAYER / "holdfast" / "domain").rglob("*.py"):
        assert not banned & {module.split(".")[0] for module in imports(file)}, file
