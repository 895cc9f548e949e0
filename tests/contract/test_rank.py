"""Claims about the ten lines by which any training loop keeps the contract."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from job_contract.checkpoint_layout import Manifest, SavePointer, seal
from job_contract.node_files import (
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
from job_contract.rank import Apart, Rank
from job_contract.reports import FellBack
from job_contract.spec import CheckpointSpec, DataSpec, JobSpec, ModelSpec, TrainingSpec
from job_contract.version import ContractError

STEPS = 10


def a_rank(folder: Path, *, interval_steps: int = 4, resume_from: SavePointer | None = None) -> Rank:
    model = ModelSpec(dim=64, layers=1, heads=1, kv_heads=1, ffn_dim=64)
    training = TrainingSpec(
        model=model,
        data=DataSpec(corpus="stdlib"),
        steps=STEPS,
        global_batch=1,
        sequence_length=8,
        learning_rate=0.1,
        warmup_steps=0,
        seed=1,
    )
    spec = JobSpec(
        job="job-1",
        team="research",
        spec_id="spec-1",
        prefix="teams/research/jobs/job-1",
        training=training,
        checkpoint=CheckpointSpec(interval_steps=interval_steps),
        ranks_per_node=1,
    )
    job = JobFile(
        job="job-1",
        attempt=2,
        spec=spec,
        node_rank=0,
        nodes=1,
        agent_pid=os.getpid(),
        corpus_dir="",
        roster_id="roster-1",
        resume_from=resume_from,
    )
    write_message(folder / "job.json", job)
    return Rank.join(run_dir=folder)


def order(rank: Rank, generation: int, kind: ControlKind) -> None:
    write_message(rank.run_dir / "control.json", Control(attempt=2, generation=generation, kind=kind))


def commit(rank: Rank) -> None:
    with rank.commit() as folder:
        (folder / "model.pt").write_text(str(rank.step))


def train(rank: Rank, *, until: int = STEPS, before: Callable[[int], None] = lambda step: None) -> list[int]:
    """Train on, and return the steps that were saved."""
    saved = []
    for step in range(rank.step + 1, until + 1):
        before(step)
        if rank.should_checkpoint(step, loss=1.0 / step):
            commit(rank)
            saved.append(step)
        if rank.should_stop:
            break
    return saved


def share(rank: Rank, save: str) -> RankSave:
    found = read_message(rank.run_dir / "saves" / save / "rank-0.json", RankSave)
    assert found is not None
    return found


def outcome(rank: Rank) -> Outcome:
    found = read_message(rank.run_dir / "outcome" / "rank-0.json", Outcome)
    assert found is not None
    return found


def test_the_interval_and_the_last_step_are_saved_and_the_end_is_told(tmp_path: Path) -> None:
    rank = a_rank(tmp_path)
    assert train(rank) == [4, 8, 10]
    rank.finish()
    last = share(rank, "step-00000010.a0002.s03")
    assert (last.final, last.files, share(rank, "step-00000004.a0002.s01").final) == (True, ("model.pt",), False)
    assert (outcome(rank).outcome, outcome(rank).save) == ("finished", last.save)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == STEPS


def test_an_order_to_stop_is_answered_by_a_save_of_that_step(tmp_path: Path) -> None:
    rank = a_rank(tmp_path, interval_steps=1000)
    stop = ControlKind.CHECKPOINT_STOP
    assert train(rank, before=lambda step: order(rank, 7, stop) if step == 3 else None) == [3]
    rank.finish()
    assert share(rank, "step-00000003.a0002.s01").answers_generation == 7
    assert (outcome(rank).outcome, outcome(rank).answers_generation, outcome(rank).existing) == ("stopped", 7, False)


def test_an_order_to_save_is_answered_once_and_training_goes_on(tmp_path: Path) -> None:
    rank = a_rank(tmp_path, interval_steps=1000)
    assert train(rank, before=lambda step: order(rank, 7, ControlKind.CHECKPOINT) if step == 3 else None) == [3, 10]
    assert share(rank, "step-00000010.a0002.s02").answers_generation == 0
    progress = read_message(tmp_path / "progress.json", RankProgress)
    assert progress is not None and progress.answered_generation == 7


def test_an_order_to_stop_without_a_save_makes_none(tmp_path: Path) -> None:
    rank = a_rank(tmp_path, interval_steps=3)
    assert train(rank, before=lambda step: order(rank, 7, ControlKind.STOP) if step == 3 else None) == []
    rank.finish()
    assert (outcome(rank).outcome, outcome(rank).save) == ("aborted", None)


def test_an_order_of_another_attempt_is_not_followed(tmp_path: Path) -> None:
    rank = a_rank(tmp_path, interval_steps=1000)
    write_message(tmp_path / "control.json", Control(attempt=1, generation=9, kind=ControlKind.CHECKPOINT_STOP))
    assert train(rank, until=5) == [] and not rank.should_stop


def test_a_loop_that_ends_too_early_is_told_so_instead_of_finished(tmp_path: Path) -> None:
    rank = a_rank(tmp_path)
    train(rank, until=5)
    with pytest.raises(ContractError, match="the loop ended at step 5 of 10"):
        rank.finish()


def test_a_state_that_is_not_finite_is_never_saved_and_three_in_a_row_diverge(tmp_path: Path) -> None:
    rank = a_rank(tmp_path, interval_steps=1)
    order(rank, 7, ControlKind.CHECKPOINT)
    assert not rank.should_checkpoint(1, loss=float("nan"))
    assert rank.should_checkpoint(2, loss=1.0)
    assert not any(rank.should_checkpoint(step, loss=float("inf")) for step in (3, 4))
    with pytest.raises(SystemExit) as ended:
        rank.should_checkpoint(5, loss=float("nan"))
    assert ended.value.code == 71


def test_what_another_rank_knows_counts_here_too(tmp_path: Path) -> None:
    rank = a_rank(tmp_path, interval_steps=1000)
    other = 7 * 4 + 2  # a checkpoint_stop of generation 7, as one number

    def agree(numbers: Sequence[int]) -> Sequence[int]:
        return [max(pair) for pair in zip(numbers, [other, 0, 0, 1, -1], strict=False)]

    rank.agree = agree
    assert rank.should_checkpoint(1, loss=1.0) and rank.should_stop


def test_ranks_that_stand_at_different_steps_do_not_train_on(tmp_path: Path) -> None:
    rank = a_rank(tmp_path)
    rank.agree = lambda numbers: [max(pair) for pair in zip(numbers, [0, 0, 0, 5, -5], strict=True)]
    with pytest.raises(Apart, match="rank 0 stands at step 1, the ranks at 1 to 5"):
        rank.should_checkpoint(1, loss=1.0)


def test_several_ranks_without_an_agreement_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ContractError, match="several ranks have to agree"):
        a_rank(tmp_path).should_checkpoint(1, loss=1.0)


def test_a_folder_in_a_save_is_refused_by_name(tmp_path: Path) -> None:
    rank = a_rank(tmp_path)
    rank.should_checkpoint(1, loss=1.0)
    with pytest.raises(ContractError, match="shards is no plain file"), rank.commit() as folder:
        (folder / "shards").mkdir()


def test_a_save_that_fails_half_way_is_never_said_to_be_complete(tmp_path: Path) -> None:
    rank = a_rank(tmp_path)
    rank.should_checkpoint(1, loss=1.0)
    with pytest.raises(OSError, match="full"), rank.commit() as folder:
        (folder / "model.pt").write_text("half")
        raise OSError("the disk is full")
    assert not list(tmp_path.glob("saves/*/rank-*.json"))


class Agent:
    """Answers what a rank needs, as the agent of its node would, from saves of which some are damaged."""

    def __init__(self, run_dir: Path, damaged: set[str]) -> None:
        self.run_dir, self.damaged = run_dir, damaged
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self.bodies: dict[str, bytes] = {}

    def __enter__(self) -> Agent:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def save(self, step: int, parent: SavePointer | None) -> SavePointer:
        name = f"step-{step:08d}.a0001.s01"
        manifest = Manifest(
            job="job-1",
            attempt=1,
            step=step,
            save=name,
            world_size=1,
            mesh=(1,),
            config_hash="",
            corpus_digest="",
            versions={},
            facts={},
            files=(),
            parent=parent,
        )
        self.bodies[name], digest = seal(manifest)
        return SavePointer(save=name, manifest_sha256=digest)

    def _serve(self) -> None:
        answered = 0
        while not self._over.wait(0.005):
            needs = read_message(self.run_dir / "needs" / "rank-0.json", Needs)
            if needs is None or needs.number <= answered:
                continue
            name, answered = needs.save.save, needs.number
            folder = self.run_dir / "fetched" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "manifest.json").write_bytes(self.bodies[name])
            bad = (FellBack(save=name, file="model.pt", reason="sha256"),) if name in self.damaged else ()
            write_message(
                self.run_dir / "provided" / "rank-0.json",
                Provided(number=needs.number, folder=str(folder), damaged=bad),
            )


def test_a_damaged_save_is_passed_over_for_its_parent_and_named_at_the_end(tmp_path: Path) -> None:
    with Agent(tmp_path, {"step-00000008.a0001.s01"}) as agent:
        parent = agent.save(4, None)
        rank = a_rank(tmp_path, interval_steps=1000, resume_from=agent.save(8, parent))
        folder = rank.restore()
    assert folder is not None and folder.name == parent.save and rank.step == 4
    assert train(rank) == [10]
    rank.finish()
    assert [one.save for one in outcome(rank).fell_back] == ["step-00000008.a0001.s01"]


def test_with_no_whole_save_left_the_rank_ends_as_bad_checkpoint(tmp_path: Path) -> None:
    with Agent(tmp_path, {"step-00000008.a0001.s01"}) as agent, pytest.raises(SystemExit) as ended:
        a_rank(tmp_path, resume_from=agent.save(8, None)).restore()
    assert ended.value.code == 70


def test_without_a_job_the_user_is_told_how_ranks_are_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        Rank.join(run_dir=tmp_path)
    assert ended.value.code == 74 and "an agent starts ranks" in capsys.readouterr().err
