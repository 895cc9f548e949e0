"""The contract for any training loop, in ten lines:

    rank = Rank.join(agree)                             # agree: see Agree; leave it out with one rank
    if folder := rank.restore():                        # verified files of the save to go on from
        load(folder)
    for step in range(rank.step + 1, steps + 1):
        loss = train_one(step)
        if rank.should_checkpoint(step, loss=loss):     # the interval is over, an order came, or it is the last step
            with rank.commit() as folder:
                save(folder)                            # each file name once among all ranks
        if rank.should_stop:
            break
    rank.finish()

Every rank makes the same calls at the same steps. The agent does the rest: it uploads, commits, and reports.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path

from job_contract.checkpoint_layout import MANIFEST_FILE, SavePointer, open_manifest, save_name
from job_contract.node_files import (
    EXIT_CODES,
    Control,
    ControlKind,
    JobFile,
    Needs,
    Outcome,
    Provided,
    RankProgress,
    RankSave,
    read_message,
    write_message,
)
from job_contract.reports import FellBack
from job_contract.version import ContractError, canonical_json, encode

Agree = Callable[[Sequence[int]], Sequence[int]]
"""Returns the largest of all ranks' numbers at each place: an all-reduce with MAX over int64 on the CPU."""

MOST_NON_FINITE_STEPS = 3
KINDS = (ControlKind.NONE, ControlKind.CHECKPOINT, ControlKind.CHECKPOINT_STOP, ControlKind.STOP)
POLL_S = 0.05


class Apart(Exception):
    """The ranks do not stand at the same step."""


