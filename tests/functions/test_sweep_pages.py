"""O-17: the sweep over lists that come in pages, one of them empty, and with a page that never comes.

Whether a machine has an owner is asked by a strong read of that machine's own item, so no list of known machines can
be cut short. What does come in pages is the machines, and the jobs that are alive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from bench.world.wire import ApiError
from bench.world.world import World
from holdfast.adapters.job_table import ALIVE_SHARDS
from holdfast.application.sweep import START_GRACE_S
from holdfast.domain.ownership import ORPHAN_GRACE_S, FleetIntent, Node
from tests import builders as b
from tests.functions.scenes import fails, holding, table

FLEETS = {"first-0123456789": 120, "second-012345678": 80, "third-0123456789": 50}
ORPHAN = "i-0fffffffffffffff9"
PAGE = 40
PAST_THE_GRACE_S = ORPHAN_GRACE_S + START_GRACE_S + 1
NOTHING_YET = {"pk": {"S": "JOB#"}, "sk": {"S": "ROW"}, "alive_shard": {"N": "0"}}


@dataclass
class Paged:
    """EC2 and the index of living jobs, in pages. `broken` is the call that is throttled for good, None for none."""

    launched_at: float
    machines: Mapping[str, str]
    broken: str | None = None
    pages: dict[str, int] = field(default_factory=lambda: {"DescribeInstances": 0, "Query": 0})
    ended: list[str] = field(default_factory=list)

    def ec2(self, operation: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
        match operation:
            case "DescribeInstances":
                return self._machines(params)
            case "TerminateInstances":
                self.ended += params["InstanceIds"]
                return {"TerminatingInstances": []}
            case "DescribeInstanceStatus":
                return {"InstanceStatuses": []}
            case "DescribePlacementGroups":
                return {"PlacementGroups": []}
            case "DescribeLaunchTemplates":
                return {"LaunchTemplates": []}
        raise ValueError(operation)

    def _machines(self, params: Mapping[str, Any]) -> dict[str, Any]:
        [ids] = [one["Values"] for one in params["Filters"] if one["Name"] == "instance-id"] or [None]
        found = [name for name in self.machines if ids is None or name in ids]
        start = int(params.get("NextToken", 0))
        self.pages["DescribeInstances"] += 1
        if start and self.broken == "DescribeInstances":
            raise ApiError("RequestLimitExceeded")
        more = {"NextToken": str(start + PAGE)} if start + PAGE < len(found) else {}
        return {"Reservations": [{"Instances": [self._shown(one) for one in found[start : start + PAGE]]}], **more}

    def _shown(self, instance: str) -> dict[str, Any]:
        job = self.machines[instance]
        tags = {"holdfast:stack": "holdfast", "holdfast:job": job, "holdfast:fleet": f"{job}-1-0"}
        return {
            "InstanceId": instance,
            "InstanceType": "c7i.large",
            "State": {"Name": "running", "Code": 16},
            "Placement": {"AvailabilityZone": "us-east-1a"},
            "LaunchTime": datetime.fromtimestamp(self.launched_at, UTC),
            "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
        }

    def dynamodb(self, operation: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """Every list begins with an empty page that has a key."""
        if operation == "GetItem" and self.broken == "GetItem" and params["Key"]["pk"]["S"] == f"NODE#{LAST}":
            raise ApiError("ProvisionedThroughputExceededException")
        if operation != "Query":
            return None
        self.pages["Query"] += 1
        if params.get("ExclusiveStartKey") != NOTHING_YET:
            return {"Items": [], "Count": 0, "LastEvaluatedKey": NOTHING_YET}
        if self.broken == "Query":
            raise ApiError("ProvisionedThroughputExceededException")
        return None


MACHINES = {
    f"i-{job:01x}{number:016x}": name
    for job, (name, count) in enumerate(FLEETS.items(), start=1)
    for number in range(count)
}
LAST = list(MACHINES)[-1]


@pytest.fixture
def paged(world: World) -> Iterator[Paged]:
    """250 machines of three jobs that train, and one machine of nobody, all past the grace."""
    bought_at = world.agenda.now
    for name in FLEETS:
        mine = tuple(one for one, job in MACHINES.items() if job == name)
        job = replace(b.a_running_job(nodes=len(mine), report_s=3_600), id=name, fleet=f"{name}-1-0", gang=len(mine))
        holding(world, job)
        table().own([Node(instance=one, job=name, fleet=f"{name}-1-0", attempt=1, since_at=bought_at) for one in mine])
        table().close_intent(
            FleetIntent(
                fleet=f"{name}-1-0", job=name, attempt=1, candidate=0, nodes=len(mine), opened_at=bought_at,
                instances=mine, closed_at=bought_at, outcome="bought",
            )
        )  # fmt: skip
        world.machine.answer("StartExecution", {"name": f"{name}-1", "input": "{}"})
    paged = Paged(bought_at, {ORPHAN: "nobody", **MACHINES})
    world.wire.answers |= {"ec2": paged.ec2, "dynamodb": paged.dynamodb}
    world.agenda.now += PAST_THE_GRACE_S
    yield paged


def rows(world: World) -> list[dict[str, Any]]:
    return sorted((item for item in world.items() if item["sk"] == "ROW"), key=lambda item: item["pk"])


def test_o17_among_250_machines_on_many_pages_only_the_orphan_is_ended(world: World, paged: Paged) -> None:
    before = rows(world)
    assert world.call("Sweep", {}) == {"findings": 0}
    assert paged.ended == []
    assert world.call("Sweep", {}) == {"findings": 1}
    assert paged.ended == [ORPHAN]
    assert rows(world) == before
    looked_at = [len(paged.machines), *FLEETS.values()]
    assert paged.pages["DescribeInstances"] == 2 * sum(math.ceil(count / PAGE) for count in looked_at)
    assert paged.pages["Query"] == 2 * 2 * ALIVE_SHARDS


def test_o17_with_a_page_that_never_comes_nothing_is_ended_and_the_sweep_is_told_as_failed(
    world: World, paged: Paged
) -> None:
    """The door raises: Lambda counts the error, its alarm tells of it, and the next minute looks again."""
    assert world.call("Sweep", {}) == {"findings": 0}
    before = rows(world)
    for broken in ("DescribeInstances", "Query", "GetItem"):
        paged.broken = broken
        assert fails(world, "Sweep", {}), broken
        assert (paged.ended, rows(world)) == ([], before), broken
    paged.broken = None
    world.call("Sweep", {})
    assert paged.ended == [ORPHAN]
