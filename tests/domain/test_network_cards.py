"""The network layouts of nine instance types are the documented ones, card by card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.adapters.fleets_ec2 import machine_of
from holdfast.domain.network_cards import Card, Interface, MachineType, family, layout

TYPES: dict[str, Any] = json.loads((Path(__file__).parent / "data/instance_types.json").read_text())


def on(*places: tuple[int, int]) -> list[tuple[int, int, str]]:
    """EFA-only interfaces at these (card, device)."""
    return [(card, device, "efa-only") for card, device in places]


PRIMARY = [(0, 0, "interface")]

# From the EC2 User Guide, "Maximize network bandwidth on Amazon EC2 instances with multiple network cards": ENA first;
# where card 0 takes EFA, its EFA is device 1; every other card carries one EFA as device 0.
DOCUMENTED = {
    "p4d.24xlarge": PRIMARY + on((0, 1), (1, 0), (2, 0), (3, 0)),
    "p5.48xlarge": PRIMARY + on((0, 1), *((card, 0) for card in range(1, 32))),
    "p5e.48xlarge": PRIMARY + on((0, 1), *((card, 0) for card in range(1, 32))),
    "p5en.48xlarge": PRIMARY + on((0, 1), *((card, 0) for card in range(1, 16))),
    "p5.4xlarge": PRIMARY + on((0, 1)),
    "p6-b200.48xlarge": PRIMARY + on((0, 1), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0)),
    # Card 0 is ENA only: sixteen EFAs on cards 1 to 16.
    "p6-b300.48xlarge": PRIMARY + on(*((card, 0) for card in range(1, 17))),
    "g6.12xlarge": PRIMARY + on((0, 1)),
    "trn1.32xlarge": PRIMARY + on((0, 1), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (7, 0)),
}


def flat(interfaces: tuple[Interface, ...]) -> list[tuple[int, int, str]]:
    return [(one.card, one.device, one.kind) for one in interfaces]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_layout_is_the_documented_one_card_by_card(name: str) -> None:
    assert flat(layout(machine_of(TYPES[name]))) == DOCUMENTED[name]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_node_of_any_size_burns_one_address(name: str) -> None:
    assert sum(one.has_address for one in layout(machine_of(TYPES[name]))) == 1


@pytest.mark.parametrize("name", DOCUMENTED)
def test_without_interface_types_the_count_of_efas_gives_the_same_layout(name: str) -> None:
    """An older API answer says how many EFAs a type has, and not which cards take them."""
    machine = machine_of(TYPES[name])
    silent = replace(machine, cards=tuple(replace(card, takes=()) for card in machine.cards))
    assert flat(layout(silent)) == DOCUMENTED[name]


def test_a_type_without_efa_has_one_plain_interface() -> None:
    assert flat(layout(machine_of(TYPES["c7i.large"]))) == PRIMARY


def test_a_card_without_room_for_two_makes_the_primary_itself_the_efa() -> None:
    cards = (Card(index=0, takes=("interface", "efa"), slots=1),)
    assert flat(layout(MachineType(name="x.large", efas=1, cards=cards))) == [(0, 0, "efa")]


def test_efas_are_counted_gpus_summed_and_bandwidth_is_that_of_the_efa_cards() -> None:
    machine = machine_of(TYPES["p6-b300.48xlarge"])
    assert (machine.efas, machine.gpus, machine.vcpus, machine.efa_gbps) == (16, 8, 192, 6400.0)


@pytest.mark.parametrize(
    ("name", "letters"),
    [("p5en.48xlarge", "p"), ("p6-b300.48xlarge", "p"), ("g6e.12xlarge", "g"), ("trn1.32xlarge", "trn")],
)
def test_a_quota_covers_a_family(name: str, letters: str) -> None:
    assert family(name) == letters
