from __future__ import annotations

from dataclasses import replace

from holdfast.domain import gate
from holdfast.domain.ownership import ORPHAN_GRACE_S, FleetIntent, Instance, Node, Ownership, Ready, may_belong, suspect
from job_contract.orders import Leader, Roster, RosterNode
from tests.builders import LEADER, NOW, OTHER

OLD = NOW - ORPHAN_GRACE_S - 1
INSTANCE = Instance(
    id=LEADER, state="running", instance_type="c7i.large", zone="us-east-1a", launched_at=OLD, job="j", fleet="j-1-0"
)
NODE = Node(instance=LEADER, job="j", fleet="j-1-0", attempt=1, since_at=OLD)
INTENT = FleetIntent(fleet="j-1-0", job="j", attempt=1, candidate=0, nodes=2, opened_at=OLD)
READY = Ready(ip="10.0.0.1", port=4000, instance_type="c7i.large", zone="us-east-1a")


def test_an_instance_with_an_owner_is_no_orphan() -> None:
    assert suspect(INSTANCE, NODE, replace(INTENT, closed_at=OLD), NOW) is None


def test_an_instance_without_an_owner_is_one_only_when_no_intent_is_open_and_it_is_old_enough() -> None:
    assert suspect(INSTANCE, None, None, NOW)
    assert suspect(INSTANCE, None, INTENT, NOW) is None
    assert suspect(INSTANCE, None, replace(INTENT, closed_at=OLD), NOW)
    assert suspect(replace(INSTANCE, launched_at=NOW - 10), None, None, NOW) is None
    assert suspect(replace(INSTANCE, state="terminated"), None, None, NOW) is None


def test_an_instance_that_was_to_end_long_ago_is_an_orphan() -> None:
    ending = replace(NODE, state=Ownership.ENDING)
    assert suspect(INSTANCE, ending, None, NOW)
    assert suspect(INSTANCE, replace(ending, since_at=NOW - 5), None, NOW) is None


def test_an_instance_may_belong_to_any_job_that_it_names_anywhere_and_to_all_when_it_names_none() -> None:
    mine = replace(INSTANCE, job="j", fleet="j-1-0")
    assert not may_belong(mine, NODE, INTENT, {"stuck-1"})
    assert may_belong(replace(mine, job="stuck-1"), NODE, INTENT, {"stuck-1"})
    for fleet in ("stuck-1-12-0", "stuck-1-12-s"):
        assert may_belong(replace(mine, fleet=fleet), NODE, INTENT, {"stuck-1"})
    assert may_belong(mine, replace(NODE, job="stuck-1"), INTENT, {"stuck-1"})
    assert may_belong(mine, NODE, replace(INTENT, job="stuck-1"), {"stuck-1"})
    assert may_belong(replace(mine, job=None, fleet=None), None, None, {"stuck-1"})
    assert may_belong(replace(mine, job="", fleet=""), None, None, {"stuck-1"})


def test_survivors_keep_their_ranks_and_a_replacement_takes_the_vacant_one() -> None:
    before = Roster(
        job="j",
        attempt=1,
        roster_id="r",
        nodes=(RosterNode(node_rank=0, instance="i-gone", ip=""), RosterNode(node_rank=1, instance=LEADER, ip="")),
        leader=Leader(ip="", port=1),
    )
    nodes = [replace(NODE, ready=READY), replace(NODE, instance=OTHER, ready=replace(READY, ip="10.0.0.2", port=5))]
    roster = gate.make_roster("j", 2, nodes, before)
    assert roster.rank_of(LEADER) == 1
    assert roster.rank_of(OTHER) == 0
    assert roster.leader == Leader(ip="10.0.0.2", port=5)


def test_the_same_nodes_give_the_same_roster_whoever_makes_it() -> None:
    nodes = [replace(NODE, ready=READY), replace(NODE, instance=OTHER, ready=READY)]
    assert gate.make_roster("j", 1, nodes, None) == gate.make_roster("j", 1, nodes[::-1], None)


def test_a_gang_in_two_zones_or_of_two_types_is_refused_with_its_own_sentence() -> None:
    nodes = [replace(NODE, ready=READY), replace(NODE, ready=replace(READY, zone="us-east-1b"))]
    assert "2 zones" in str(gate.refusal(nodes))
    nodes = [replace(NODE, ready=READY), replace(NODE, ready=replace(READY, instance_type="c7i.xlarge"))]
    assert "2 types" in str(gate.refusal(nodes))
    assert gate.refusal([replace(NODE, ready=READY)] * 2) is None


def test_a_member_of_a_closed_attempt_was_brought_by_a_launch_that_came_too_late() -> None:
    assert suspect(INSTANCE, NODE, None, NOW, closed=NODE.attempt - 1) is None
    assert suspect(INSTANCE, NODE, None, NOW, closed=NODE.attempt)
    assert suspect(INSTANCE, replace(NODE, state=Ownership.HELD, until=NOW), None, NOW, closed=NODE.attempt) is None
