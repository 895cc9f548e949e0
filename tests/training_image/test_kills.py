"""A seeded handful of `make bench BENCH=kills`: a node dies, and the job goes on from a whole save."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.kills import Kill, harness, judged, uninterrupted

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with harness(tmp_path_factory.mktemp("kills")) as make:
        yield make


@pytest.fixture(scope="module")
def losses(world: Any) -> dict[int, float]:
    return uninterrupted(world("whole"), 2)[0]


@pytest.mark.parametrize(
    "kill",
    [
        Kill(nodes=2, victims=(0, 1), at_call=14, call_is_made=False),
        Kill(nodes=2, victims=(1,), at_call=17, call_is_made=True),
        Kill(nodes=2, victims=(0, 1), in_save=3, delay_s=0.01),
    ],
    ids=["both nodes before a call", "one node after a call", "both nodes while a share is written"],
)
def test_a_job_whose_node_is_killed_in_a_save_comes_back_with_what_was_durable(
    world: Any, losses: dict[int, float], kill: Kill, request: pytest.FixtureRequest
) -> None:
    verdict = judged(world(f"kill-{request.node.callspec.indices['kill']}"), kill, losses)
    assert verdict.wrong == []
    assert verdict.trained > 0
