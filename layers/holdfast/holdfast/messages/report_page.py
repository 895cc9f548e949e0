"""holdfast.report/1 -> one HTML page: no script, nothing loaded from elsewhere, every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from holdfast.domain.cost import in_words

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 860, 240, 64, 28, 12, 12
TICKS = 4
LOSS, SPEED, EVALUATION = "#1f5fbf", "#2e7d4f", "#b35c00"
INTERRUPTED, SAVED = "#c62828", "#8a94a6"

STYLE = """
:root { color-scheme: light; font: 15px/1.5 system-ui, sans-serif; color: #1b2430; background: #f5f7fa }
body { max-width: 940px; margin: 0 auto; padding: 32px 24px 64px }
h1 { font-size: 26px; margin: 0 0 4px } h2 { font-size: 17px; margin: 36px 0 8px }
p { margin: 0 0 12px; color: #4a5668 }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(170px, 1fr)); gap: 12px; margin: 20px 0 }
dl div { background: #fff; border: 1px solid #dde3ec; border-radius: 8px; padding: 10px 14px }
dt { font-size: 12px; color: #66738a } dd { margin: 0; font-size: 19px; font-variant-numeric: tabular-nums }
svg { background: #fff; border: 1px solid #dde3ec; border-radius: 8px; width: 100%; height: auto; display: block }
svg text { font: 11px system-ui, sans-serif; fill: #66738a }
table { border-collapse: collapse; width: 100%; background: #fff; border: 1px solid #dde3ec; border-radius: 8px }
th, td { text-align: left; padding: 6px 12px; border-top: 1px solid #e8edf4; vertical-align: top; font-size: 14px }
th { font-size: 12px; color: #66738a; border-top: 0 } td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.key { font-size: 12px; color: #66738a; margin: 6px 0 0 } .key b { font-weight: 600 }
"""


def report_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report. It can be opened from a bucket, a mail or a disk alike."""
    curve = report["curve"]
    marks = _marks(report)
    sections = [
        f"<h1>{escape(report['name'])}</h1>",
        f"<p>{escape(report['job'])} · team {escape(report['team'])} · {escape(report['phase'])}"
        f"{': ' + escape(report['reason']) if report['reason'] else ''}</p>",
        _facts(report),
    ]
    if curve:
        losses = [(LOSS, [(one["step"], one["loss"]) for one in curve])]
        if report["evaluations"]:
            losses.append((EVALUATION, [(one["step"], one["loss"]) for one in report["evaluations"]]))
        speeds = [(SPEED, [(one["step"], one["tokens_per_s"]) for one in curve if one["tokens_per_s"] is not None])]
        sections += ["<h2>Loss</h2>", chart(losses, marks), _key(bool(report["evaluations"]))]
        sections += ["<h2>Tokens a second</h2>", chart(speeds, marks), _key(False)]
        sections += ["<h2>Steady steps</h2>", _speed(report["speed"])]
    else:
        sections.append("<h2>Loss</h2><p>No step was trained, or no node could bring its metrics out.</p>")
    sections += [
        "<h2>Attempts</h2>",
        _table(("Attempt", "Where", "Started (UTC)", "To training", "From step", "Closed by"), _attempts(report)),
        "<h2>Interruptions and failures</h2>",
        _table(("When (UTC)", "Attempt", "What"), _troubles(report), empty="None."),
        "<h2>Checkpoints</h2>",
        _table(("Committed (UTC)", "Step", "Save", ""), _checkpoints(report), empty="None was committed."),
    ]
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(report['name'])}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def chart(lines: Sequence[tuple[str, Sequence[tuple[float, float]]]], marks: Iterable[tuple[float, str, str]]) -> str:
    """Return an SVG of (colour, points) lines over steps, and of vertical (step, colour, text) marks.

    Values that are no finite number leave a gap.
    """
    known = [(step, value) for _, points in lines for step, value in points if _finite(value)]
    if not known:
        return "<p>Nothing to draw.</p>"
    first, last = min(step for step, _ in known), max(step for step, _ in known)
    low, high = min(value for _, value in known), max(value for _, value in known)
    room = (high - low) * 0.06 or abs(high) * 0.06 or 1.0
    low, high = low - room, high + room

    def x(step: float) -> float:
        share = (step - first) / (last - first) if last > first else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP), 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in range(TICKS + 1):
        value, step = low + (high - low) * tick / TICKS, first + (last - first) * tick / TICKS
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}" stroke="#eef2f7"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{_number(value)}</text>')
        anchor = "start" if tick == 0 else "end" if tick == TICKS else "middle"
        parts.append(f'<text x="{x(step)}" y="{HEIGHT - 8}" text-anchor="{anchor}">{step:,.0f}</text>')
    for step, colour, text in marks:
        if first <= step <= last:
            parts.append(
                f'<line x1="{x(step)}" x2="{x(step)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="{colour}" '
                f'stroke-dasharray="3 3"><title>{escape(text)}</title></line>'
            )
    for colour, points in lines:
        for run in _runs(points):
            path = " ".join(f"{x(step)},{y(value)}" for step, value in run)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-linejoin="round"/>'
            )
    return "".join([*parts, "</svg>"])


def _runs(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if _finite(value):
            runs[-1].append((step, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _marks(report: Mapping[str, Any]) -> list[tuple[float, str, str]]:
    """Where attempts went on after the first, and where saves were committed."""
    saves = [(one["step"], SAVED, f"saved: step {one['step']}") for one in report["checkpoints"]]
    resumed = [
        (one["from_step"], INTERRUPTED, f"attempt {one['attempt']} goes on from step {one['from_step']}")
        for one in report["attempts"]
        if one["attempt"] > 1 and "from_step" in one
    ]
    return saves + resumed


def _key(evaluated: bool) -> str:
    evaluation = f', <b style="color:{EVALUATION}">evaluation</b>' if evaluated else ""
    return (
        f'<p class="key">Over optimizer steps{evaluation}. Dashed: <b style="color:{INTERRUPTED}">a new attempt goes '
        f'on</b>, <b style="color:{SAVED}">a committed save</b>.</p>'
    )


def _facts(report: Mapping[str, Any]) -> str:
    goodput, cost = report["goodput"], report["cost_usd"]
    facts = {
        "Steps": f"{report['step']:,} of {report['steps']:,}",
        "Took": _length(report["ended_at"] - report["submitted_at"]),
        "Attempts": f"{len(report['attempts'])}",
        "Interruptions": f"{report['interruptions']}",
        "Steps lost": f"{report['lost_steps']:,}",
        "Tokens": f"{report['tokens']:,}",
        "Node time": _length(report["node_seconds"]),
        "Goodput": "not known" if goodput is None else f"{goodput:.1%}",
        "Cost, about": "not known" if cost is None else f"${in_words(cost)}",
    }
    return _cells(facts)


def _cells(facts: Mapping[str, str]) -> str:
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl>{cells}</dl>"


def _speed(speed: Mapping[str, Any]) -> str:
    """What a step took, how well the nodes scaled, what slowed it, and what to try."""
    efficiency = speed["efficiency"]
    formula = f"Scaling efficiency: {escape(speed['efficiency_formula'])}."
    parts = []
    if "attempt" in speed:
        facts = {
            "Tokens a second": f"{speed['tokens_per_s']:,.0f}",
            "A step": _milliseconds(speed["step_ms"]),
            "Waiting for data": _milliseconds(speed["data_wait_ms"]),
            "Waiting for other ranks": _milliseconds(speed["comm_ms"]),
            "Scaling efficiency": "not known" if efficiency is None else f"{efficiency:.1%}",
            "MFU": "not known" if speed["mfu"] is None else f"{speed['mfu']:.1%}",
        }
        where = f"{speed['nodes']} x {speed['instance_type']}" if speed["nodes"] else "machines that are not known"
        about = f"Attempt {speed['attempt']} on {where}, {speed['world_size']} ranks: medians of"
        about += f" {speed['steady_steps']:,} steps without starts, saves and evaluations."
        parts += [f"<p>{escape(about)}</p>", _cells(facts)]
    if efficiency is None:
        parts.append(f"<p>Scaling efficiency is not known: {escape(speed['efficiency_unknown'])}.</p>")
    else:
        one = f"One node: {speed['one_node_tokens_per_s']:,.0f} tokens/s, by {speed['one_node_job']}."
        parts.append(f"<p>{escape(one)}</p>")
    parts += [f"<p>Advice: {escape(hint)}</p>" for hint in speed["advice"]]
    if speed.get("mfu") is not None:
        formula += f" MFU: {escape(speed['mfu_formula'])}."
    parts.append(f'<p class="key">{formula}</p>')
    slow = [(_time(one["at"]), str(one["attempt"]), one["what"]) for one in speed["slowdowns"]]
    if slow:
        parts.append(_table(("Slow steps (UTC)", "Attempt", "What"), slow))
    return "".join(parts)


def _milliseconds(value: float | None) -> str:
    return "not known" if value is None else f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _attempts(report: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    for one in report["attempts"]:
        where = f"{one['nodes']} x {one['instance_type']}, {one['zone']}, {one['market']}" if "zone" in one else "-"
        to_training = (
            _length(one["trains_at"] - one["started_at"]) if "trains_at" in one and "started_at" in one else "-"
        )
        yield (
            str(one["attempt"]),
            where,
            _time(one.get("started_at")),
            to_training,
            str(one.get("from_step", "-")),
            one.get("why") or "-",
        )


def _troubles(report: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    for one in report["troubles"]:
        kind = one["kind"].replace("_", " ")
        yield _time(one["at"]), str(one["attempt"]), f"{kind}: {one['what']}" if one["what"] else kind


def _checkpoints(report: Mapping[str, Any]) -> Iterable[tuple[str, ...]]:
    for one in report["checkpoints"]:
        yield _time(one["at"]), f"{one['step']:,}", one["save"], "by order" if one["final"] else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str = "None.") -> str:
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    if not cells:
        return f"<p>{escape(empty)}</p>"
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < float("inf")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _time(at: float | None) -> str:
    return "-" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _length(seconds: float) -> str:
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    if hours:
        return f"{hours} h {rest // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{seconds:.1f} s"
