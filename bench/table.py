"""The table that every bench ends with: printed plainly, and written as JSON to out/bench/<name>.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

OUT = Path(__file__).parents[1] / "out" / "bench"


@dataclass(frozen=True)
class Row:
    """One figure, what is demanded of it, and whether it keeps that."""

    name: str
    value: str | float | int | None
    demand: str
    ok: bool


def report(name: str, rows: Iterable[Row], out: Path = OUT) -> int:
    """The table is printed and written; return 0 when every row is ok and there is one, else 1."""
    rows = list(rows)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return show(rows)


def show(rows: Sequence[Row]) -> int:
    """The table is printed; return 0 when every row is ok and there is one, else 1."""
    cells = [
        ("name", "value", "demand", "ok"),
        *((row.name, _text(row.value), row.demand, "ok" if row.ok else "MISSED") for row in rows),
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0 if rows and all(row.ok for row in rows) else 1


def _text(value: str | float | int | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
