"""`holdfast explain`: why a job waits, was started again, or ended, from what was recorded, and what would help."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.domain.failure import failure_class
from holdfast.domain.job import Job
from holdfast.domain.phase import ENDED, WAITING, Intent, Phase
from holdfast_cli import show
from holdfast_cli.errors import told
from holdfast_cli.options import AsJson, JobId, StackName, known
from holdfast_cli.stack import Sight, Stack

LAST_DECISIONS = 8
ENDS = ("failed", "fleet_lost", "interruption_noticed", "capacity_refused", "gate_refused", "limit_passed", "gave_up")
"""Kinds that say why an attempt ended; the closing itself says only that it did."""

WISHES = {Intent.PAUSE: "pause_requested", Intent.CANCEL: "cancel_requested"}


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """`code` is for programs. `restarts` has a line for each attempt that ended, `decisions` the end of the history.

    `if_taken` is where the job would go, empty while nothing advises to leave its machines.
    """

    job: str
    phase: str
    code: str
    why: str
    unblock: str
    cost: str
    if_taken: str
    restarts: tuple[str, ...]
    decisions: tuple[str, ...]
    log_tail: str


@told
def explain(job: JobId, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Say why a job waits, was started again or ended, and what would help."""
    target = Stack(stack)
    sight = known(target, job)
    ahead = target.table.waiting(sight.job.team) if sight.job.dispatchable else []
    told_of = explained(sight, history_of(target, job), ahead, time.time())
    if as_json:
        show.as_json(asdict(told_of))
    else:
        show.facts(_facts(told_of))


def history_of(target: Stack, job: str) -> list[dict[str, Any]]:
    """Return what happened to the job, its acceptance first. Raises UnknownJob."""
    row = known(target, job).job
    accepted = {
        "kind": "accepted",
        "at": row.submitted_at,
        "cause": "",
        "attempt": 0,
        "before": "",
        "after": Phase.QUEUED.value,
        "version": 1,
        "detail": {"nodes": row.nodes, "market": row.market, "priority": row.priority},
    }
    hidden = ("pk", "sk", "expires_at")
    return [accepted, *({key: item[key] for key in item if key not in hidden} for item in target.table.history(job))]


def explained(sight: Sight, history: Sequence[Mapping[str, Any]], ahead: Sequence[str], now: float) -> Explanation:
    """Return the explanation; `ahead` are the ids of the team's waiting jobs in their order."""
    job = sight.job
    code, why, unblock = _because(sight, history, ahead, now)
    return Explanation(
        job=job.id,
        phase=show.phase(job),
        code=code,
        why=why,
        unblock=unblock,
        cost=show.money(job, now),
        if_taken=show.if_taken(job, now) or "",
        restarts=tuple(_restarts(history)),
        decisions=tuple(show.decision(item) for item in history[-LAST_DECISIONS:]),
        log_tail=next((tail for item in reversed(history) if (tail := _tail(item))), ""),
    )


def _because(
    sight: Sight, history: Sequence[Mapping[str, Any]], ahead: Sequence[str], now: float
) -> tuple[str, str, str]:
    """Return code, reason, and what would unblock it."""
    job = sight.job
    if job.phase in ENDED:
        return _ended(job, history)
    if job.phase is Phase.PAUSED:
        return "paused", f"paused{_asker(history, Intent.PAUSE)}", f"holdfast resume {job.id}"
    if job.intent is not Intent.RUN:
        code = job.limit or f"{job.intent.value}_asked"
        wish = f"{job.intent.value} was asked{_asker(history, job.intent)}" if job.intent in WISHES else job.reason
        return code, f"{wish}; {job.stage or 'it saves first'}", "nothing: it is being done"
    if job.phase in WAITING:
        return _waiting(job, ahead, now)
    if job.phase is Phase.LAUNCHING:
        ready = sum(node.ready is not None for node in sight.nodes)
        checked_in = f"; {ready} of {len(sight.nodes)} machines have checked in" if sight.nodes else ""
        return "launching", f"{job.stage}{checked_in}", "nothing: machines take minutes to start"
    if job.phase is Phase.RUNNING:
        return "running", job.reason or f"it trains; {show.progress(sight)}", "nothing"
    until = f" until {show.clock_time(job.deadline_at)} UTC" if job.deadline_at else ""
    return "interrupted", f"{job.reason}; it saves{until}", "nothing: it goes on from its newest save"


def _waiting(job: Job, ahead: Sequence[str], now: float) -> tuple[str, str, str]:
    because = getattr(job, "waiting", None)
    if job.attempt_open:
        return "attempt_open", f"{job.stage}: {job.reason or 'the last attempt is not closed'}", "nothing: seconds"
    if because is not None:
        return str(because.code), because.sentence, because.unblock
    if job.not_before > now:
        why = f"{job.stage} until {show.clock_time(job.not_before)} UTC: {job.reason}"
        return "not_before", why, failure_class(job.failure or "capacity").advice
    place = f"number {ahead.index(job.id) + 1} of {len(ahead)} in the queue of {job.team}" if job.id in ahead else ""
    why = "; ".join(filter(None, (place or job.stage, job.reason)))
    return "in_line", why, f"nothing; or `holdfast priority {job.id} N` with more than {job.priority}"


def _ended(job: Job, history: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    if job.phase is Phase.COMPLETED:
        return "completed", f"all steps are trained, {job.step} in {job.attempt} attempts", "nothing"
    again = f"holdfast retry {job.id}"
    if job.phase is Phase.CANCELLED:
        return "cancelled", f"cancelled{_asker(history, Intent.CANCEL)}", f"{again} goes on from the newest save"
    if job.failure is None:
        return "gave_up", job.reason, "submit it again, with what the reason names put right"
    return job.failure, job.reason, f"{failure_class(job.failure).advice}; then {again}"


def _asker(history: Sequence[Mapping[str, Any]], intent: Intent) -> str:
    asked = [item for item in history if item["kind"] == WISHES.get(intent)]
    return f" by {asked[-1]['cause']} at {show.clock_time(asked[-1]['at'])} UTC" if asked and asked[-1]["cause"] else ""


def _restarts(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each attempt that was closed: what ended it, who said so."""
    lines = []
    for closed in (item for item in history if item["kind"] == "attempt_closed"):
        mine = [item for item in history if item["attempt"] == closed["attempt"] and item["at"] <= closed["at"]]
        ended = next((item for kind in ENDS for item in mine if item["kind"] == kind), closed)
        lines.append(f"attempt {closed['attempt']}: {show.decision(ended)}")
    return lines


def _tail(item: Mapping[str, Any]) -> str:
    return str((item.get("detail") or {}).get("log_tail", ""))


def _facts(told_of: Explanation) -> list[tuple[str, str]]:
    lines = [
        ("job", told_of.job),
        ("phase", told_of.phase),
        ("why", f"{told_of.why} ({told_of.code})"),
        ("what helps", told_of.unblock),
        ("cost", told_of.cost),
        *([("if taken", told_of.if_taken)] if told_of.if_taken else []),
        *(("ended", line) for line in told_of.restarts),
        *(("decided", line) for line in told_of.decisions),
    ]
    return lines + [("log", line) for line in told_of.log_tail.splitlines()]
