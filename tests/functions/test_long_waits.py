"""O-14 and O-15: the shipped machine and the real doors through hours in virtual time, and nodes that fall silent.

EC2 goes on showing the machines as running, and neither the sweep nor an event of EC2 comes: what helps is the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bench.world import nodes
from bench.world.nodes import Gang
from bench.world.world import World
from holdfast.application.launch import READY_WAIT_S
from holdfast.domain.obligations import HEARTBEAT_S
from tests import builders as b
from tests.functions.scenes import JOB

HOUR_S = 3600.0
RELEASED_WITHIN_S = 120.0
"""From the expiry to the last machine seen ending; EC2 shows a state after seconds."""


@pytest.fixture
def deaf() -> Iterator[World]:
    """A world that is told nothing but what the run machine itself notices."""
    with World(muted=("Sweep", "OnInstanceStateChange")) as world:
        yield world


def submit(world: World, *, steps: int, interval_steps: int = 25) -> None:
    body: dict[str, Any] = b.sample("job-request.json")
    body["training"]["steps"], body["checkpoint"]["interval_steps"] = steps, interval_steps
    body["report_s"] = 300
    world.send("RequestQueue", json.dumps(body))


def fleets_alive(world: World) -> set[str]:
    return {instance.tags["holdfast:fleet"] for instance in world.ec2.live}


def row(world: World) -> dict[str, Any]:
    found = world.row(JOB)
    assert found is not None
    return found


def test_o15_a_fleet_that_never_speaks_is_given_back_at_its_deadline_and_another_is_bought(deaf: World) -> None:
    """Its nodes die before their first report: no agent is there to beat, so the wait has a deadline of its own."""
    boot = deaf._boot
    deaf._boot = lambda one: boot(one) if one.tags["holdfast:fleet"] != f"{JOB}-1-0" else None  # type: ignore[method-assign]
    submit(deaf, steps=30)
    assert deaf.agenda.run(for_s=60, until=lambda: len(deaf.ec2.live) == 2)
    bought_at = deaf.agenda.now
    assert deaf.agenda.run(for_s=2 * HOUR_S, until=lambda: not deaf.ec2.live)
    assert READY_WAIT_S <= deaf.agenda.now - bought_at < READY_WAIT_S + RELEASED_WITHIN_S
    assert deaf.agenda.run(for_s=HOUR_S, until=lambda: bool(deaf.results))
    assert (row(deaf)["phase"], int(row(deaf)["attempt"])) == ("completed", 2)
    assert "Await ready" in deaf.machine.executions[f"{JOB}-1"].path
    assert {one.status for one in deaf.machine.executions.values()} == {"SUCCEEDED"}
    assert deaf.problems == []


def test_o15_a_fleet_that_falls_silent_after_an_hour_is_given_back_within_two_minutes(
    deaf: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour of heartbeats is not one transition; two silences are the end of the fleet, and the job goes on."""
    monkeypatch.setattr(nodes, "PROGRESS_STEPS", 600)
    died_at: list[float] = []

    def dies(gang: Gang) -> None:
        if (gang.attempt, gang.step) == (1, HOUR_S):
            died_at.append(deaf.agenda.now)
            for node in list(gang.members.values()):
                # The machine hangs: nothing of it speaks, and EC2 sees it run.
                node.alive = False
            gang.stage = "over"

    deaf.stepped = dies
    submit(deaf, steps=3900, interval_steps=900)
    assert deaf.agenda.run(for_s=3 * HOUR_S, until=lambda: bool(died_at))
    assert deaf.machine.executions[f"{JOB}-1"].path[-1] == "Watch training"
    assert deaf.machine.executions[f"{JOB}-1"].visit == 3
    assert deaf.agenda.run(for_s=HOUR_S, until=lambda: f"{JOB}-1-0" not in fleets_alive(deaf))
    assert 2 * HEARTBEAT_S - 10 <= deaf.agenda.now - died_at[0] < 120
    assert deaf.agenda.run(for_s=HOUR_S, until=lambda: bool(deaf.results))
    assert (row(deaf)["phase"], int(row(deaf)["attempt"])) == ("completed", 2)
    assert deaf.machine.executions[f"{JOB}-1"].path[-3:] == ["Watch again", "Release fleet", "Close attempt"]
    assert deaf.problems == []
