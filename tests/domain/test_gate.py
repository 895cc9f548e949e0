"""Every bad topology is refused, each with its own sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.domain.gate import Quarantined, judge, judge_network, make_roster
from holdfast.domain.ownership import Node, Ready
from holdfast.domain.purchase import Expected
from tests.builders import NOW

EXPECTED = Expected(
    instance_type="p5.48xlarge", zones=("us-east-1a",), group="s-j-us-east-1a", gpus=8, efas=32, efa_gbps=3200.0
)
READY = Ready(
    ip="10.0.0.1", port=4, instance_type="p5.48xlarge", zone="us-east-1a", gpus=8, efa_devices=32,
    driver="580.95.05", placement_group="s-j-us-east-1a", bandwidth_gbps=3200.0, host="gpu-1",
    efa_provider="efa", disk_free_gb=28_000,
)  # fmt: skip


def fleet(*changes: dict[str, Any], everywhere: dict[str, Any] | None = None) -> list[Node]:
    """Four nodes that are as bought, but for these changes to the first of them or to all."""
    told = [replace(READY, **(everywhere or {}), **change) for change in (*changes, *[{}] * (4 - len(changes)))]
    return [
        Node(instance=f"i-{number}", job="j", fleet="j-1-0", attempt=1, since_at=NOW, ready=ready)
        for number, ready in enumerate(told)
    ]


BAD = [
    ("zones", fleet({"zone": "us-east-1b"}), ["2 zones", "us-east-1b"], ()),
    ("zone", fleet(everywhere={"zone": "us-east-1c"}), ["us-east-1c", "asked for was us-east-1a"], ()),
    ("types", fleet({"instance_type": "p5e.48xlarge"}), ["2 types", "p5e.48xlarge"], ()),
    ("type", fleet(everywhere={"instance_type": "p4d.24xlarge"}), ["p4d.24xlarge", "p5.48xlarge"], ()),
    ("groups", fleet({"placement_group": ""}), ["different placement groups", "none"], ()),
    ("group", fleet(everywhere={"placement_group": "other"}), ["other", "s-j-us-east-1a"], ()),
    ("gpus_missing", fleet({"gpus": 7}), ["8 GPUs", "i-0 sees 7"], ("i-0",)),
    ("efa_missing", fleet({"efa_devices": 31}), ["32 EFA devices", "i-0 has 31", "one card"], ("i-0",)),
    ("efa_missing", fleet(everywhere={"efa_devices": 0}), ["32 EFA devices", "launch template"], ()),
    ("drivers", fleet({"driver": "570.1"}), ["different GPU drivers", "570.1"], ("i-0",)),
    ("efa_provider", fleet({"efa_provider": ""}), ["provider efa", "i-0 has none", "EFA installer"], ("i-0",)),
    ("efa_provider", fleet(everywhere={"efa_provider": "tcp"}), ["i-3 has tcp"], ()),
    (
        "driver_old",
        fleet({"driver": "470.256.02"}),
        ["i-0 470.256.02", "needs 525.60.13 or later", "machine image"],
        ("i-0",),
    ),
    ("driver_old", fleet(everywhere={"driver": "520.61.05"}), ["i-3 520.61.05"], ()),
    ("disk_full", fleet({"disk_free_gb": 1}), ["i-0 has 1 GB", "instance store"], ("i-0",)),
    ("links", fleet({"bandwidth_gbps": 800.0}), ["i-0 800", "at least 1600"], ("i-0",)),
    ("clocks", fleet({"clock_offset_s": -7.0}), ["i-0 -7 s", "chrony"], ("i-0",)),
]


@pytest.mark.parametrize(("code", "nodes", "words", "bad"), BAD, ids=[f"{one[0]}-{i}" for i, one in enumerate(BAD)])
def test_a_bad_topology_is_refused_with_its_own_sentence(
    code: str, nodes: list[Node], words: list[str], bad: tuple[str, ...]
) -> None:
    found = judge(nodes, EXPECTED)
    assert found is not None
    assert (found.code, found.bad) == (code, bad)
    assert all(word in found.sentence for word in words), found.sentence


def test_no_two_sentences_are_the_same() -> None:
    sentences = [found.sentence for _, nodes, _, _ in BAD if (found := judge(nodes, EXPECTED))]
    assert len(set(sentences)) == len(BAD)


def test_a_fleet_as_bought_passes() -> None:
    assert judge(fleet(), EXPECTED) is None


def test_what_nodes_do_not_tell_is_not_held_against_them() -> None:
    silent = {"driver": None, "placement_group": None, "bandwidth_gbps": None, "host": None}
    silent |= {"efa_provider": None, "disk_free_gb": None}
    assert judge(fleet(everywhere=silent), EXPECTED) is None


def test_without_an_expectation_the_nodes_are_compared_with_each_other() -> None:
    for change in ({"gpus": 7}, {"efa_devices": 31}, {"zone": "us-east-1b"}):
        assert judge(fleet(change)) is not None
    assert judge(fleet(everywhere={"gpus": 1, "efa_devices": 0})) is None


def test_a_machine_in_quarantine_is_known_again_under_another_instance_id() -> None:
    known = {"gpu-1": Quarantined(host="gpu-1", until=NOW + 60, reason="gpus_missing")}
    found = judge(fleet({"host": "gpu-1"}, everywhere={}), EXPECTED, known)
    assert found is not None
    assert found.code == "quarantined"
    assert "gpus_missing" in found.sentence


def test_broken_hardware_counts_and_a_wrong_answer_of_ec2_does_not() -> None:
    assert {judge(nodes, EXPECTED).failure for code, nodes, _, _ in BAD if code in ("zones", "type")} == {"capacity"}  # type: ignore[union-attr]
    assert {judge(nodes, EXPECTED).failure for code, nodes, _, _ in BAD if "gpus" in code} == {"hardware"}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("instance_type", "driver", "good"),
    [
        ("p5.48xlarge", "525.60.13", True),
        ("p5.48xlarge", "525.60.11", False),
        ("p6-b200.48xlarge", "565.57.01", False),
        ("p6-b200.48xlarge", "580.95.05", True),
        ("p5.48xlarge", "550.54-custom", True),
    ],
)
def test_the_driver_has_a_floor_that_new_gpus_raise(instance_type: str, driver: str, good: bool) -> None:
    told = {"instance_type": instance_type, "driver": driver}
    found = judge(fleet(everywhere=told), replace(EXPECTED, instance_type=instance_type))
    assert (found is None) is good


@pytest.mark.parametrize("driver", ["9" * 5_000, "...", "R580", "580.95.05" + "x" * 5_000])
def test_whatever_a_node_calls_its_driver_is_judged(driver: str) -> None:
    found = judge(fleet(everywhere={"driver": driver}), EXPECTED)
    assert found is None or found.code == "driver_old"


def test_the_images_own_cuda_raises_the_floor_of_the_driver() -> None:
    told = fleet(everywhere={"driver": "570.133.20"})
    assert judge(told, EXPECTED) is None
    found = judge(told, replace(EXPECTED, driver="580.65.06"))
    assert found is not None
    assert "needs 580.65.06 or later" in found.sentence


def test_a_provider_is_no_matter_where_no_efa_was_bought() -> None:
    assert judge(fleet(everywhere={"efa_provider": "", "efa_devices": 0}), replace(EXPECTED, efas=0)) is None


def test_a_silent_fall_back_to_tcp_is_refused() -> None:
    found = judge_network("i-0", "tcp", None, EXPECTED)
    assert found is not None
    assert "tcp, not EFA" in found.sentence


def test_a_preflight_below_the_floor_names_the_node() -> None:
    found = judge_network("i-0", "efa", 900.0, EXPECTED)
    assert found is not None
    assert (found.code, found.bad) == ("bandwidth", ("i-0",))


@pytest.mark.parametrize(
    ("provider", "gbps", "expected"),
    [
        ("efa", 3000.0, EXPECTED),
        ("efa", None, EXPECTED),
        ("gloo", None, replace(EXPECTED, efas=0)),
        ("gloo", 1.0, None),
    ],
)
def test_a_network_as_bought_passes(provider: str, gbps: float | None, expected: Expected | None) -> None:
    assert judge_network("i-0", provider, gbps, expected) is None


def test_the_leader_of_a_mixed_gang_is_on_demand() -> None:
    nodes = [replace(node, market="spot") for node in fleet()]
    nodes[3] = replace(nodes[3], market="on_demand")
    assert make_roster("j", 1, nodes, before=None).nodes[0].instance == "i-3"


def test_a_surviving_leader_keeps_its_rank() -> None:
    nodes = [replace(node, market="spot") for node in fleet()]
    before = make_roster("j", 1, nodes, before=None)
    nodes[3] = replace(nodes[3], market="on_demand")
    assert make_roster("j", 2, nodes, before=before).nodes[0].instance == "i-0"
