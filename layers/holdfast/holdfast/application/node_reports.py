"""What a report of a node means for its job."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.application.notices import advised, interrupted, maintenance
from holdfast.application.ports import Ports
from holdfast.application.quarantine import inspect, inspect_network
from holdfast.application.record import record
from holdfast.domain import gate
from holdfast.domain.classify import Ended, refined
from holdfast.domain.errors import Rejected
from holdfast.domain.events import (
    AllReady,
    CheckpointSaved,
    Event,
    Failed,
    OrderHeard,
    TrainingFinished,
    TrainingStarted,
)
from holdfast.domain.job import Job
from holdfast.domain.ownership import Node, Ownership, Ready
from holdfast.domain.phase import Phase
from holdfast.domain.records import replace
from job_contract import reports
from job_contract.checkpoint_layout import SavePointer
from job_contract.orders import Action

LOG_TAIL_CHARACTERS = 2_000
"""The end of a log says why; it stands in one item of the history."""

REBALANCE = "rebalance"
MAINTENANCE = frozenset(
    {"instance-reboot", "system-reboot", "system-maintenance", "instance-retirement", "instance-stop"}
)
"""EC2's codes of scheduled events, in metadata and in DescribeInstanceStatus; every other action ends the instance."""


class NodeReports:
    """Takes the reports of member nodes; a report of anybody else raises Rejected."""

    def __init__(self, ports: Ports) -> None:
        self.ports = ports

    def take(self, report: reports.Report) -> None:
        """The job and the node's item say what the report said."""
        node = self.ports.store.node(report.instance)
        if node is None or node.job != report.job:
            raise Rejected("not_a_member", f"{report.instance} is not a node of {report.job}")
        taker = TAKERS.get(type(report))
        if taker is not None:
            taker(self, report, node)

    def _ready(self, report: reports.Ready, node: Node) -> None:
        facts = Ready(
            ip=report.ip,
            port=report.port,
            instance_type=report.instance_type,
            zone=report.zone,
            gpus=report.gpus,
            efa_devices=report.efa_devices,
            # Whole seconds: a node repeats itself, and a reading that wavers is no news.
            clock_offset_s=float(round(report.clock_offset_s)),
            driver=report.driver,
            placement_group=report.placement_group,
            bandwidth_gbps=report.bandwidth_gbps,
            host=report.host,
        )
        if node.state is not Ownership.MEMBER or report.attempt != node.attempt:
            # A survivor repeats its old check-in until it has read the orders of the new attempt.
            return
        if node.ready != facts:
            # A node repeats itself until it is named: only the first time, or news, is worth a write.
            self.ports.store.update_node(replace(node, ready=facts))
        self._start_when_whole(node)

    def _start_when_whole(self, node: Node) -> None:
        intent = self.ports.store.intent(node.fleet)
        if intent is None or not intent.instances:
            return
        nodes = self.ports.store.nodes(intent.instances)
        if len(nodes) < intent.nodes or any(member.ready is None for member in nodes):
            return
        problem = inspect(nodes, intent, self.ports)
        if problem is not None:
            self._record(problem, node.job)
            return
        job = self.ports.store.load(node.job)
        last = job.last_roster_id if job else None
        before = self.ports.store.roster(node.job, last) if last else None
        roster = gate.make_roster(node.job, node.attempt, nodes, before)
        self.ports.store.put_roster(roster)
        self._record(AllReady(at=self.ports.clock(), attempt=node.attempt, roster_id=roster.roster_id), node.job)

    def _network_checked(self, report: reports.NetworkChecked, node: Node) -> None:
        intent = self.ports.store.intent(node.fleet)
        job = self.ports.store.load(node.job)
        if intent is None or job is None or job.phase is not Phase.LAUNCHING or job.attempt != report.attempt:
            return
        problem = inspect_network(report, node, intent, self.ports)
        if problem is not None:
            self._record(problem, node.job)

    def _progress(self, report: reports.Progress, node: Node) -> None:
        step_at = report.at if report.step != node.step else node.step_at
        self.ports.store.update_node(
            replace(
                node,
                step=report.step,
                step_at=step_at,
                loss=_number(report.loss),
                tokens_per_s=_number(report.tokens_per_s),
                reported_at=report.at,
            )
        )

    def _started(self, report: reports.Started, node: Node) -> None:
        fell_back = tuple(f"{miss.save} ({miss.file}: {miss.reason})" for miss in report.fell_back)
        self._record(
            TrainingStarted(
                at=report.at, attempt=report.attempt, step=report.step, restored=report.restored, fell_back=fell_back
            ),
            report.job,
        )

    def _heard(self, report: reports.Heard, node: Node) -> None:
        if report.action == Action.CHECKPOINT_STOP:
            self._record(OrderHeard(at=report.at, attempt=report.attempt, generation=report.generation), report.job)

    def _checkpoint_saved(self, report: reports.CheckpointSaved, node: Node) -> None:
        pointer = SavePointer(save=report.save, manifest_sha256=report.manifest_sha256)
        # The save after the last step is not an answer to an order: the ranks that made it go on to say «finished».
        final = report.final and report.answers_generation > 0
        self._record(
            CheckpointSaved(at=report.at, attempt=report.attempt, pointer=pointer, parent=report.parent, final=final),
            report.job,
        )

    def _finished(self, report: reports.Finished, node: Node) -> None:
        self._record(TrainingFinished(at=report.at, attempt=report.attempt, step=report.step), report.job)

    def _failed(self, report: reports.Failed, node: Node) -> None:
        ended = Ended(failure=report.failure, reason=report.reason, exit_code=report.exit_code, log=report.log_tail)
        verdict = refined(ended)
        reason = f"{report.instance}: {verdict.text}"[:500]
        tail = report.log_tail[-LOG_TAIL_CHARACTERS:]
        self._record(
            Failed(at=report.at, attempt=report.attempt, failure=verdict.failure, reason=reason, log_tail=tail),
            report.job,
        )

    def _notice_seen(self, report: reports.NoticeSeen, node: Node) -> None:
        if report.action == REBALANCE:
            advised(report.instance, self.ports)
        elif report.action in MAINTENANCE:
            maintenance([report.instance], self.ports, starts_at=report.deadline_at, cause=report.action)
        else:
            # About the machine, not about the attempt under which the node says it: it may be held, or in the next one.
            interrupted(report.instance, self.ports, deadline_at=report.deadline_at, cause="metadata")

    def _record(self, event: Event, job_id: str) -> Job:
        return record(event, job_id, self.ports)


def _number(value: float) -> float | None:
    """Return the value; None for NaN and infinity, which a diverging run reports and DynamoDB cannot hold."""
    return value if math.isfinite(value) else None


TAKERS: Mapping[type[reports.Report], Callable[[NodeReports, Any, Node], None]] = {
    reports.Ready: NodeReports._ready,
    reports.NetworkChecked: NodeReports._network_checked,
    reports.Progress: NodeReports._progress,
    reports.Started: NodeReports._started,
    reports.Heard: NodeReports._heard,
    reports.CheckpointSaved: NodeReports._checkpoint_saved,
    reports.Finished: NodeReports._finished,
    reports.Failed: NodeReports._failed,
    reports.NoticeSeen: NodeReports._notice_seen,
}
"""Kinds that change nothing here (unfit) are logged by the door."""
