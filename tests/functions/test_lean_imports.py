"""A cold start pays for what a door's import pulls in."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.builders import ROOT

DOORS = sorted(path.stem for path in (ROOT / "functions").glob("*.py"))
HEAVY = ("torch", "numpy", "agent", "trainer", "local", "moto", "yaml", "rich", "typer")
# Powertools' own parser costs 240 ms of a cold start; the models are plain pydantic.
SLOW = "aws_lambda_powertools.utilities.parser"
LOOK = """
import importlib, json, sys
for door in sys.argv[1:]:
    importlib.import_module(door)
import boto3
from holdfast.runtime.wiring import supervisor
from holdfast.runtime.settings import settings
made = supervisor.cache_info().currsize + settings.cache_info().currsize + (boto3.DEFAULT_SESSION is not None)
print(json.dumps({"modules": list(sys.modules), "made": made}))
"""


def test_no_door_imports_anything_heavy_makes_a_client_or_reads_a_setting() -> None:
    path = os.pathsep.join((str(ROOT / "layers" / "holdfast"), str(ROOT / "functions")))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "AWS_"))}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *DOORS],
        env={**kept, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    seen = json.loads(done.stdout)
    assert [name for name in (*HEAVY, SLOW) if name in seen["modules"]] == []
    assert seen["made"] == 0


def test_every_door_of_the_template_is_a_module_of_its_own() -> None:
    from bench.world.template import read_template

    assert sorted(door.module for door in read_template().doors.values()) == DOORS