class Rank:
    """One rank of the attempt that `<run_dir>/job.json` describes. `step` counts finished optimizer steps."""

    def __init__(self, run_dir: Path, job: JobFile, agree: Agree | None = None) -> None:
        self.run_dir, self.job = run_dir, job
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.agree = agree or _alone
        self.step, self.loss = 0, 0.0
        self.should_stop = False
        self.restored: SavePointer | None = None
        self._fell_back: tuple[FellBack, ...] = ()
        self._requests, self._saves, self._new_steps = 0, 0, 0
        self._order = self._answered = self._answering = 0
        self._not_finite = 0
        self._saved: str | None = None
        self._saved_at = self._stepped_at = time.monotonic()

    @classmethod
    def join(cls, agree: Agree | None = None, run_dir: Path | None = None) -> Rank:
        """Return this process's rank; the agent gives the run directory as the last argument of the command.

        Raises SystemExit with the code for `user_error` where there is no job.
        """
        folder = run_dir or Path(sys.argv[-1])
        job = read_message(folder / "job.json", JobFile)
        if job is None:
            print(f"{folder} holds no job.json: an agent starts ranks as `<command> <run directory>`", file=sys.stderr)
            raise SystemExit(_code("user_error"))
        return cls(folder, job, agree)

    @property
    def steps(self) -> int:
        """Optimizer steps that the request asks for."""
        return self.job.spec.training.steps

    def restore(self) -> Path | None:
        """Return a folder with every file of the newest whole save, proved by digest; None for a new start.

        `step` is the step of that save. Damaged saves are passed over for their parents, on all ranks alike, because
        all ask for the same files. Raises SystemExit with the code for `bad_checkpoint` when none is whole.
        """
        candidate, passed_over = self.job.resume_from, list[FellBack]()
        while candidate is not None:
            self._show("restoring")
            folder, parent, damaged = self._fetch(candidate)
            if folder is not None:
                self.restored, self.step, self._fell_back = candidate, candidate.step, tuple(passed_over)
                return folder
            passed_over += damaged
            candidate = parent or (self.job.resume_parent if candidate == self.job.resume_from else None)
        if passed_over:
            reasons = "; ".join(f"{one.save}/{one.file}: {one.reason}" for one in passed_over)
            print(f"bad_checkpoint: nothing is left to resume from: {reasons}", file=sys.stderr)
            raise SystemExit(_code("bad_checkpoint"))
        return None

    def should_checkpoint(self, step: int, *, loss: float = 0.0, tokens: int = 0) -> bool:
        """Return the ranks' common answer after optimizer step `step`, whose loss and number of tokens are told on.

        Where it is True, `commit` must follow before the next step. A state whose loss is not finite on some rank is
        never saved. Raises Apart, and SystemExit with the code for `diverged` after three such steps in a row.
        """
        seconds, self._stepped_at = time.monotonic() - self._stepped_at, time.monotonic()
        self.step, self._new_steps = step, self._new_steps + 1
        self.loss = loss if isfinite(loss) else self.loss
        due = step >= self.steps or self._interval_is_over()
        order, asked, bad, highest, lowest = self.agree(
            [self._control(), int(due), int(not isfinite(loss)), step, -step]
        )
        if highest != -lowest:
            raise Apart(f"rank {self.rank} stands at step {step}, the ranks at {-lowest} to {highest}")
        self._metric(loss, seconds, tokens)
        self._not_finite = self._not_finite + 1 if bad else 0
        if self._not_finite >= MOST_NON_FINITE_STEPS:
            print(f"diverged: {self._not_finite} steps in a row were not finite, the last is {step}", file=sys.stderr)
            raise SystemExit(_code("diverged"))
        kind = KINDS[order % len(KINDS)] if order > self._order else ControlKind.NONE
        self._order = max(order, self._order)
        self._answering = self._order // len(KINDS) if kind is not ControlKind.NONE else 0
        self.should_stop = kind in (ControlKind.CHECKPOINT_STOP, ControlKind.STOP)
        wanted = (asked or self._answering) and kind is not ControlKind.STOP and not bad
        self._show("saving" if wanted else "running", tokens_per_s=tokens / seconds if seconds else 0.0)
        return bool(wanted)

    @contextmanager
    def commit(self) -> Iterator[Path]:
        """What this rank leaves in the folder is its share of a save of `step`.

        The save counts once the agents of all nodes have uploaded their shares and committed the manifest; nothing has
        to wait for it. Raises ContractError for folders and for a name that another rank of this node used.
        """
        self._saves += 1
        name = save_name(self.step, self.job.attempt, self._saves)
        draft = self.run_dir / "drafts" / f"rank-{self.rank}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        files = self._move(draft, self.run_dir / "saves" / name)
        share = RankSave(
            rank=self.rank,
            save=name,
            step=self.step,
            world_size=self.world_size,
            mesh=(self.world_size,),
            config_hash=hashlib.sha256(canonical_json(encode(self.job.spec.training))).hexdigest(),
            corpus_digest="",
            versions={"python": platform.python_version()},
            facts={"step": self.step, "last_loss": self.loss, "finite": True},
            files=files,
            final=self.step >= self.steps,
            answers_generation=self._answering,
            restored=self.restored,
        )
        # No rank says that the save is complete before every rank has written its share.
        self.agree([0])
        write_message(self.run_dir / "saves" / name / f"rank-{self.rank}.json", share)
        self._saved, self._saved_at, self._answered = name, time.monotonic(), self._order
        self._show("running")

    def finish(self) -> None:
        """The agent knows how the training ended: finished, stopped after a save, or aborted. Call it once, at the end.

        Raises ContractError when the training has neither ended nor been told to stop.
        """
        if self.step < self.steps and not self.should_stop:
            raise ContractError(f"the loop ended at step {self.step} of {self.steps}, and no order to stop had come")
        newest = self._saved or (self.restored.save if self.restored else None)
        aborted = KINDS[self._order % len(KINDS)] is ControlKind.STOP and self.step < self.steps
        outcome = "aborted" if aborted else "finished" if self.step >= self.steps else "stopped"
        self._show("finished" if outcome == "finished" else "running")
        write_message(
            self.run_dir / "outcome" / f"rank-{self.rank}.json",
            Outcome(
                outcome=outcome,
                step=self.step,
                loss=self.loss,
                answers_generation=self._order // len(KINDS),
                save=None if aborted else newest,
                existing=self._saved is None,
                fell_back=self._fell_back,
            ),
        )

    def _fetch(self, save: SavePointer) -> tuple[Path | None, SavePointer | None, list[FellBack]]:
        """Return the folder when all of the save is there, else its parent, as far as that is known, and the damage."""
        provided = self._ask(save, ())
        folder = Path(provided.folder)
        try:
            manifest = open_manifest((folder / MANIFEST_FILE).read_bytes(), job=self.job.job, pointer=save)
        except (ContractError, OSError) as error:
            found = FellBack(save=save.save, file=MANIFEST_FILE, reason=str(error))
            return None, None, list(provided.damaged) or [found]
        provided = self._ask(save, tuple(file.path for file in manifest.files))
        return (None if provided.damaged else folder), manifest.parent, list(provided.damaged)

    def _ask(self, save: SavePointer, files: tuple[str, ...]) -> Provided:
        self._requests += 1
        write_message(
            self.run_dir / "needs" / f"rank-{self.rank}.json", Needs(number=self._requests, save=save, files=files)
        )
        while True:
            answer = read_message(self.run_dir / "provided" / f"rank-{self.rank}.json", Provided)
            if answer is not None and answer.number == self._requests:
                return answer
            time.sleep(POLL_S)

    def _control(self) -> int:
        """Return the newest order for this attempt as one number: of two, the larger is the one to follow."""
        control = read_message(self.run_dir / "control.json", Control)
        if control is None or control.attempt != self.job.attempt:
            return 0
        return control.generation * len(KINDS) + KINDS.index(control.kind)

    def _interval_is_over(self) -> bool:
        """Return whether a save is due; of an interval in seconds rank 0's clock decides for all."""
        interval = self.job.spec.checkpoint
        if interval.interval_steps:
            return self.step % interval.interval_steps == 0
        waited_s = time.monotonic() - self._saved_at
        return self.rank == 0 and interval.interval_s is not None and waited_s >= interval.interval_s

    def _move(self, draft: Path, folder: Path) -> tuple[str, ...]:
        folder.mkdir(parents=True, exist_ok=True)
        paths = sorted(draft.iterdir())
        for path in paths:
            if not path.is_file():
                raise ContractError(f"{path.name} is no plain file; a save is a flat set of files")
            if (folder / path.name).exists():
                raise ContractError(f"{path.name} is written by two ranks; put the rank into the name")
        for path in paths:
            path.replace(folder / path.name)
        return tuple(path.name for path in paths)

    def _metric(self, loss: float, seconds: float, tokens: int) -> None:
        if self.rank == 0:
            line = {"step": self.step, "attempt": self.job.attempt, "loss": loss, "tokens": tokens}
            with (self.run_dir / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps({**line, "seconds": seconds, "at": time.time()}) + "\n")

    def _show(self, state: str, tokens_per_s: float = 0.0) -> None:
        if self.rank == 0:
            progress = RankProgress(
                step=self.step,
                loss=self.loss,
                tokens_per_s=tokens_per_s,
                state=state,
                world_size=self.world_size,
                started=self._new_steps > 0,
                restored=self.restored.save if self.restored else None,
                fell_back=self._fell_back,
                answered_generation=self._answered // len(KINDS) or None,
                newest_save=self._saved or (self.restored.save if self.restored else None),
            )
            write_message(self.run_dir / "progress.json", progress)


def _alone(numbers: Sequence[int]) -> Sequence[int]:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ContractError("several ranks have to agree on when to save: give Rank.join an `agree`")
    return numbers


def _code(failure: str) -> int:
    return next(code for code, name in EXIT_CODES.items() if name == failure)
