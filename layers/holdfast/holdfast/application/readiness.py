"""Says why a fleet that was bought never became ready."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from holdfast.application.launch import READY_WAIT_S
from holdfast.application.ports import Ports
from holdfast.domain.job import Job
from holdfast.domain.ownership import FleetIntent, Instance
from holdfast.domain.phase import Intent, Phase

SLACK_S = 30.0
"""The deadline runs in the state machine; this step comes after it, on another clock."""

CONSOLE_CHARACTERS = 300
SENTENCE_CHARACTERS = 900
NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]+")
SILENT_BOOT = (
    "they boot but cannot report: look at the subnets' way out (NAT, or endpoints for SQS, DynamoDB, S3, ECR and "
    "Logs), the security group, and whether the image can be pulled"
)


def explain_unready(job: Job, ports: Ports) -> str | None:
    """Return why the fleet is not ready though its time is up; None when that is not how the attempt ends."""
    intent = ports.store.intent(job.fleet) if job.fleet else None
    if intent is None or intent.outcome != "bought" or not _timed_out(job, intent, ports.clock()):
        return None
    machines = {one.id: one for one in ports.fleets.described(intent.instances)}
    ready = {node.instance for node in ports.store.nodes(intent.instances) if node.ready is not None}
    silent = [instance for instance in intent.instances if instance not in ready]
    if not silent:
        return None
    told = [
        f"{len(ready)} of {intent.nodes} nodes checked in within {READY_WAIT_S} s",
        _states([machines.get(instance) for instance in intent.instances]),
        *_reasons(machines.values()),
    ]
    running = [instance for instance in silent if instance in machines and machines[instance].state == "running"]
    if running and not ready:
        told.append(SILENT_BOOT)
    if running:
        tail = _printable(ports.fleets.console_tail(running[0]))
        told.append(f"console of {running[0]}: {tail or '(empty)'}")
    return "; ".join(told)[:SENTENCE_CHARACTERS]


def _timed_out(job: Job, intent: FleetIntent, now: float) -> bool:
    waiting = job.phase is Phase.LAUNCHING and job.intent is Intent.RUN and job.attempt_open and job.roster_id is None
    return waiting and now - (intent.closed_at or now) > READY_WAIT_S - SLACK_S


def _states(machines: Sequence[Instance | None]) -> str:
    counted = Counter(one.state if one else "unknown to EC2" for one in machines)
    return "EC2 shows " + ", ".join(f"{count} {state}" for state, count in sorted(counted.items()))


def _reasons(machines: Iterable[Instance]) -> list[str]:
    reasons = sorted({one.state_reason for one in machines if one.state_reason})
    return [f"ended by {', '.join(reasons)}"] if reasons else []


def _printable(text: str) -> str:
    """Return the end of the text on one line; a console has colours and other bytes that a row has no use for."""
    return NOT_PRINTABLE.sub(" ", text).strip()[-CONSOLE_CHARACTERS:]
