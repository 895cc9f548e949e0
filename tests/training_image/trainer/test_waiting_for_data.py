"""Claims about ranks whose data are late or damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agent.journal import Journal
from agent.shards import DATA, EVALUATION, InFolder, Shards
from job_contract.dataset import DatasetIndex, TokenizerFacts
from job_contract.dataset_writer import DatasetWriter
from job_contract.node_files import ControlKind, RankProgress, RankPulse, read_message
from job_contract.spec import DataSpec, EvaluationSpec, JobSpec
from tests.training_image.trainer.folder_agent import Attempt, started, tiny_spec

pytestmark = pytest.mark.ranks
SIZES = {"steps": 6, "model": {"dropout": 0.1}, "micro_batch": 3}
NOTHING = RankProgress(step=0, loss=0.0, tokens_per_s=0.0, state="", world_size=0)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DatasetIndex]:
    """Twelve shards; the first half of each document is no target."""
    folder = tmp_path_factory.mktemp("masked") / "v1"
    facts = TokenizerFacts(kind="bytes")
    with DatasetWriter(folder, vocab=256, tokenizer=facts, source="", licence="", shard_tokens=640) as writer:
        for place in range(60):
            writer.add(bytes((place + at) % 7 for at in range(128)), bytes(64) + b"\1" * 64)
        return folder, writer.close()


def spec_of(index: DatasetIndex, **fields: object) -> JobSpec:
    spec = tiny_spec(**fields)
    return replace(spec, training=replace(spec.training, data=DataSpec(uri="file:///d", index_sha256=index.sha256)))


@contextmanager
def brought(folder: Path, attempt: Attempt, index: DatasetIndex, name: str = DATA) -> Iterator[None]:
    """The agents' own code brings the data of all ranks meanwhile, those of the training or of the evaluation."""
    data, sides = DataSpec(uri=f"file://{folder}", index_sha256=index.sha256), []
    for rank in attempt.ranks:
        run_dir, root = attempt.run_dir(rank), attempt.root / f"agent-{rank}"
        journal = Journal(root / "events.jsonl")
        sides.append(
            Shards(
                data,
                [rank],
                run_dir=run_dir,
                root=root,
                place=InFolder(folder),
                downloads=2,
                journal=journal,
                name=name,
            )
        )
        sides[-1].loop.start()
    yield
    for side in sides:
        side.loop.close(wait_s=5)


@contextmanager
def ranks(root: Path, index: DatasetIndex, world_size: int, **fields: object) -> Iterator[Attempt]:
    with started(root, Path("data"), spec_of(index, **fields), world_size) as attempt:
        yield attempt


def lack_of(attempt: Attempt, rank: int) -> tuple[str | None, float] | None:
    """What a rank says that it waits for, and within how many seconds it must come."""
    pulse = read_message(attempt.run_dir(rank) / f"pulse/rank-{rank}.json", RankPulse)
    return pulse and (pulse.waits_for, pulse.bound_s)


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory, masked: tuple[Path, DatasetIndex]) -> Attempt:
    """Two ranks that were ordered to save while they waited for data, and have ended."""
    folder, index = masked
    with ranks(tmp_path_factory.mktemp("waited"), index, 2, **SIZES) as attempt:
        attempt.until(lambda: (attempt.progress() or NOTHING).state == "waiting_for_data")
        attempt.until(lambda: [lack_of(attempt, rank) for rank in attempt.ranks] == [("data/index.json", 600.0)] * 2)
        attempt.order(ControlKind.CHECKPOINT)
        attempt.until(lambda: (attempt.progress() or NOTHING).answered_generation == 1)
        assert attempt.losses() == {}
        with brought(folder, attempt, index):
            assert attempt.finish() == [0, 0]
    return attempt


def test_ranks_that_wait_for_data_say_so_hear_orders_and_go_on_when_they_come(waited: Attempt) -> None:
    assert sorted(waited.losses()) == [1, 2, 3, 4, 5, 6]
    assert waited.losses()[6] < waited.losses()[1]
    assert waited.metrics()[0]["data_wait_ms"] > waited.metrics()[-1]["data_wait_ms"] > 0
    progress = waited.progress()
    assert progress is not None and progress.data_wait_ms is not None
    assert progress.data_wait_ms > waited.metrics()[0]["data_wait_ms"] / 10


def test_a_damaged_shard_ends_the_ranks_as_the_users_fault_and_is_named(
    tmp_path: Path, masked: tuple[Path, DatasetIndex]
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(masked[0], folder)
    for path in folder.glob("shard-*.bin"):
        path.write_bytes(bytes(640))
    with ranks(tmp_path, masked[1], 1, steps=6) as attempt:
        with brought(folder, attempt, masked[1]):
            assert attempt.finish() == [74]
        assert "shard-" in attempt.log(0)
        assert "the index says" in attempt.log(0)


def test_an_evaluation_that_an_order_interrupts_is_taken_anew_and_changes_nothing_of_the_training(
    tmp_path: Path, masked: tuple[Path, DatasetIndex], waited: Attempt
) -> None:
    folder, index = masked
    evaluation = EvaluationSpec(data=DataSpec(uri="file:///e", index_sha256=index.sha256), every_steps=3, batches=2)
    with ranks(tmp_path, index, 2, **SIZES, evaluation=evaluation) as attempt, brought(folder, attempt, index):
        attempt.until(lambda: (attempt.progress() or NOTHING).state == "evaluating")
        attempt.order(ControlKind.CHECKPOINT)
        attempt.until(lambda: (attempt.progress() or NOTHING).answered_generation == 1)
        assert max(attempt.losses()) == 3
        with brought(folder, attempt, index, EVALUATION):
            assert attempt.finish() == [0, 0]
    evaluated = [json.loads(line) for line in (attempt.run_dir(0) / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in evaluated] == [3, 6]
    assert evaluated[1]["loss"] < evaluated[0]["loss"]
    progress = attempt.progress()
    assert progress is not None
    assert progress.evaluation_loss == evaluated[1]["loss"]
    assert attempt.losses() == waited.losses()
