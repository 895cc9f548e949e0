"""What ranks and agents wrote on their nodes: lines of JSON under nodes/<instance>/ of a cloud's folder."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def rank_lines(cloud_root: Path, kind: str, instances: Collection[str] | None = None) -> Iterator[Line]:
    """Yield the lines of metrics.jsonl or events.jsonl, each with its `instance`, oldest attempt of a node first."""
    for node in _nodes(cloud_root, instances):
        for path in (*sorted(node.glob(f"past/*/{kind}.jsonl")), node / "run" / f"{kind}.jsonl"):
            yield from _lines(path, node.name)


def agent_lines(cloud_root: Path, instances: Collection[str] | None = None) -> Iterator[Line]:
    """Yield the lines of the agents' journals, each with its `instance`."""
    for node in _nodes(cloud_root, instances):
        yield from _lines(node / "events.jsonl", node.name)


def write_lines(path: Path, lines: Iterable[Line]) -> None:
    """The lines are in the file, one JSON object each."""
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _nodes(cloud_root: Path, instances: Collection[str] | None) -> list[Path]:
    nodes = sorted((cloud_root / "nodes").glob("i-*"))
    return [node for node in nodes if instances is None or node.name in instances]


def _lines(path: Path, instance: str) -> Iterator[Line]:
    """A line that is being written, and a file that is being moved, are left out."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield {**json.loads(line), "instance": instance}
