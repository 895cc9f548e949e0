"""Jobs and their history as text for a terminal, and as plain data for `--json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.domain.cost import cost, in_words
from holdfast.domain.job import Job
from holdfast.domain.phase import Intent
from holdfast_cli.stack import Sight
from job_contract.version import plain

UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
WHOLE = frozenset({"JOB", "TIME (UTC)", "EVENT"})
PIPED_COLUMNS = 2_000
SAVES = {"pointer": "new save", "parent": "its parent", "resume_from": "resumes from"}
TIMES = frozenset({"until", "not_before"})
UNTOLD = frozenset({"log_tail", "request"})
"""A log has lines of its own in `explain`; the id of a wish says nothing to a reader."""

COLORS = {"completed": "green", "failed": "red", "cancelled": "yellow", "running": "cyan"}


def as_json(data: Any) -> None:
    """One JSON document is on standard output."""
    print(json.dumps(data, indent=2, ensure_ascii=False))


def as_json_line(data: Any) -> None:
    """One line of JSON is on standard output, out of the buffer."""
    print(json.dumps(data, ensure_ascii=False), flush=True)


def job_data(job: Job, now: float) -> dict[str, Any]:
    """Return the row as plain data, with what is derived from it."""
    saved_age = {"saved_age_s": round(now - job.saved.at, 3)} if job.saved else {}
    total = cost(job, now)
    told = {"cost_usd": total.known_usd, "unpriced_node_seconds": total.unpriced_s}
    return {**plain(job), "over": job.over, **told, **saved_age}


def money(job: Job, now: float) -> str:
    """Return what the job has cost so far, in words."""
    total = cost(job, now)
    budget = f" of {job.budget_usd:g} USD" if job.budget_usd is not None else " USD"
    unpriced = f"{total.unpriced_s:,.0f} node-seconds of unknown price"
    if total.known_usd is None:
        return unpriced
    return f"about {in_words(total.usd)}{budget}" + (f", and {unpriced}" if total.unpriced_s else "")


def if_taken(job: Job, now: float) -> str | None:
    """Return where the job would go if its machines were taken; None when nothing advises to leave them."""
    found = job.elsewhere
    if found is None or job.over or now >= found.until:
        return None
    return f"{found.words} (looked {age(now - found.at)} ago)"


def sight_data(sight: Sight, now: float) -> dict[str, Any]:
    steps = {"steps": sight.steps} if sight.steps is not None else {}
    return {**job_data(sight.job, now), "step": sight.step, **steps, "machines": [plain(node) for node in sight.nodes]}


def jobs_table(jobs: Sequence[Job], now: float) -> None:
    if not jobs:
        print("no jobs; `holdfast submit FILE` makes one")
        return
    rows = (
        (job.id, job.team, Text(phase(job), style=COLORS.get(job.phase.value, "")), *_numbers(job, now), job.stage)
        for job in jobs
    )
    table(("JOB", "TEAM", "PHASE", "ATTEMPT", "STEP", "LAST SAVE", "AGE", "TOOK", "STAGE"), rows)


def status(sight: Sight, now: float) -> None:
    facts(_facts(sight, now))


def facts(lines: Iterable[tuple[str, str]]) -> None:
    """Names and values are on standard output, a name that repeats itself once."""
    shown, last = Table(box=None, show_header=False, pad_edge=False), ""
    for name, value in lines:
        shown.add_row(Text(name if name != last else "", style="bold"), Text(clean(value), overflow="fold"))
        last = name
    _console().print(shown)


def history(items: Iterable[Mapping[str, Any]]) -> None:
    rows = (
        (clock_time(item["at"]), item["kind"], str(item["attempt"]), _change(item), clean(_why(item))) for item in items
    )
    table(("TIME (UTC)", "EVENT", "ATTEMPT", "PHASE", "CAUSE"), rows)


def line(sight: Sight, now: float) -> str:
    """Return the job's state in one line."""
    job = sight.job
    words = [clock_time(now), phase(job), f"attempt {job.attempt}", progress(sight)]
    if job.saved:
        words.append(f"saved {job.saved.save}")
    return clean("  ".join([*words, job.stage, job.reason])).rstrip()


def phase(job: Job) -> str:
    """Return the phase, with the user's wish where it is another than to run on."""
    wished = job.intent is not Intent.RUN and not job.over
    return f"{job.phase.value} ({job.intent.value} asked)" if wished else job.phase.value


