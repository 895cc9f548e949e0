"""Where the network interfaces of a node go, from what DescribeInstanceTypes says of the type's network cards.

The primary interface is plain (ENA): an EFA-only one cannot be primary. It shares card 0 with an EFA where that card
takes one; every other card that takes EFA carries nothing else. EFA-only interfaces have no address, so a node of any
size burns one address of its subnet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ENA, EFA, EFA_ONLY = "interface", "efa", "efa-only"


@dataclass(frozen=True, kw_only=True)
class Card:
    """One network card of a type. `takes` is empty where AWS does not say what the card takes."""

    index: int
    takes: tuple[str, ...] = ()
    slots: int = 1
    gbps: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One network interface to ask for."""

    card: int
    device: int
    kind: str

    @property
    def has_address(self) -> bool:
        return self.kind != EFA_ONLY

    @property
    def is_efa(self) -> bool:
        return self.kind != ENA


@dataclass(frozen=True, kw_only=True)
class MachineType:
    """What EC2 says of an instance type."""

    name: str
    vcpus: int = 0
    gpus: int = 0
    efas: int = 0
    cards: tuple[Card, ...] = ()

    @property
    def efa_cards(self) -> tuple[Card, ...]:
        """Cards that carry one EFA each, as many as the type may have."""
        return _efa_cards(self.cards, self.efas)

    @property
    def efa_gbps(self) -> float:
        return sum(card.gbps for card in self.efa_cards)

    @property
    def family(self) -> str:
        return family(self.name)


def family(instance_type: str) -> str:
    """Return the letters before the generation, by which EC2 counts vCPU quotas: `p5en.48xlarge` is `p`."""
    name = instance_type.partition(".")[0]
    digit = next((place for place, letter in enumerate(name) if letter.isdigit()), len(name))
    return name[:digit]


def layout(machine: MachineType) -> tuple[Interface, ...]:
    """Return the interfaces of a node that uses every EFA of its type, the primary first; one plain one without EFA."""
    if not machine.efas or not machine.cards:
        return (Interface(card=0, device=0, kind=ENA),)
    first = machine.cards[0]
    placed = [_efa_on(card, first.index) for card in machine.efa_cards]
    if placed[0].card == first.index and placed[0].device == 0:
        return tuple(placed)
    return (Interface(card=first.index, device=0, kind=ENA), *placed)


def _efa_on(card: Card, first: int) -> Interface:
    kind = EFA_ONLY if EFA_ONLY in card.takes or not card.takes else EFA
    if card.index != first:
        return Interface(card=card.index, device=0, kind=kind)
    if card.slots > 1 and kind == EFA_ONLY:
        return Interface(card=card.index, device=1, kind=kind)
    # No room for a second interface: the primary itself is the EFA, address included.
    return Interface(card=card.index, device=0, kind=EFA)


def _efa_cards(cards: Sequence[Card], most: int) -> tuple[Card, ...]:
    told = [card for card in cards if EFA in card.takes or EFA_ONLY in card.takes]
    if told or any(card.takes for card in cards):
        return tuple(told[:most])
    # Nothing is told of the cards: where there is one too many for EFA, it is the first that carries ENA alone.
    return tuple(cards[max(0, len(cards) - most) :][:most])
