"""Who owns an instance: intended -> member -> held -> ending. Every instance has an owner item at every moment.

An orphan is seen in EC2 and then, by strong reads made after the listing, has no owner or one whose time is over, no
open intent for its fleet, is older than the grace, and all that in two sweeps running.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from holdfast.domain.baseline import Watch
from holdfast.domain.purchase import Purchase
from holdfast.domain.straggler import Slow

ORPHAN_GRACE_S = 600
"""Longer than any call that may still be writing the owner item."""

SHOWN_WITHIN_S = 120
"""CreateFleet may take a minute to answer, and DescribeInstances some more to show what it brought."""

GONE = frozenset({"shutting-down", "terminated", "stopping", "stopped"})
"""EC2 states from which an instance does not come back to us."""


class Ownership(StrEnum):
    MEMBER = "member"
    HELD = "held"
    ENDING = "ending"


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What a node told of itself when it checked in; None = it did not say. `host` names the hardware under it."""

    ip: str
    port: int
    instance_type: str
    zone: str
    gpus: int = 0
    efa_devices: int = 0
    clock_offset_s: float = 0.0
    driver: str | None = None
    placement_group: str | None = None
    bandwidth_gbps: float | None = None
    host: str | None = None
    efa_provider: str | None = None
    disk_free_gb: int | None = None
    memory_free_gb: int | None = None


@dataclass(frozen=True, kw_only=True)
class Node:
    """The owner item of one instance; `market` is where it was bought, as far as EC2 said.

    `until` bounds a hold; `step_at` is when `step` was first reported. `slow` and `watch` are what the leader's reports
    add up to.
    """

    instance: str
    job: str
    fleet: str
    attempt: int
    state: Ownership = Ownership.MEMBER
    since_at: float
    until: float | None = None
    market: str = ""
    ready: Ready | None = None
    step: int = 0
    step_at: float | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    evaluation_loss: float | None = None
    reported_at: float | None = None
    slow: tuple[Slow, ...] = ()
    watch: Watch | None = None


@dataclass(frozen=True, kw_only=True)
class FleetIntent:
    """Written before CreateFleet, closed after its answer is owned: what may exist in EC2 because of us.

    A retry repeats `purchase` to the letter, since its client token stands for it. An open intent that names
    instances is a shortfall that was not given back yet. `node_usd_h`: what a node of it costs an hour, as far as it
    was known at purchase.
    """

    fleet: str
    job: str
    attempt: int
    candidate: int
    nodes: int
    opened_at: float
    instances: tuple[str, ...] = ()
    closed_at: float | None = None
    outcome: str = ""
    purchase: Purchase | None = None
    node_usd_h: float | None = None

    def withdrawn(self, now: float) -> FleetIntent:
        """Return it closed: nothing was asked for under it, and nothing will be."""
        return replace(self, closed_at=now, outcome=self.outcome or "withdrawn before it was asked for")

    def may_still_show(self, now: float) -> bool:
        """True while EC2 may hold machines of this purchase that it does not show yet."""
        return now - (self.closed_at or self.opened_at) < SHOWN_WITHIN_S


@dataclass(frozen=True, kw_only=True)
class Instance:
    """What EC2 says of a machine of ours."""

    id: str
    state: str
    instance_type: str
    zone: str
    launched_at: float
    job: str | None
    fleet: str | None
    state_reason: str = ""
    reservation: str = ""
    market: str = ""

    @property
    def live(self) -> bool:
        return self.state not in GONE


def may_belong(instance: Instance, node: Node | None, intent: FleetIntent | None, jobs: Collection[str]) -> bool:
    """True when tag, fleet, owner or purchase of the instance names one of the jobs, or when none of them names any."""
    fleet = instance.fleet.rsplit("-", 2)[0] if instance.fleet else None
    named = {instance.job, fleet, node.job if node else None, intent.job if intent else None} - {None, ""}
    return not named or not named.isdisjoint(jobs)


def suspect(
    instance: Instance, node: Node | None, intent: FleetIntent | None, now: float, *, closed: int = 0
) -> str | None:
    """Return why the instance looks like nobody's, None when it is owned or too young to say.

    `closed` is the newest attempt of its job that was closed when `node` was read: by then every member of it was
    ending or held, so one that still is a member was brought by a launch that the closing overtook.
    """
    if not instance.live or now - instance.launched_at < ORPHAN_GRACE_S:
        return None
    if intent is not None and intent.closed_at is None:
        return None
    if node is None:
        return f"no owner; launched {round(now - instance.launched_at)} s ago"
    if node.state is Ownership.MEMBER and node.attempt <= closed:
        return f"was bought for attempt {node.attempt}, which is over"
    if node.state is Ownership.HELD and now - (node.until or 0.0) > ORPHAN_GRACE_S:
        return f"was held until {round(now - (node.until or 0.0))} s ago"
    if node.state is Ownership.ENDING and now - node.since_at > ORPHAN_GRACE_S:
        return f"was to end {round(now - node.since_at)} s ago"
    return None
