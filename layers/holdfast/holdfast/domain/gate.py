"""Judges the fleet that checked in, and gives every node its rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from holdfast.domain.ownership import Node
from job_contract.orders import Leader, Roster, RosterNode
from job_contract.version import canonical_json, encode

GATE_RETRY_S = 60


def refusal(nodes: Sequence[Node]) -> str | None:
    """Return what is wrong with the topology, None when the ranks may start."""
    ready = [node.ready for node in nodes if node.ready is not None]
    zones = sorted({facts.zone for facts in ready})
    if len(zones) > 1:
        return f"the nodes are in {len(zones)} zones ({', '.join(zones)}); a gang needs one"
    types = sorted({facts.instance_type for facts in ready})
    if len(types) > 1:
        return f"the nodes are of {len(types)} types ({', '.join(types)}); a gang needs one"
    gpus = sorted({facts.gpus for facts in ready})
    if len(gpus) > 1:
        return f"the nodes see different numbers of GPUs ({', '.join(map(str, gpus))}); one of them is broken"
    return None


def make_roster(job: str, attempt: int, nodes: Sequence[Node], before: Roster | None) -> Roster:
    """Return the roster of an attempt: survivors keep their ranks, the others take the vacant ones.

    The same nodes give the same roster, whoever makes it: its id is the digest of its content.
    """
    kept = {node.instance: before.rank_of(node.instance) for node in nodes} if before else {}
    taken = {rank for rank in kept.values() if rank is not None and rank < len(nodes)}
    vacant = iter(rank for rank in range(len(nodes)) if rank not in taken)
    ranked = {}
    for node in sorted(nodes, key=lambda node: node.instance):
        rank = kept.get(node.instance)
        ranked[rank if rank in taken else next(vacant)] = node
    members, leader = [], None
    for rank, node in sorted(ranked.items()):
        if node.ready is None:
            raise ValueError(f"{node.instance} has not checked in")
        members.append(RosterNode(node_rank=rank, instance=node.instance, ip=node.ready.ip))
        leader = leader or Leader(ip=node.ready.ip, port=node.ready.port)
    if leader is None:
        raise ValueError(f"no nodes for {job}")
    draft = Roster(job=job, attempt=attempt, roster_id="", nodes=tuple(members), leader=leader)
    digest = hashlib.sha256(canonical_json(encode(draft))).hexdigest()[:12]
    return Roster(job=job, attempt=attempt, roster_id=f"{attempt}-{digest}", nodes=draft.nodes, leader=leader)
