"""What a report of a node means for its job."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from holdfast.application.notices import (
    Fate,
    advised,
    maintenance,
    move_when_due,
    node_interrupted,
    swapped,
    unfit,
)
from holdfast.application.ports import Ports
from holdfast.application.quarantine import inspect, inspect_network, set_aside
from holdfast.application.record import record
from holdfast.application.slowdowns import watched
from holdfast.domain import gate, straggler
from holdfast.domain.classify import Ended, refined
from holdfast.domain.errors import Rejected
from holdfast.domain.events import (
    AllReady,
    CheckpointSaved,
    Event,
    Failed,
    OrderHeard,
    SaveLost,
    TrainingFinished,
    TrainingStarted,
)
from holdfast.domain.job import Job
from holdfast.domain.notices import MAINTENANCE, may_swap
from holdfast.domain.ownership import Node, Ownership, Ready
from holdfast.domain.phase import Phase
from holdfast.domain.records import replace
from job_contract import reports
from job_contract.checkpoint_layout import SavePointer
from job_contract.orders import Action

LOG_TAIL_CHARACTERS = 2_000
"""The end of a log says why; it stands in one item of the history."""

REBALANCE = "rebalance"

STEPLESS = frozenset({"waiting_for_data", "evaluating"})


class NodeReports:
    """Takes the reports of member nodes; a report of anybody else raises Rejected.

    `together` are those that came in one batch: their nodes are read at once, and their notices for one attempt of a
    job are written at once. `found` is what is to be measured of them: names as the alarms of the template know them.
    """

    def __init__(self, ports: Ports, together: Sequence[reports.Report] = ()) -> None:
        self.ports = ports
        several = sorted({report.instance for report in together}) if len(together) > 1 else []
        self._known = {node.instance: node for node in ports.store.nodes(several)} if several else {}
        self._unread = dict(self._known)
        self._ending = {
            report.instance: report.deadline_at
            for report in together
            if _ends_machine(report) and _of(self._known.get(report.instance), report)
        }
        self._told: set[str] = set()
        self.found: dict[str, float] = {}

    def take(self, report: reports.Report) -> None:
        """The job and the node's item say what the report said."""
        # Its first report may go by what the batch read; after that its item may be another.
        node = self._unread.pop(report.instance, None) or self.ports.store.node(report.instance)
        if node is None or not _of(node, report):
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
            efa_provider=report.efa_provider,
            disk_free_gb=_gb(report.disk_free_bytes),
            memory_free_gb=_gb(report.memory_free_bytes),
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
        self._stands(report, node, step=report.step)

    def _stands(self, report: reports.Progress | reports.CheckpointSaved, node: Node, *, step: int) -> None:
        # In these states the ranks agree on orders all the time: that is no hang, however long they last.
        moves = isinstance(report, reports.Progress) and report.state in STEPLESS
        step_at = report.at if moves or step != node.step else node.step_at
        # A report without a new step repeats the figures of the last one.
        fresh = report.node_ms if step != node.step else None
        slow = straggler.slow_nodes(fresh or ())
        counts = straggler.counted(node.slow, report.attempt, slow, report.at) if fresh else node.slow
        watch = watched(report, node, self.ports)
        evaluation_loss = _number(report.evaluation_loss)
        self.ports.store.update_node(
            replace(
                node,
                step=step,
                step_at=step_at,
                loss=_number(report.loss),
                tokens_per_s=_number(report.tokens_per_s),
                evaluation_loss=node.evaluation_loss if evaluation_loss is None else evaluation_loss,
                reported_at=report.at,
                slow=counts,
                watch=watch,
            )
        )
        if watch is not None and watch.signals and not watch.same_signals(node.watch):
            self.found["StepsSlowed"] = self.found.get("StepsSlowed", 0.0) + 1
        found = straggler.straggler(counts, slow, report.at)
        if found is not None:
            self._swap(found, report)

    def _swap(self, found: straggler.Straggler, report: reports.Report) -> None:
        """The machine is set aside, and left after the next save, unless the job has a move before it already."""
        job = self.ports.store.load(report.job)
        if job is None or job.roster_id is None or job.attempt != report.attempt or not may_swap(job):
            return
        roster = self.ports.store.roster(job.id, job.roster_id)
        slowest = next((one.instance for one in roster.nodes if one.node_rank == found.node_rank), "") if roster else ""
        node = self.ports.store.node(slowest) if slowest else None
        if node is None:
            return
        cause = found.sentence(slowest)[:300]
        set_aside(node.ready.host if node.ready else None, cause, self.ports)
        swapped(node, self.ports, cause=cause)

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
        job = self._record(
            CheckpointSaved(
                at=report.at,
                attempt=report.attempt,
                pointer=pointer,
                parent=report.parent,
                final=final,
                answered_after_s=report.answered_after_s,
            ),
            report.job,
        )
        if report.tokens_per_s is not None:
            # The ranks may have told a later step while the save was uploaded.
            self._stands(report, node, step=max(report.step, node.step))
        if not final:
            # A move that waited for this save need not wait for the sweep as well.
            move_when_due(job, self.ports)

    def _save_lost(self, report: reports.SaveLost, node: Node) -> None:
        reason = report.reason[:500]
        self._record(SaveLost(at=report.at, attempt=report.attempt, save=report.save, reason=reason), report.job)

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
            self._machine_ends(report, node)

    def _unfit(self, report: reports.Unfit, node: Node) -> None:
        set_aside(report.host or (node.ready.host if node.ready else None), report.reason, self.ports)
        unfit(report.instance, self.ports, cause=report.reason[:300])

    def _machine_ends(self, report: reports.NoticeSeen, node: Node) -> None:
        """About the machine, not about the attempt under which the node says it: it may be held, or in the next one."""
        if node.instance in self._told:
            return
        others = [one for one in self._ending if one not in self._told and _mates(self._known[one], node)]
        deadline_at = min([report.deadline_at, *(self._ending[one] for one in others)])
        told = node_interrupted(node, self.ports, deadline_at=deadline_at, cause="metadata", others=others)
        if told.job is not None and told.fate is Fate.TAKEN:
            self._told.update(told.job.doomed)

    def _record(self, event: Event, job_id: str) -> Job:
        return record(event, job_id, self.ports)


