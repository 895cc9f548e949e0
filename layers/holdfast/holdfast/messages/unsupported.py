"""Wishes that are known and refused by name, before a stranger's field would be called a typing error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.domain.errors import Rejected

DIMENSIONS = ("tensor", "pipeline", "context", "expert", "sequence")
SHORT = ("tp", "pp", "cp", "ep", "sp")
PARALLELISM = frozenset(
    {"tensor", "pipeline", "context", "expert", "megatron", "ulysses", "ring", *SHORT}
    | {f"{name}_parallel" for name in DIMENSIONS}
    | {f"{name}_parallel_size" for name in DIMENSIONS}
    | {f"{name}_size" for name in SHORT}
)
ON_PREMISES = frozenset(
    {"on_prem", "onprem", "on_premise", "on_premises", "hybrid", "hosts", "hostfile", "ssh", "ssh_hosts", "local_nodes"}
)


def refuse_by_name(message: Mapping[str, Any]) -> None:
    """The message asks for nothing that Holdfast does not do on purpose. Raises Rejected."""
    for field, name in _wishes(message, ("training", "fleet"), PARALLELISM, ("training.parallel",)):
        raise Rejected(
            "unsupported_parallelism",
            f"{field} asks for {name}: tensor, pipeline, context and expert parallelism are not done here; "
            "set training.parallel to ddp, fsdp, hsdp or auto",
        )
    for field, name in _wishes(message, ("", "fleet"), ON_PREMISES, ("fleet.market", "fleet.zones", "fleet.placement")):
        raise Rejected(
            "on_premises_refused",
            f"{field} asks for {name}: a gang is EC2 instances of one type in one zone, never machines of your own; "
            "leave it out",
        )


def _wishes(
    message: Mapping[str, Any], parts: tuple[str, ...], names: frozenset[str], fields: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Yield each field whose own name, or whose text, is one of `names`."""
    for part in parts:
        inside = message.get(part) if part else message
        if isinstance(inside, Mapping):
            yield from ((f"{part}.{key}".lstrip("."), key) for key in inside if _plain(key) in names)
    for field in fields:
        part, _, name = field.partition(".")
        inside = message.get(part)
        value = inside.get(name) if isinstance(inside, Mapping) else None
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and {_plain(text), *_plain(text).split("_")} & names:
                yield field, text[:40]


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