def progress(sight: Sight) -> str:
    of = f" of {sight.steps}" if sight.steps is not None else ""
    told = next((node for node in sight.nodes if node.step == sight.step and node.loss is not None), None)
    more = f", loss {told.loss:.4f}, {told.tokens_per_s or 0:,.0f} tokens/s" if told and told.loss is not None else ""
    evaluated = f", evaluation loss {told.evaluation_loss:.4f}" if told and told.evaluation_loss is not None else ""
    return f"step {sight.step}{of}{more}{evaluated}"


def age(seconds: float) -> str:
    """Return a length of time in its largest unit."""
    size, unit = next(((size, unit) for size, unit in UNITS if seconds >= size), UNITS[-1])
    return f"{int(max(0.0, seconds) // size)} {unit}"


def counted(number: int, what: str) -> str:
    """Return the number with its noun: 1 interruption, 2 interruptions."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def clock_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def clean(text: str) -> str:
    """Return the text without characters that could steer the terminal: reasons carry words from logs."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _numbers(job: Job, now: float) -> tuple[str, str, str, str, str]:
    saved = age(now - job.saved.at) if job.saved else "-"
    took = age(job.ended_at - job.submitted_at) if job.ended_at is not None else "-"
    return str(job.attempt), str(job.step), saved, age(now - job.submitted_at), took


def _facts(sight: Sight, now: float) -> Iterable[tuple[str, str]]:
    job = sight.job
    yield "job", job.id
    yield "name", job.name
    yield "team", f"{job.team}, priority {job.priority}"
    yield "phase", f"{phase(job)}, since {age(now - job.phase_at)}"
    if job.stage:
        yield "stage", job.stage
    if job.reason:
        yield "reason", job.reason
    if job.failure:
        yield "failure", job.failure
    if (taken := if_taken(job, now)) is not None:
        yield "if taken", taken
    yield "attempt", f"{job.attempt}, {counted(job.interruptions, 'interruption')}"
    yield "progress", progress(sight)
    for node in sight.nodes:
        if node.watch and node.watch.told and node.watch.attempt == job.attempt:
            yield "slow steps", node.watch.told
    saved = job.saved
    yield "last save", f"{saved.save}, {age(now - saved.at)} ago" if saved else "none yet"
    yield "cost", money(job, now)
    yield "submitted", f"{clock_time(job.submitted_at)} UTC"
    if job.ended_at is not None:
        yield "ended", f"{clock_time(job.ended_at)} UTC"
    for node in sight.nodes:
        machine = f"{node.ready.instance_type} in {node.ready.zone}" if node.ready else "booting"
        yield "machine", f"{node.instance}  {machine}"


def _change(item: Mapping[str, Any]) -> str:
    before, after = str(item.get("before", "")), str(item.get("after", ""))
    return after if before == after else f"{before} -> {after}"


def decision(item: Mapping[str, Any]) -> str:
    """Return one event of the history in a line."""
    change = _change(item)
    words = (
        clock_time(item["at"]),
        str(item["kind"]),
        f"({_why(item)})" if _why(item) else "",
        change and f"[{change}]",
    )
    return "  ".join(filter(None, words))


def _why(item: Mapping[str, Any]) -> str:
    """Return who or what decided, and with what. The cause of a wish is who asked."""
    cause = str(item.get("cause", ""))
    asked = cause and str(item.get("kind", "")).endswith(("_requested", "_changed", "_extended"))
    told = (_fact(key, value) for key, value in (item.get("detail") or {}).items() if key not in UNTOLD)
    return "; ".join(part for part in (f"by {cause}" if asked else cause, ", ".join(filter(None, told))) if part)


def _fact(key: str, value: Any) -> str:
    """Return one detail of an event in words, nothing for what is false or empty."""
    if isinstance(value, Mapping):
        return f"{SAVES.get(key, key)} {value.get('save', '')}".strip()
    if isinstance(value, list):
        return f"{key} {', '.join(map(str, value))}" if value else ""
    if value is True:
        return key
    if key.endswith("_at") or key in TIMES:
        return f"{key.removesuffix('_at')} {clock_time(value)} UTC" if value else ""
    return "" if value is False or value == "" else f"{key} {value}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, no_wrap=head in WHOLE)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(clean(cell)) for cell in row))
    _console().print(table)


def _console() -> Console:
    """Return a console on standard output. Piped into another program a row stays one line, however long."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPED_COLUMNS)
