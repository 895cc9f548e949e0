"""What the steady steps of a job are held against, and the one signal when they have become slow."""

from __future__ import annotations

import json
from math import isfinite
from statistics import median

from holdfast.application.ports import Ports
from holdfast.application.record import record
from holdfast.domain import baseline
from holdfast.domain.baseline import Baseline, BaselineKey, Watch
from holdfast.domain.events import StepsSlowed
from holdfast.domain.job import Job
from holdfast.domain.notices import trains
from holdfast.domain.ownership import Node
from job_contract import reports

CAUSE_CHARACTERS = 300
"""The sentence stands in the leader's item, which is written with each report."""

Told = reports.Progress | reports.CheckpointSaved


def watched(report: Told, node: Node, ports: Ports) -> Watch | None:
    """Return the leader's watch after this report; the history has the signal that it brought, where it brought one.

    An attempt's first window of steady steps is kept as a baseline where none is known for its key, or a worse one.
    """
    steady = report.steady
    if steady is None or not _usable(steady) or report.attempt != node.attempt or report.at <= (node.reported_at or 0):
        return node.watch
    before = node.watch if node.watch and node.watch.attempt == report.attempt else Watch(attempt=report.attempt)
    watch = before.grown(steady)
    if watch.window is not None:
        watch = _compared(watch, watch.window, node, ports, at=report.at)
    watch = watch.judged(steady, report.at)
    return _signalled(watch, steady, report, ports) if watch.signalling(report.at) else watch


def _usable(steady: reports.Steady) -> bool:
    """An image of the user's own may report anything, and DynamoDB holds no NaN."""
    told = [value for value in vars(steady).values() if value is not None]
    return all(isfinite(value) and value >= 0 for value in told) and min(steady.steps, steady.step_ms) > 0


def _compared(watch: Watch, window: reports.Steady, node: Node, ports: Ports, *, at: float) -> Watch:
    """The attempt is judged by the baseline of its key; where there is none, by its own first window."""
    job, request = ports.store.load(node.job), ports.store.request(node.job)
    if job is None or request is None or job.attempt != watch.attempt or not job.gang:
        return watch
    own = Baseline.of(window, job=job.id, at=at, nodes=job.gang)
    instance_type = job.pool.instance_type if job.pool else node.ready.instance_type if node.ready else ""
    key = BaselineKey.of(json.loads(request["body"]), instance_type, window.world_size)
    known = ports.store.baseline(key)
    if known is None or known.outdone_by(own):
        ports.store.keep_baseline(key, own)
        known = own
    return watch.judging_by(known)


def _signalled(watch: Watch, steady: reports.Steady, report: Told, ports: Ports) -> Watch:
    job = ports.store.load(report.job)
    if job is None or job.attempt != report.attempt or not trains(job) or watch.usual is None:
        return watch
    instance, sentence = _words(watch.usual, steady, report, job, ports)
    number = watch.signals + 1
    event = StepsSlowed(at=report.at, attempt=report.attempt, number=number, instance=instance, cause=sentence)
    # Before the watch is written: a report that comes again must find that the signal is still due.
    record(event, job.id, ports)
    return watch.signalled(sentence)


def _words(usual: Baseline, steady: reports.Steady, report: Told, job: Job, ports: Ports) -> tuple[str, str]:
    """Return the machine that explains the slow steps, empty where none does, and the signal in words."""
    off, node_ms = baseline.excesses(steady, usual), report.node_ms or ()
    rank = baseline.culprit(off, node_ms)
    measured_on = f"rank 0 on {report.instance}"
    if rank is None:
        return "", baseline.sentence(off, measured_on=measured_on, node="")[:CAUSE_CHARACTERS]
    roster = ports.store.roster(job.id, job.roster_id) if job.roster_id else None
    instance = next((one.instance for one in roster.nodes if one.node_rank == rank), "") if roster else ""
    said = baseline.sentence(
        off,
        measured_on=measured_on,
        node=f"node {rank} ({instance or 'unknown'})",
        own_ms=node_ms[rank],
        others_ms=median([*node_ms[:rank], *node_ms[rank + 1 :]]),
    )
    return instance, said[:CAUSE_CHARACTERS]
