"""Remembers machines and pools that failed the gate."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.application.ports import Ports
from holdfast.domain.events import GateRefused
from holdfast.domain.gate import (
    BAD_POOL_COOL_S,
    GATE_RETRY_S,
    QUARANTINE_S,
    Finding,
    Quarantined,
    judge,
    judge_network,
    pools_at_fault,
)
from holdfast.domain.ownership import FleetIntent, Node
from holdfast.domain.placement import cooled, jitter_of
from job_contract.reports import NetworkChecked


def inspect(nodes: Sequence[Node], intent: FleetIntent, ports: Ports) -> GateRefused | None:
    """Return the refusal of a fleet that is not what was bought, with its bad machines remembered; None when it is."""
    hosts = [node.ready.host for node in nodes if node.ready is not None and node.ready.host]
    known = ports.store.quarantined(hosts, ports.clock()) if hosts else {}
    expected = intent.purchase.expected if intent.purchase else None
    found = judge(nodes, expected, known)
    if found is not None:
        fresh = [node for node in nodes if node.ready is not None and node.ready.host not in known]
        _remember(found, fresh, ports)
    return _refused(found, nodes, intent, ports)


def inspect_network(report: NetworkChecked, node: Node, intent: FleetIntent, ports: Ports) -> GateRefused | None:
    """Return the refusal of a fleet whose preflight used another network than was bought; None when it used that."""
    expected = intent.purchase.expected if intent.purchase else None
    found = judge_network(report.instance, report.provider, report.bandwidth_gbps, expected)
    if found is not None:
        _remember(found, [node], ports)
    return _refused(found, [node], intent, ports)


def set_aside(host: str | None, reason: str, ports: Ports) -> None:
    """The machine under an instance is refused when it comes back, as far as it has a name."""
    if host:
        ports.store.quarantine(Quarantined(host=host, until=ports.clock() + QUARANTINE_S, reason=reason[:200]))


def _refused(found: Finding | None, nodes: Sequence[Node], intent: FleetIntent, ports: Ports) -> GateRefused | None:
    if found is None:
        return None
    if found.bad:
        _cool(found, nodes, intent, ports)
    return GateRefused(
        at=ports.clock(),
        attempt=intent.attempt,
        reason=found.sentence[:500],
        # Other pools may be asked before the one at fault.
        not_before=ports.clock() + GATE_RETRY_S,
        failure=found.failure,
    )


def _remember(found: Finding, nodes: Sequence[Node], ports: Ports) -> None:
    for node in nodes:
        if node.instance in found.bad and node.ready is not None and node.ready.host:
            until = ports.clock() + QUARANTINE_S
            ports.store.quarantine(Quarantined(host=node.ready.host, until=until, reason=found.code))


def _cool(found: Finding, nodes: Sequence[Node], intent: FleetIntent, ports: Ports) -> None:
    """The pool is left alone for a while: an instance bought at once may land on the machine that was just left."""
    now = ports.clock()
    ready = next((node.ready for node in nodes if node.ready is not None), None)
    if intent.purchase is None or ready is None:
        return
    pools = pools_at_fault(intent.purchase, ready.zone)
    known = ports.store.cold(pools)
    for pool in pools:
        cold = cooled(
            pool,
            known.get(pool),
            code=found.code,
            base_s=BAD_POOL_COOL_S,
            now=now,
            jitter=jitter_of(intent.fleet),
        )
        if cold != known.get(pool):
            ports.store.cool(cold)
