"""Scripted nodes: they keep the contract as the real agent does, and count where real ranks would train.

What is real: orders and rosters as read from the table, checkpoints committed by the agent's own `Committer`, reports
encoded by the contract. What is scripted: one optimizer step a second, and ranks that do as they are told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from agent.cloud import Bucket
from agent.commit import Committed, Committer, Fenced
from bench.world.agenda import Agenda
from job_contract import reports
from job_contract.checkpoint_layout import (
    Part,
    SavedFile,
    SavePointer,
    file_key,
    manifest_key,
    open_manifest,
    parse_save_name,
    part_key,
    save_name,
)
from job_contract.node_files import RankSave
from job_contract.orders import Action, Orders, Roster, Wait, WaitItem, orders_key, roster_key, spec_key, wait_key
from job_contract.spec import JobSpec
from job_contract.version import canonical_json, decode, encode

TICK_S = 1.0
READY_S = 3.0
BEAT_S = 10.0
STEP_S = 1.0
RESTORE_S = 4.0
SAVE_S = 2.0
PROGRESS_STEPS = 20
EXITS_SETTLE_S = 3.0


class Surroundings(Protocol):
    """What a node can reach from where it runs."""

    agenda: Agenda
    bucket: Bucket
    gangs: dict[tuple[str, int], Gang]

    def orders_item(self, key: str) -> Mapping[str, Any] | None: ...
    def report(self, report: reports.Report) -> None: ...
    def beat(self, token: str) -> bool: ...
    def stepped(self, gang: Gang) -> None: ...


class _Silent:
    def note(self, event: str, **fields: object) -> None:
        """Nobody reads a scripted node's journal."""


@dataclass
class Node:
    """One instance. `heard` is (attempt, generation) of the newest order; `ran` the last attempt it had a part in."""

    around: Surroundings
    job: str
    instance: str
    instance_type: str
    zone: str
    ip: str
    alive: bool = True
    heard: tuple[int, int] = (0, 0)
    ran: int = 0
    gang: Gang | None = None
    deadline_at: float | None = None
    _next_ready_at: float = 0.0
    _next_beat_at: float = 0.0
    _told_of: float | None = None
    _token: str | None = None

    def boot(self) -> None:
        self._tick()

    def die(self) -> None:
        """The machine is gone, in the middle of whatever it did."""
        self.alive = False
        if self.gang:
            self.gang.lose(self)

    def notice(self, deadline_at: float) -> None:
        """The node's own metadata say that it will be ended."""
        self.deadline_at = deadline_at

    def say(self, kind: type[reports.Report], *, attempt: int, **fields: object) -> None:
        if self.alive:
            self.around.report(
                kind(job=self.job, attempt=attempt, instance=self.instance, at=self.around.agenda.now, **fields)  # type: ignore[arg-type]
            )

    def _tick(self) -> None:
        if not self.alive:
            return
        self._look_at_notice()
        orders = self._orders()
        if orders and (orders.attempt, orders.generation) > self.heard:
            self._obey(orders)
        if self.gang and self.gang.busy:
            self._beat()
        elif self.alive and (self.ran == 0 or self.heard[0] > self.ran):
            self._say_ready()
        self.around.agenda.after(TICK_S, self._tick)

    def _orders(self) -> Orders | None:
        item = self.around.orders_item(orders_key(self.job))
        return decode(Orders, item) if item else None

    def _obey(self, orders: Orders) -> None:
        self.heard = (orders.attempt, orders.generation)
        if orders.action is Action.RELEASE:
            # The agent ends and takes its ranks along; the machine runs on until it is ended.
            self.die()
        elif orders.attempt > self.ran and orders.action is Action.RUN:
            self._join(orders)
        elif orders.attempt == self.ran and self.gang and self.gang.busy and orders.action is Action.CHECKPOINT_STOP:
            self.gang.stop(orders.generation)
            self.say(reports.Heard, attempt=orders.attempt, generation=orders.generation, action=orders.action.value)

    def _join(self, orders: Orders) -> None:
        item = self.around.orders_item(roster_key(self.job, orders.roster_id or ""))
        roster = decode(Roster, item) if item else None
        if roster is None or roster.rank_of(self.instance) is None:
            return
        self.ran = orders.attempt
        gangs, key = self.around.gangs, (self.job, orders.attempt)
        if key not in gangs:
            spec = self.around.orders_item(spec_key(self.job, orders.spec_id))
            gangs[key] = Gang(self.around, orders, roster, decode(JobSpec, spec or {}))
        self.gang = gangs[key]
        self.gang.join(self)
        if self.deadline_at is not None:
            self.gang.stop(orders.generation)

    def _look_at_notice(self) -> None:
        if self.deadline_at is None or self._told_of == self.deadline_at:
            return
        self._told_of = self.deadline_at
        if self.gang and self.gang.busy:
            self.gang.stop(self.heard[1])
        attempt = self.ran or self.heard[0]
        self.say(reports.NoticeSeen, attempt=attempt, action="terminate", deadline_at=self.deadline_at)

    def _say_ready(self) -> None:
        now = self.around.agenda.now
        if now < self._next_ready_at or self.heard == (0, 0):
            return
        self._next_ready_at = now + READY_S
        self.say(
            reports.Ready,
            attempt=self.heard[0],
            ip=self.ip,
            port=29500,
            interface="eth0",
            instance_type=self.instance_type,
            zone=self.zone,
        )

    def _beat(self) -> None:
        now = self.around.agenda.now
        if now < self._next_beat_at:
            return
        if self._token is not None and self.around.beat(self._token):
            self._next_beat_at = now + BEAT_S
            return
        item = self.around.orders_item(wait_key(self.job, Wait.TRAINING))
        wait = decode(WaitItem, item) if item else None
        self._token = wait.token if wait and wait.attempt == self.ran else None