def _number(value: float | None) -> float | None:
    """Return the value; None for NaN and infinity, which a diverging run reports and DynamoDB cannot hold."""
    return value if value is not None and math.isfinite(value) else None


def _gb(size_bytes: int | None) -> int | None:
    return None if size_bytes is None else size_bytes // 10**9


def _ends_machine(report: reports.Report) -> TypeGuard[reports.NoticeSeen]:
    return isinstance(report, reports.NoticeSeen) and report.action != REBALANCE and report.action not in MAINTENANCE


def _of(node: Node | None, report: reports.Report) -> bool:
    return node is not None and node.job == report.job


def _mates(one: Node, other: Node) -> bool:
    """True for two members of one attempt; what is held has a way of its own."""
    both_members = one.state is other.state is Ownership.MEMBER
    return both_members and one.instance != other.instance and (one.job, one.attempt) == (other.job, other.attempt)


TAKERS: Mapping[type[reports.Report], Callable[[NodeReports, Any, Node], None]] = {
    reports.Ready: NodeReports._ready,
    reports.NetworkChecked: NodeReports._network_checked,
    reports.Progress: NodeReports._progress,
    reports.Started: NodeReports._started,
    reports.Heard: NodeReports._heard,
    reports.CheckpointSaved: NodeReports._checkpoint_saved,
    reports.SaveLost: NodeReports._save_lost,
    reports.Finished: NodeReports._finished,
    reports.Failed: NodeReports._failed,
    reports.NoticeSeen: NodeReports._notice_seen,
    reports.Unfit: NodeReports._unfit,
}
"""Kinds that are not here change nothing, and are logged by the door."""
