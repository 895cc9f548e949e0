"""Claims about resumes, judged on every loss and on the sha256 over all parameters and moments."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from job_contract.checkpoint_layout import Part, part_file, read_manifest, seal
from job_contract.spec import JobSpec
from tests.training_image.trainer.folder_agent import FolderBucket, started, tiny_spec
from tests.training_image.trainer.states import state_sha256, whole_tensors
from tests.training_image.trainer.watched_trainer import COMMAND, watched
from trainer import rehearse

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

STEPS, SAVED_AT, WARM_UP = 6, 2, 3


@dataclass
class Whole:
    """An uninterrupted training and the saves that it left on its way."""

    spec: JobSpec
    bucket: FolderBucket
    losses: dict[int, float]
    watched: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def sha256(self) -> str:
        return state_sha256(self.bucket.folder(self.bucket.pointer(STEPS).save))


def train(root: Path, corpus_dir: Path, spec: JobSpec, world_size: int) -> Whole:
    bucket = FolderBucket(root / "bucket")
    with started(root, corpus_dir, spec, world_size, bucket=bucket, command=COMMAND) as ranks:
        assert set(ranks.finish()) == {0}, ranks.log(0)
        return Whole(spec, bucket, ranks.losses(), [watched(ranks.run_dir(rank)) for rank in ranks.ranks])


@pytest.fixture(scope="module")
def on_two(tmp_path_factory, corpus_dir) -> Iterator[Whole]:
    yield train(
        tmp_path_factory.mktemp("two"),
        corpus_dir,
        tiny_spec(steps=STEPS, interval_steps=SAVED_AT, micro_batch=4, warmup_steps=WARM_UP),
        2,
    )


def resumed(
    root: Path, corpus_dir: Path, whole: Whole, world_size: int, command: tuple[str, ...] = ("-m", "trainer")
) -> tuple[dict[int, float], str]:
    """Return the losses and the last state of an attempt that starts from the first save of `whole`."""
    bucket = copied(whole.bucket, root / "resumed")
    pointer = bucket.pointer(SAVED_AT)
    with started(
        root, corpus_dir, whole.spec, world_size, bucket=bucket, attempt=2, resume_from=pointer, command=command
    ) as ranks:
        assert set(ranks.finish()) == {0}, ranks.log(0)
        return ranks.losses(), state_sha256(bucket.folder(bucket.committed[-1].save))


def after(losses: dict[int, float], step: int) -> dict[int, float]:
    return {at: loss for at, loss in losses.items() if at > step}


def test_o23_a_killed_training_has_the_rates_moments_and_counters_of_one_that_was_not(tmp_path, corpus_dir, on_two):
    """FSDP on two ranks, resumed from a save inside the warm-up, killed after it, resumed again: equal to the bit."""
    bucket = copied(on_two.bucket, tmp_path / "resumed")
    bucket.committed = [bucket.pointer(SAVED_AT)]
    with started(
        tmp_path, corpus_dir, on_two.spec, 2,
        bucket=bucket, attempt=2, resume_from=bucket.committed[0], command=(*COMMAND, f"halt={2 * SAVED_AT}"),
    ) as ranks:  # fmt: skip
        ranks.until(lambda: len(bucket.committed) > 1)
        for process in ranks.processes:
            process.kill()
        first, losses = watched(ranks.run_dir(0)), ranks.losses()
    killed_at = bucket.committed[-1]
    assert (killed_at.step, ranks.outcomes()) == (2 * SAVED_AT, [])
    with started(
        tmp_path, corpus_dir, on_two.spec, 2, bucket=bucket, attempt=3, resume_from=killed_at, command=COMMAND
    ) as ranks:
        assert ranks.finish() == [0, 0], ranks.log(0)
        second, losses = watched(ranks.run_dir(0)), losses | ranks.losses()
    whole = on_two.watched[0]
    assert whole[:SAVED_AT] + first + second == whole
    assert losses == after(on_two.losses, SAVED_AT)
    assert state_sha256(bucket.folder(bucket.committed[-1].save)) == on_two.sha256
    assert [line["counters"] for line in whole] == [[step] for step in range(1, STEPS + 1)]
    assert {tuple(line["decays"]) for line in whole} == {(0.1, 0.0)}, "two groups, two decays"
    rates = [line["rates"][0] for line in whole]
    assert rates[:WARM_UP] == pytest.approx([1e-3, 2e-3, 3e-3], rel=1e-12)
    assert all(line["rates"][0] == line["rates"][1] for line in whole)
    assert rates[WARM_UP:] == sorted(set(rates[WARM_UP:]), reverse=True), "then the cosine falls"


def test_a_resume_with_one_other_sample_is_found_to_differ(tmp_path, corpus_dir, on_two):
    command = ("-m", "bench.altered_trainer", "sample_swapped")
    losses, sha256 = resumed(tmp_path, corpus_dir, on_two, 2, command)
    assert sha256 != on_two.sha256
    assert losses != after(on_two.losses, SAVED_AT)


@pytest.mark.parametrize("world_size", [1, 4])
def test_o22_a_save_of_two_ranks_resumes_on_fewer_and_on_more_without_a_gap_or_a_repeat(
    tmp_path, corpus_dir, on_two, world_size: int
):
    bucket = copied(on_two.bucket, tmp_path / "resumed")
    bucket.committed = [bucket.pointer(SAVED_AT)]
    with started(
        tmp_path, corpus_dir, on_two.spec, world_size,
        bucket=bucket, attempt=2, resume_from=bucket.committed[0], command=COMMAND,
    ) as ranks:  # fmt: skip
        assert set(ranks.finish()) == {0}, ranks.log(0)
        losses, lines = ranks.losses(), [watched(ranks.run_dir(rank)) for rank in ranks.ranks]
    assert losses == pytest.approx(after(on_two.losses, SAVED_AT), rel=1e-6)

    batch = on_two.spec.training.global_batch
    before = [line["places"] for rank in on_two.watched for line in rank[:SAVED_AT]]
    afterwards = [line["places"] for rank in lines for line in rank]
    assert sorted(itertools.chain(*before, *afterwards)) == list(range(STEPS * batch))
    for rank in lines:
        assert [line["rates"] for line in rank] == [line["rates"] for line in on_two.watched[0][SAVED_AT:]]
        assert [line["counters"] for line in rank] == [[step] for step in range(SAVED_AT + 1, STEPS + 1)]

    whole = whole_tensors(on_two.bucket.folder(on_two.bucket.pointer(STEPS).save))
    for name, tensor in whole_tensors(bucket.folder(bucket.committed[-1].save)).items():
        assert torch.allclose(tensor, whole[name], rtol=1e-4, atol=1e-6), name


def test_ddp_on_three_ranks_with_an_uneven_batch_resumes_bit_identical(tmp_path, corpus_dir):
    # DDP's first bucket is 1 MiB, and only several buckets can change their order: 4 MB of gradients.
    spec = tiny_spec(
        parallel="ddp",
        steps=STEPS,
        interval_steps=SAVED_AT,
        sequence_length=16,
        model={"dim": 128, "layers": 4, "ffn_dim": 512},
    )
    whole = train(tmp_path, corpus_dir, spec, 3)
    losses, sha256 = resumed(tmp_path, corpus_dir, whole, 3)
    assert (losses, sha256) == (after(whole.losses, SAVED_AT), whole.sha256)


def test_damaged_saves_are_passed_over_one_after_the_other_and_named(tmp_path, corpus_dir, on_two):
    """The newest save has a damaged manifest, its parent a flipped byte in a data file; the one before is good."""
    bucket = copied(on_two.bucket, tmp_path / "bucket")
    first, second, third = (bucket.pointer(step) for step in (2, 4, 6))
    flip(bucket.folder(third.save) / "manifest.json")
    flip(bucket.folder(second.save) / "__1_0.distcp")
    with started(
        tmp_path, corpus_dir, on_two.spec, 2, bucket=bucket, attempt=2, resume_from=third, resume_parent=second
    ) as ranks:
        assert ranks.finish() == [0, 0], ranks.log(0)
        progress, outcomes = ranks.progress(), ranks.outcomes()
        assert ranks.losses() == after(on_two.losses, 2)
    assert progress.restored == first.save
    assert [(item.save, item.file) for item in progress.fell_back] == [
        (third.save, "manifest.json"),
        (second.save, "__1_0.distcp"),
    ]
    assert all(outcome.fell_back == progress.fell_back for outcome in outcomes)


def test_a_damaged_save_without_a_parent_ends_as_bad_checkpoint(tmp_path, corpus_dir, on_two):
    bucket = copied(on_two.bucket, tmp_path / "bucket")
    pointer = bucket.pointer(SAVED_AT)
    flip(bucket.folder(pointer.save) / ".metadata")
    with started(tmp_path, corpus_dir, on_two.spec, 1, bucket=bucket, attempt=2, resume_from=pointer) as ranks:
        assert ranks.finish() == [70]
        assert f"nothing is left to resume from: {pointer.save}/.metadata" in ranks.log(0)


def test_a_save_of_another_config_is_the_users_fault_and_the_field_is_named(tmp_path, corpus_dir, on_two):
    spec = replace(on_two.spec, training=replace(on_two.spec.training, learning_rate=0.5))
    pointer = on_two.bucket.pointer(SAVED_AT)
    with started(tmp_path, corpus_dir, spec, 1, bucket=on_two.bucket, attempt=2, resume_from=pointer) as ranks:
        assert ranks.finish() == [74]
        assert "different: learning_rate" in ranks.log(0)


def test_a_rehearsal_brings_a_save_back_in_a_fresh_process_and_names_what_is_damaged(tmp_path, on_two, capfd):
    """The parts are the nodes'; the folder of this bucket has none, so they are written here."""
    pointer = on_two.bucket.pointer(SAVED_AT)
    folder = copied(on_two.bucket, tmp_path / "bucket").folder(pointer.save)
    write_parts(folder)
    assert rehearse.main([str(folder)]) == 0
    assert state_sha256(folder) in capfd.readouterr().out
    flip(folder / "__1_0.distcp")
    assert rehearse.main([str(folder)]) == 1
    assert "__1_0.distcp: sha256" in capfd.readouterr().err
    assert rehearse.main([str(tmp_path / "nowhere")]) == 1
    assert rehearse.main([]) == 2


def write_parts(folder: Path) -> None:
    manifest = read_manifest((folder / "manifest.json").read_bytes())
    for rank in range(manifest.world_size):
        files = tuple(file for file in manifest.files if file.node_rank == rank)
        part = Part(
            job=manifest.job, attempt=manifest.attempt, save=manifest.save, node_rank=rank, roster_id="r", files=files
        )
        (folder / part_file(rank)).parent.mkdir(exist_ok=True)
        (folder / part_file(rank)).write_bytes(seal(part)[0])


def copied(bucket: FolderBucket, root: Path) -> FolderBucket:
    for pointer in bucket.committed:
        shutil.copytree(bucket.folder(pointer.save), root / pointer.save)
    return FolderBucket(root, list(bucket.committed))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
