"""A rank without torch that keeps the node files' contract: `scripted_rank.py <behaviour> <run_dir>`.

Behaviours: train, pulse:<bound> (train, and say each step that the next comes within so many seconds), exit:<code>,
signal:<number>, mute (exit 0 without outcome), abort (train, abort after the outcome), linger (train, never exit),
litter (train, with a detached child), existing:<save> (stopped at once, that save holds the step), waits:<bound> (say
that the weights must come within so many seconds, and nothing more).
A file in the run directory makes a training rank act: `save` (periodic save), `finish`. Data is a function of the rank.
"""

import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from job_contract.checkpoint_layout import save_name
from job_contract.node_files import (
    Control,
    ControlKind,
    JobFile,
    Needs,
    Outcome,
    Provided,
    RankProgress,
    RankPulse,
    RankSave,
    read_message,
    write_message,
)


class Rank:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.job = read_message(run_dir / "job.json", JobFile)
        self.step, self.number, self.answered, self.newest = 0, 0, 0, None
        self.restored, self.fell_back = None, ()
        self.obeyed = (0, "")  # a stop after a checkpoint of the same generation is an order of its own

    def restore(self) -> None:
        save = self.job.resume_from
        while save:
            provided = self.ask(save, (".metadata", f"__{self.rank}_0.distcp"))
            if not provided.damaged:
                self.restored, self.step = save, save.step
                return
            self.fell_back += provided.damaged
            save = self.job.resume_parent if save == self.job.resume_from else None

    def ask(self, save, files) -> Provided:
        self.number += 1
        write_message(
            self.run_dir / "needs" / f"rank-{self.rank}.json", Needs(number=self.number, save=save, files=files)
        )
        while True:
            answer = read_message(self.run_dir / "provided" / f"rank-{self.rank}.json", Provided)
            if answer and answer.number == self.number:
                return answer
            time.sleep(0.01)

    def train(self, bound_s: float = 0.0) -> None:
        self.restore()
        saves = 0
        while True:
            self.step += 1
            if self.rank == 0:
                self.progress()
            if bound_s:
                pulse = RankPulse(rank=self.rank, phase="running", step=self.step, bound_s=bound_s)
                write_message(self.run_dir / "pulse" / f"rank-{self.rank}.json", pulse)
            control = read_message(self.run_dir / "control.json", Control)
            if control.kind is ControlKind.STOP:
                return self.end("aborted", None)
            if control.kind is not ControlKind.NONE and (control.generation, control.kind) > self.obeyed:
                self.obeyed = control.generation, control.kind
                self.answered, saves = control.generation, saves + 1
                name = self.save(saves, control.generation)
                if control.kind is ControlKind.CHECKPOINT_STOP:
                    return self.end("stopped", name)
            elif (self.run_dir / "save").exists() and saves == 0:
                saves += 1
                self.save(saves, 0)
            if (self.run_dir / "finish").exists():
                return self.end("finished", self.save(saves + 1, 0, final=True))
            time.sleep(0.02)

    def progress(self) -> None:
        progress = RankProgress(
            step=self.step,
            loss=2.0,
            tokens_per_s=100.0,
            state="running",
            world_size=self.world_size,
            started=True,
            restored=self.restored and self.restored.save,
            fell_back=self.fell_back,
            step_ms=20.0,
            data_wait_ms=1.0,
            comm_ms=2.0,
            node_ms=(18.0,),
        )
        write_message(self.run_dir / "progress.json", progress)

    def save(self, number: int, generation: int, *, final: bool = False) -> str:
        # All ranks have to name one step, and scripted ranks do not talk to each other.
        step = 10 * number + (self.restored.step if self.restored else 0)
        name = save_name(step, self.job.attempt, number)
        folder = self.run_dir / "saves" / name
        folder.mkdir(parents=True, exist_ok=True)
        files = [f"__{self.rank}_0.distcp"] + [".metadata"] * (self.rank == 0)
        for file in files:
            (folder / f"{file}.part").write_bytes(f"{name} {file} ".encode() * 100)
            (folder / f"{file}.part").rename(folder / file)
        share = RankSave(
            rank=self.rank,
            save=name,
            step=step,
            world_size=self.world_size,
            mesh=(self.world_size,),
            config_hash="c",
            corpus_digest="d",
            versions={"torch": "none"},
            facts={"step": step, "learning_rate": 0.1},
            files=tuple(files),
            final=final,
            answers_generation=generation,
            restored=self.restored,
        )
        write_message(folder / f"rank-{self.rank}.json", share)
        return name

    def end(self, outcome: str, save: str | None) -> None:
        message = Outcome(outcome=outcome, step=self.step, loss=2.0, answers_generation=self.answered, save=save)
        write_message(self.run_dir / "outcome" / f"rank-{self.rank}.json", message)


def main(behaviour: str, run_dir: Path) -> int:
    kind, _, value = behaviour.partition(":")
    print("started", behaviour, flush=True)
    if kind == "exit":
        print("about to fail", flush=True)
        return int(value)
    if kind == "signal":
        os.kill(os.getpid(), int(value))
    if kind == "waits":
        pulse = RankPulse(rank=0, phase="loading_weights", step=0, bound_s=float(value), waits_for="the weights")
        write_message(run_dir / "pulse" / "rank-0.json", pulse)
        time.sleep(600)
    if kind == "needs-data":
        while not (run_dir / "damaged-data.json").exists():
            time.sleep(0.01)
        return 74
    if kind == "mute":
        return 0
    if kind == "existing":
        rank = Rank(run_dir)
        message = Outcome(outcome="stopped", step=0, loss=2.0, answers_generation=4, save=value, existing=True)
        write_message(run_dir / "outcome" / f"rank-{rank.rank}.json", message)
        return 0
    if kind == "litter":
        subprocess.Popen(["sleep", "300"], start_new_session=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    Rank(run_dir).train(float(value) if kind == "pulse" else 0.0)
    if kind == "abort":
        os.abort()
    while kind == "linger":
        time.sleep(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
