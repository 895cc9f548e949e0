"""One attempt on this node: from the roster that names the node to the end of its ranks and of its saves."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from agent.cloud import Bucket, SecretStores
from agent.commit import Committed, Committer
from agent.environment import environment_for
from agent.exits import Ended, Exits
from agent.fetch import Fetch
from agent.gpus import GpuFigures
from agent.hang import HangWatch
from agent.host import Host, disk_free_bytes, memory_free_bytes
from agent.hygiene import end_marked
from agent.journal import Journal
from agent.kernel import KernelLog
from agent.logs import Follower, curve, log_key, tails
from agent.network import carrier, silent_peers
from agent.orders import Seen
from agent.ranks import Crash, Ranks, Seats
from agent.saves import Found, LostToFence, Result, Saved, SaveFailed, Saves
from agent.secrets import resolve, without
from agent.settings import Pace, Settings
from agent.shards import DATA, EVALUATION, Shards, place_of, visible_folder
from agent.steady import SteadySteps
from agent.weights import WeightFiles, address_of
from job_contract.checkpoint_layout import metrics_key, parse_save_name
from job_contract.node_files import (
    Control,
    ControlKind,
    JobFile,
    NetworkCheck,
    Outcome,
    RankProgress,
    read_message,
    write_message,
)
from job_contract.orders import Roster
from job_contract.reports import CheckpointSaved, Failed, Finished, NetworkChecked, Progress, Report, SaveLost, Started
from job_contract.spec import DataSpec

T = TypeVar("T")

STOPS = (ControlKind.CHECKPOINT_STOP, ControlKind.STOP)

# So many lines of the kernel go with the rank's own: they tell a broken GPU, and who was killed for memory.
KERNEL_LINES = 8

NOTHING_TO_SAVE = "stopped as ordered before a step was finished: there was nothing to save"


class State(StrEnum):
    """RUNNING -> DRAINING (a stop is ordered) -> UPLOADING (the ranks ended well) -> OVER; OVER follows any failure."""

    RUNNING = "running"
    DRAINING = "draining"
    UPLOADING = "uploading"
    OVER = "over"


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What an attempt works with. `say` sends a report; its first argument is the kind, the others its own fields."""

    settings: Settings
    pace: Pace
    interface: str
    instance_type: str
    gpus: int
    efas: int
    bucket: Bucket
    journal: Journal
    say: Callable[..., None]
    secrets: SecretStores
    clock: Callable[[], float] = time.time
    host: Host = field(default_factory=Host)
    clock_offset_s: Callable[[], float] = lambda: 0.0
    kernel: KernelLog = field(default_factory=lambda: KernelLog(tuple))
    gpu_figures: Callable[[], tuple[GpuFigures, ...]] = tuple


