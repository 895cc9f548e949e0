"""A deployment for doors: moto's tables, queues and bus, models of EC2 and Step Functions; nothing moves alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.world.world import World


@pytest.fixture
def world() -> Iterator[World]:
    with World() as world:
        world.ticking = False
        yield world
