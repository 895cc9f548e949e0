"""What is paid for on every event, and never while nothing happens."""

from __future__ import annotations

import pytest

from bench.control_plane.first_order import DOORS, MOST_CALLS, heard_at
from bench.world.world import World


@pytest.mark.parametrize("door", DOORS)
def test_the_order_is_out_after_four_calls_at_most(door: str) -> None:
    assert 0 < (heard_at(door).before_order or 0) <= MOST_CALLS


@pytest.mark.parametrize("door", ["DispatchQueue", "Sweep"])
def test_a_tick_of_an_idle_stack_writes_and_starts_nothing(world: World, door: str) -> None:
    for _ in range(3):
        world.call(door, {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {}})
        world.agenda.now += 60
    assert world.wire.points == []
    assert world.machine.executions == {}