@dataclass
class Gang:
    """The ranks of one attempt. `stage`: joining, restoring, running, stopping, over."""

    around: Surroundings
    orders: Orders
    roster: Roster
    spec: JobSpec
    stage: str = "joining"
    step: int = 0
    saves: int = 0
    generation: int = 0
    members: dict[int, Node] = field(default_factory=dict)

    @property
    def attempt(self) -> int:
        return self.orders.attempt

    @property
    def busy(self) -> bool:
        return self.stage != "over"

    @property
    def restored(self) -> SavePointer | None:
        return self.orders.resume_from.pointer if self.orders.resume_from else None

    def join(self, node: Node) -> None:
        rank = self.roster.rank_of(node.instance)
        assert rank is not None
        self.members[rank] = node
        if self.stage == "joining" and len(self.members) == len(self.roster.nodes):
            self.stage = "restoring"
            self._later(RESTORE_S, "restoring", self._start)

    def stop(self, generation: int) -> None:
        """The ranks save what the last finished step left, and stop. Asked again: the generation is raised."""
        self.generation = max(self.generation, generation)
        if self.stage in ("joining", "restoring"):
            self._stop_before_the_first_step()
        elif self.stage == "running":
            self.stage = "stopping"
            self._later(SAVE_S, "stopping", self._save_and_end)

    def lose(self, node: Node) -> None:
        """A member is gone; its peers notice, and say so."""
        rank = self.roster.rank_of(node.instance)
        if rank is not None:
            self.members.pop(rank, None)
        if self.busy:
            self.stage = "losing"
            self._later(EXITS_SETTLE_S, "losing", self._fail)

    def _later(self, delay_s: float, stage: str, deed: Callable[[], None]) -> None:
        self.around.agenda.after(delay_s, lambda: deed() if self.stage == stage else None)

    def _start(self) -> None:
        if self.restored:
            self.step = self._read(self.restored)
        self.stage = "running"
        self._say(reports.Started, step=self.step, world_size=len(self.members), restored=self._restored_name)
        self._later(STEP_S, "running", self._train)

    @property
    def _restored_name(self) -> str | None:
        return self.restored.save if self.restored else None

    def _train(self) -> None:
        self.step += 1
        if self.step % PROGRESS_STEPS == 0:
            self._say(reports.Progress, step=self.step, loss=1.0 / self.step, tokens_per_s=1000.0)
        if self.step >= self.spec.training.steps:
            self._finish()
            return
        if self.step % (self.spec.checkpoint.interval_steps or self.spec.training.steps) == 0:
            committed = self._save(final=False)
            if committed:
                self._say_saved(committed, final=False)
        self.around.stepped(self)
        self._later(STEP_S, "running", self._train)

    def _finish(self) -> None:
        committed = self._save(final=True)
        self.stage = "over"
        if committed is None:
            return
        self._say_saved(committed, final=True)
        self._say(reports.Finished, step=self.step, loss=1.0 / self.step, save=committed.manifest.save)

    def _save_and_end(self) -> None:
        committed = self._save(final=True)
        self.stage = "over"
        if committed:
            self._say_saved(committed, final=True)

    def _stop_before_the_first_step(self) -> None:
        self.stage = "over"
        if self.restored is None:
            return
        committed = Committed(open_manifest(self._bytes(self.restored), job=self.spec.job, pointer=self.restored),
                              self.restored.manifest_sha256)  # fmt: skip
        self._say_saved(committed, final=True, existing=True)

    def _fail(self) -> None:
        self.stage = "over"
        for node in self.members.values():
            node.say(reports.Failed, attempt=self.attempt, failure="peer_lost", reason="a peer is gone")

    # -- storage ---------------------------------------------------------------------------------------------------

    def _save(self, *, final: bool) -> Committed | None:
        """The state is committed under a new name; None when a later attempt has taken the head over."""
        self.saves += 1
        save = save_name(self.step, self.attempt, self.saves)
        parts = [self._part(save, rank) for rank in sorted(self.members)]
        committer = Committer(
            self.around.bucket,
            prefix=self.spec.prefix,
            job=self.spec.job,
            attempt=self.attempt,
            journal=_Silent(),  # type: ignore[arg-type]
            pause=lambda _: None,
        )
        try:
            committed = committer.commit(self._rank_save(save, final=final), parts)
            committer.move_head(committed)
        except Fenced as fence:
            self.stage = "over"
            self._say(reports.Failed, failure="fenced", reason=str(fence))
            return None
        return committed

    def _part(self, save: str, rank: int) -> Part:
        body = f"state of rank {rank} after step {self.step}".encode()
        path = f"__{rank}_0.distcp"
        self.around.bucket.put(file_key(self.spec.prefix, save, path), body)
        part = Part(
            job=self.spec.job,
            attempt=self.attempt,
            save=save,
            node_rank=rank,
            roster_id=self.roster.roster_id,
            files=(
                SavedFile(path=path, size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest(), node_rank=rank),
            ),
        )
        self.around.bucket.put(part_key(self.spec.prefix, save, rank), canonical_json(encode(part)))
        return part

    def _rank_save(self, save: str, *, final: bool) -> RankSave:
        return RankSave(
            rank=0,
            save=save,
            step=self.step,
            world_size=len(self.roster.nodes),
            mesh=(len(self.roster.nodes),),
            config_hash="scripted",
            corpus_digest="scripted",
            versions={},
            facts={},
            files=(),
            final=final,
            answers_generation=self.generation,
            restored=self.restored,
        )

    def _bytes(self, pointer: SavePointer) -> bytes:
        stored = self.around.bucket.get(manifest_key(self.spec.prefix, pointer.save))
        assert stored is not None, f"{pointer.save} was to be restored and is not in the bucket"
        return stored.body

    def _read(self, pointer: SavePointer) -> int:
        """Return the step of the save after reading every file of it."""
        manifest = open_manifest(self._bytes(pointer), job=self.spec.job, pointer=pointer)
        for file in manifest.files:
            stored = self.around.bucket.get(file_key(self.spec.prefix, pointer.save, file.path))
            assert stored is not None
            assert hashlib.sha256(stored.body).hexdigest() == file.sha256
        return parse_save_name(pointer.save).step

    # -- reports ---------------------------------------------------------------------------------------------------

    def _say(self, kind: type[reports.Report], **fields: object) -> None:
        """The node of rank 0 says it; where that is gone, the first that is left."""
        if self.members:
            self.members[min(self.members)].say(kind, attempt=self.attempt, **fields)

    def _say_saved(self, committed: Committed, *, final: bool, existing: bool = False) -> None:
        """Every agent sees the commit, and every agent reports it."""
        report = reports.CheckpointSaved(
            job=self.spec.job,
            attempt=self.attempt,
            instance="",
            at=self.around.agenda.now,
            save=committed.manifest.save,
            manifest_sha256=committed.sha256,
            step=committed.manifest.step,
            final=final,
            answers_generation=self.generation,
            existing=existing,
            parent=committed.manifest.parent,
        )
        for node in self.members.values():
            if node.alive:
                self.around.report(replace(report, instance=node.instance))