class Attempt:
    """`tick` moves it on and returns at once. Made and started in the main thread, because it forks."""

    def __init__(self, seen: Seen, roster: Roster, node_rank: int, tools: Tools) -> None:
        self.number, self.spec, self.roster, self.node_rank = seen.orders.attempt, seen.spec, roster, node_rank
        self.state = State.RUNNING
        self.control = Control(attempt=self.number, generation=seen.orders.generation)
        self._tools, self._run_dir, self._journal = tools, tools.settings.run_dir, tools.journal
        self._seats = Seats.of(seen.spec, roster, node_rank, tools.interface)
        self._stops: set[int] = set()
        self._early: set[int] = set()
        self._outcome: Outcome | None = None
        self._saved: dict[str, Committed] = {}
        self._said_final: set[str] = set()
        self._withheld: Committed | None = None
        self._progress: RankProgress | None = None
        self._steady = SteadySteps()
        self._asked: str | None = None
        self._exits = Exits(self._seats.ranks, self._read_outcome, pace=tools.pace, clock=tools.clock)
        self._started = False
        self._secrets: dict[str, str] = {}
        self._next_look_at = self._next_progress_at = self._next_hang_look_at = 0.0
        self._network_said = False
        self._watch = HangWatch(self._run_dir, grace_s=tools.pace.hang_grace_s, clock=tools.clock)
        self._prepare(seen)
        self.saves, self._fetch = self._make_saves(), self._make_fetch()
        evaluation = self.spec.training.evaluation
        asked = {DATA: self.spec.training.data, EVALUATION: evaluation.data if evaluation else DataSpec()}
        self._sources: list[Shards | WeightFiles] = [
            self._make_shards(name, data) for name, data in asked.items() if data.uri
        ]
        weights = address_of(self.spec.training, seen.orders.resume_from)
        if weights:
            self._sources.append(self._make_weights(weights))

    def start(self, *, free_port: Callable[[], None]) -> None:
        """The ranks run; `free_port` has been called just before. Raises OSError, SecretUnavailable."""
        self.saves.loop.start()
        self._fetch.loop.start()
        for source in self._sources:
            source.loop.start()
        image = self.spec.image
        command = image.command if image and image.command else self._tools.settings.command
        self._secrets = resolve(self.spec.secrets or {}, self._tools.secrets)
        variables = {**(self.spec.environment or {}), **self._secrets}
        self._tools.kernel.mark()
        free_port()
        self.ranks = Ranks(
            command,
            self._seats,
            run_dir=self._run_dir,
            root=self._tools.settings.root,
            variables=variables,
            machine=self._machine(),
            host=self._tools.host,
        )
        self._journal.note("ranks_started", attempt=self.number, node_rank=self.node_rank, pids=self.ranks.pids())

    def _machine(self) -> dict[str, str]:
        """Return the variables that this machine's type calls for; the journal has the reasons."""
        tools, leader = self._tools, self.roster.leader
        settings = environment_for(
            tools.instance_type,
            gpus=tools.gpus,
            efas=tools.efas,
            nodes=len(self.roster.nodes),
            interface=tools.interface,
            logs=self._run_dir / "logs",
            leader=f"{leader.ip}:{leader.port}",
            node_rank=self.node_rank,
        )
        self._journal.note("environment", **{name: f"{value} ({why})" for name, (value, why) in settings.items()})
        return {name: value for name, (value, _) in settings.items()}

    def log_tails(self) -> dict[str, bytes]:
        """Return the end of each rank's log by its key in the bucket, without the values of secrets."""
        found = tails(self._run_dir / "logs", self._secrets)
        return {log_key(self.spec.prefix, self.number, name): body for name, body in found.items()}

    @property
    def commits(self) -> int:
        """Return how many saves of this attempt are known here to be committed."""
        return len(self._saved)

    def curve(self) -> dict[str, bytes]:
        """Return what rank 0 measured so far by its key in the bucket; nothing on the nodes without it."""
        if 0 not in self._seats.ranks:
            return {}
        steady = self._steady.line(self.number, self._tools.clock())
        return {metrics_key(self.spec.prefix, self.number): curve(self._run_dir, steady)}

    def follow(self, follower: Follower) -> None:
        """What the ranks printed since the last call is sent."""
        follower.look(self.roster.job, self.number, self._run_dir / "logs", self._secrets)

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the ranks' process ids, also when they have ended."""
        return tuple(self.ranks.pids().values()) if hasattr(self, "ranks") else ()

    @property
    def busy(self) -> bool:
        return self.state is not State.OVER

    def order(self, kind: ControlKind, *, generation: int, deadline_at: float | None, doomed: tuple[str, ...]) -> None:
        """The ranks are told; node ranks once under notice stay so."""
        ranks = {rank for instance in doomed if (rank := self.roster.rank_of(instance)) is not None}
        self.control = Control(
            attempt=self.number,
            generation=max(generation, self.control.generation),
            kind=kind,
            deadline_at=deadline_at,
            doomed=tuple(sorted(ranks | set(self.control.doomed))),
        )
        self._write_control()
        if kind in STOPS:
            self._stops.add(self.control.generation)
            if self.state is State.RUNNING:
                self.state = State.DRAINING
        else:
            self._early.add(self.control.generation)

    def raise_generation(self, generation: int) -> None:
        """A checkpoint that this node starts by itself carries the newest generation that it has seen."""
        if self.control.kind is ControlKind.NONE:
            self.control = replace(self.control, generation=max(generation, self.control.generation))

    def tick(self) -> None:
        """One look at ranks, progress and saves."""
        while not self.saves.results.empty():
            self._take(self.saves.results.get())
        if self.state in (State.RUNNING, State.DRAINING):
            self._look_at_network()
            self._look_at_progress()
            self._look_at_ranks()
            self._look_for_hang()
        elif self.state is State.UPLOADING:
            self._settle_outcome()

    def abandon(self) -> None:
        """The supervisor has given the attempt up: no rank runs any more, saves on disk may still be committed."""
        if self.state in (State.RUNNING, State.DRAINING):
            self._journal.note("attempt_given_up", attempt=self.number)
            self._tell_withheld()
            self._end_ranks()
            self.state = State.OVER

    def leave(self) -> None:
        """Nothing of the attempt runs on this node; saves that were not committed are given up."""
        self._tell_withheld()
        self.state = State.OVER
        self.saves.loop.close()
        self._fetch.loop.close()
        for source in self._sources:
            source.loop.close()
        self._end_ranks()
        self.saves.loop.close(wait_s=self._tools.pace.rank_end_s)

    # Start

    def _prepare(self, seen: Seen) -> None:
        """No process of an earlier attempt runs, and the run directory holds this attempt's orders only."""
        left = end_marked(self._tools.settings.root)
        if left:
            self._journal.note("not_ended", processes=left)
        shutil.rmtree(self._run_dir, ignore_errors=True)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        resume = seen.orders.resume_from
        job = JobFile(
            job=self.roster.job,
            attempt=self.number,
            spec=self.spec,
            node_rank=self.node_rank,
            nodes=len(self.roster.nodes),
            agent_pid=os.getpid(),
            corpus_dir=str(
                visible_folder(self._run_dir) if self.spec.training.data.uri else self._tools.settings.corpus_dir
            ),
            roster_id=self.roster.roster_id,
            resume_from=resume.pointer if resume else None,
            resume_parent=resume.parent if resume else None,
        )
        write_message(self._run_dir / "job.json", job)
        self._write_control()

    def _make_saves(self) -> Saves:
        tools = self._tools
        committer = Committer(
            tools.bucket, prefix=self.spec.prefix, job=self.roster.job, attempt=self.number, journal=tools.journal
        )
        return Saves(
            self._seats,
            roster_id=self.roster.roster_id,
            prefix=self.spec.prefix,
            run_dir=self._run_dir,
            bucket=tools.bucket,
            committer=committer,
            control=lambda: self.control,
            pace=tools.pace,
            journal=tools.journal,
            clock=tools.clock,
        )

    def _make_fetch(self) -> Fetch:
        return Fetch(
            self._seats.ranks,
            job=self.roster.job,
            prefix=self.spec.prefix,
            run_dir=self._run_dir,
            local=(self._tools.settings.kept_dir, self._run_dir / "saves"),
            bucket=self._tools.bucket,
            downloads=self._tools.pace.downloads,
            journal=self._journal,
        )

    def _make_shards(self, name: str, data: DataSpec) -> Shards:
        return Shards(
            data,
            self._seats.ranks,
            run_dir=self._run_dir,
            root=self._tools.settings.root,
            place=place_of(data.uri or "", self._tools.bucket),
            downloads=self._tools.pace.downloads,
            journal=self._journal,
            name=name,
        )

    def _make_weights(self, uri: str) -> WeightFiles:
        return WeightFiles(
            uri,
            self.spec.training.init_sha256,
            run_dir=self._run_dir,
            root=self._tools.settings.root,
            place=place_of(uri, self._tools.bucket),
            downloads=self._tools.pace.downloads,
            journal=self._journal,
        )

    def _write_control(self) -> None:
        write_message(self._run_dir / "control.json", self.control)
        self._journal.note(
            "control_written",
            attempt=self.number,
            generation=self.control.generation,
            kind=self.control.kind.value,
            doomed=self.control.doomed,
        )

    # Ranks

    def _look_at_progress(self) -> None:
        now = self._tools.clock()
        if self.node_rank != 0 or now < self._next_look_at:
            return
        self._next_look_at = now + self._tools.pace.progress_look_s
        progress = self._read(self._run_dir / "progress.json", RankProgress)
        if progress is None:
            return
        self._progress = progress
        self._steady.look(progress, saving=self.saves.under_way())
        if progress.started and not self._started:
            self._started = True
            self._say_started(progress)
        if now >= self._next_progress_at:
            self._next_progress_at = now + self.spec.report_s
            gpus = self._tools.gpu_figures()
            self._steady.saw_memory([one.memory_used_bytes / one.memory_bytes for one in gpus if one.memory_bytes])
            self._say(
                Progress,
                step=progress.step,
                loss=progress.loss,
                tokens_per_s=progress.tokens_per_s,
                state=progress.state,
                step_ms=progress.step_ms,
                data_wait_ms=progress.data_wait_ms,
                comm_ms=progress.comm_ms,
                node_ms=progress.node_ms,
                mfu=progress.mfu,
                gpus=tuple(map(str, gpus)) or None,
                disk_free_bytes=disk_free_bytes(self._run_dir),
                memory_free_bytes=memory_free_bytes(),
                evaluation_loss=progress.evaluation_loss,
                steady=self._steady.take(),
            )

    def _look_at_network(self) -> None:
        """A gang of several nodes tells once what carried its first collective."""
        if self._network_said or len(self.roster.nodes) < 2:
            return
        check = self._read(self._run_dir / "network.json", NetworkCheck)
        if check is None:
            return
        self._network_said = True
        self._say(
            NetworkChecked,
            provider=carrier(check.backend, self._run_dir / "logs"),
            seconds=check.seconds,
            # What gloo reaches over TCP is judged by nobody.
            bandwidth_gbps=check.bandwidth_gbps if check.backend == "nccl" else None,
        )

    def _look_for_hang(self) -> None:
        now = self._tools.clock()
        if now < self._next_hang_look_at or self.state not in (State.RUNNING, State.DRAINING):
            return
        self._next_hang_look_at = now + self._tools.pace.progress_look_s
        hang = self._watch.look({rank: pid for rank, pid in self.ranks.pids().items() if rank not in self._exits.told})
        if hang is not None:
            self.ranks.dump_stacks(within_s=self._tools.pace.stacks_s)
            troubles = [f"; {source.field}: {source.trouble}" for source in self._sources if source.trouble]
            reason = hang.reason + "".join(troubles if hang.pulse.waits_for else ())
            self._fail(Crash(failure="hang", reason=reason, rank=hang.pulse.rank))

    def _say_started(self, progress: RankProgress) -> None:
        self._say(
            Started,
            step=parse_save_name(progress.restored).step if progress.restored else 0,
            world_size=progress.world_size,
            restored=progress.restored,
            fell_back=progress.fell_back,
        )

    def _look_at_ranks(self) -> None:
        codes = self.ranks.codes()
        match self._exits.look(codes):
            case Crash() as crash:
                self._fail(crash)
            case Ended(outcome, troubles):
                if None in codes.values():
                    self._end_ranks()
                for trouble in troubles:
                    self._journal.note("bad_exit_after_outcome", reason=trouble)
                self._look_at_last_progress()
                self._outcome = outcome
                self._journal.note("outcome", outcome=outcome.outcome, step=outcome.step, save=outcome.save)
                self.state = State.UPLOADING

    def _read_outcome(self, rank: int) -> Outcome | None:
        return self._read(self._run_dir / "outcome" / f"rank-{rank}.json", Outcome)

    def _look_at_last_progress(self) -> None:
        """A training shorter than a look still says that it started."""
        self._next_look_at = 0.0
        self._look_at_progress()

    def _read(self, path: Path, kind: type[T]) -> T | None:
        """Return a rank's message, None when there is none or it does not keep the contract."""
        try:
            return read_message(path, kind)
        except ValueError as error:
            self._journal.note("message_unread", file=path.name, error=str(error))
            return None

    def _fail(self, crash: Crash) -> None:
        source = next((source for source in self._sources if source.damaged), None)
        if source and source.damaged and crash.failure == "user_error":
            crash = replace(crash, reason=f"{source.field}: {source.damaged.file}: {source.damaged.reason}")
        tail = without(self.ranks.log_tail(crash.rank), self._secrets)
        if crash.failure == "network":
            peers = silent_peers(tail, self.roster, self.node_rank) or ("a node that it does not name",)
            crash = replace(crash, reason=f"{crash.reason}: no way to {', '.join(peers)}")
        self._journal.note("outcome", outcome="failed", failure=crash.failure, reason=crash.reason)
        self._tell_withheld()
        self._say(
            Failed,
            failure=crash.failure,
            reason=crash.reason,
            exit_code=crash.exit_code,
            rank=crash.rank,
            log_tail="\n".join([tail, *self._tools.kernel.lines()[-KERNEL_LINES:]]).strip(),
        )
        # Last, so that the cause is on its way before the peers see their connections close, and tell of that.
        self._end_ranks()
        self.state = State.OVER

    def _end_ranks(self) -> None:
        if hasattr(self, "ranks"):
            self.ranks.end(grace_s=self._tools.pace.rank_end_s)

    # Saves

    def _take(self, result: Result) -> None:
        match result:
            case Saved(committed):
                self._saved[result.name] = committed
                self._forget_what_was_restored()
                self._say_saved(committed, final=self._is_final(committed))
            case SaveFailed(name, final, reason):
                self._journal.note("save_failed", save=name, reason=reason)
                if self.node_rank < self._tools.pace.heartbeat_nodes:
                    self._say(SaveLost, save=name, reason=reason)
                if final or self._answers_stop(name):
                    self._over(Failed, failure="save_failed", reason=f"{name}: {reason}")
            case LostToFence(reason):
                self._over(Failed, failure="fenced", reason=reason)
            case Found(name, committed):
                self._found(name, committed)

    def _forget_what_was_restored(self) -> None:
        """Local disk has room for the newest committed save and the one in flight."""
        for folder in (self._run_dir / "restore", self._tools.settings.kept_dir):
            shutil.rmtree(folder, ignore_errors=True)

    def _is_final(self, committed: Committed) -> bool:
        manifest = committed.manifest
        # A stop that this node orders by itself has the generation of the order before it, which may be an early save:
        # then only the ranks' outcome says which of the two they stopped after.
        answers_stop = manifest.answers_generation in self._stops - self._early
        return manifest.final or answers_stop or self._answers_stop(manifest.save)

    def _answers_stop(self, save: str) -> bool:
        """Return whether the ranks are known to have stopped after this save."""
        return self._outcome is not None and self._outcome.save == save and self._outcome.outcome == "stopped"

    def _settle_outcome(self) -> None:
        """Over once the save that the outcome names is committed, or known not to be."""
        outcome = self._outcome
        assert outcome is not None
        if not self.saves.idle() or not self.saves.results.empty() or self._asked:
            return
        if outcome.save is None:
            self._over(Failed, failure="preemption", reason=NOTHING_TO_SAVE)
        elif outcome.save in self._saved:
            self._conclude(self._saved[outcome.save], existing=outcome.existing)
        else:
            self._asked = outcome.save
            self.saves.look_up(outcome.save)

    def _found(self, name: str, committed: Committed | None) -> None:
        if committed is None:
            reason = self.saves.failures.get(name, "it is not in the bucket")
            self._over(Failed, failure="save_failed", reason=f"{name}: {reason}")
        else:
            self._conclude(committed, existing=self._outcome is not None and self._outcome.existing)

    def _conclude(self, committed: Committed, *, existing: bool) -> None:
        outcome = self._outcome
        assert outcome is not None
        save = committed.manifest.save
        if outcome.outcome == "stopped" and (existing or save not in self._said_final):
            answers = outcome.answers_generation or committed.manifest.answers_generation
            self._say_saved(committed, final=True, existing=existing, answers_generation=answers)
        elif outcome.outcome == "finished" and self.node_rank == 0:
            self._say(Finished, step=outcome.step, loss=outcome.loss, save=save)
        self.state = State.OVER

    def _say_saved(
        self, committed: Committed, *, final: bool, existing: bool = False, answers_generation: int | None = None
    ) -> None:
        manifest = committed.manifest
        if final:
            self._said_final.add(manifest.save)
        elif self.node_rank >= self._tools.pace.heartbeat_nodes:
            return
        elif self.node_rank > 0 and manifest.answers_generation == 0:
            # Nothing waits for it, the next save outdoes it, and the head has it: one node is enough to tell, and this
            # one does when the attempt ends before either of them has told a later save.
            self._withheld = committed
            return
        self._withheld = None
        self._tell_saved(
            committed,
            final=final,
            existing=existing,
            answers_generation=manifest.answers_generation if answers_generation is None else answers_generation,
        )

    def _tell_withheld(self) -> None:
        committed, self._withheld = self._withheld, None
        if committed is not None:
            self._tell_saved(committed, final=False, existing=False, answers_generation=0)

    def _tell_saved(self, committed: Committed, *, final: bool, existing: bool, answers_generation: int) -> None:
        manifest = committed.manifest
        if self._progress is not None:
            self._next_progress_at = self._tools.clock() + self.spec.report_s
        self._say(
            CheckpointSaved,
            save=manifest.save,
            manifest_sha256=committed.sha256,
            step=manifest.step,
            final=final,
            answers_generation=answers_generation,
            existing=existing,
            size_bytes=sum(file.size_bytes for file in manifest.files),
            parent=manifest.parent,
            loss=self._progress.loss if self._progress else None,
            tokens_per_s=self._progress.tokens_per_s if self._progress else None,
            node_ms=self._progress.node_ms if self._progress else None,
            evaluation_loss=self._progress.evaluation_loss if self._progress else None,
            steady=self._steady.take(),
            answered_after_s=self.saves.answered_after_s.get(manifest.save),
        )

    def _over(self, kind: type[Report], **fields: object) -> None:
        self._end_ranks()
        self._tell_withheld()
        self._say(kind, **fields)
        self.state = State.OVER

    def _say(self, kind: type[Report], **fields: object) -> None:
        self._tools.say(kind, attempt=self.number, **fields)
