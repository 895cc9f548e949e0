"""Claims about orders: all ranks act at the same step, wherever the order came in."""

from __future__ import annotations

import pytest

from job_contract.checkpoint_layout import parse_save_name, save_name
from job_contract.node_files import ControlKind, RankProgress, RankSave, read_message
from tests.training_image.trainer.folder_agent import FolderBucket, started, tiny_spec

pytestmark = pytest.mark.ranks
ENDLESS = 100_000
NOTHING = RankProgress(step=0, loss=0.0, tokens_per_s=0.0, state="", world_size=0)


@pytest.fixture
def bucket(tmp_path) -> FolderBucket:
    return FolderBucket(tmp_path / "bucket")


def test_o24_an_order_that_one_node_sees_is_obeyed_by_all_at_one_step_in_the_middle_of_accumulation(
    tmp_path, corpus_dir, bucket
):
    # Sixteen micro-steps a step: an order falls between two optimizer steps only once in sixteen times.
    spec = tiny_spec(steps=ENDLESS, interval_steps=ENDLESS, micro_batch=1, global_batch=32)
    with started(tmp_path, corpus_dir, spec, 2, bucket=bucket) as ranks:
        ranks.until(lambda: ranks.saw("first_step"))
        first = ranks.order(ControlKind.CHECKPOINT, nodes=[1])
        ranks.until(lambda: bool(bucket.committed))
        steps_at_first_save = parse_save_name(bucket.committed[0].save).step
        ranks.until(lambda: ranks.metrics()[-1]["step"] > steps_at_first_save)
        second = ranks.order(ControlKind.CHECKPOINT_STOP, nodes=[0], doomed=(1,))
        assert ranks.finish() == [0, 0], ranks.log(0)

        final = bucket.committed[-1].save
        outcomes = ranks.outcomes()
        assert {(outcome.outcome, outcome.save, outcome.existing) for outcome in outcomes} == {
            ("stopped", final, False)
        }
        assert {outcome.answers_generation for outcome in outcomes} == {second}
        assert {outcome.step for outcome in outcomes} == {parse_save_name(final).step} == {ranks.metrics()[-1]["step"]}
        assert [line["step"] for line in ranks.metrics()] == list(range(1, outcomes[0].step + 1))
        assert parse_save_name(final).number == 2
        shares = [
            read_message(ranks.run_dir(rank) / "saves" / final / f"rank-{rank}.json", RankSave) for rank in ranks.ranks
        ]
        assert [share.answers_generation for share in shares] == [second, second]
        assert [line["generation"] for line in ranks.events(1) if line["event"] == "signal"] == [first]


def test_an_order_before_the_first_new_step_names_the_save_that_is_there(tmp_path, corpus_dir, bucket):
    spec = tiny_spec(steps=ENDLESS, interval_steps=ENDLESS)
    with started(tmp_path, corpus_dir, spec, 1, bucket=bucket) as ranks:
        ranks.until(lambda: ranks.saw("first_step"))
        ranks.order(ControlKind.CHECKPOINT)
        ranks.until(lambda: bool(bucket.committed))
        ranks.order(ControlKind.STOP)
        assert ranks.finish() == [0], ranks.log(0)
        assert [(outcome.outcome, outcome.save) for outcome in ranks.outcomes()] == [("aborted", None)]

    pointer = bucket.committed[0]
    with started(tmp_path, corpus_dir, spec, 1, bucket=bucket, attempt=2, resume_from=pointer) as ranks:
        generation = ranks.order(ControlKind.CHECKPOINT)
        ranks.until(lambda: ranks.saw("first_step"))
        progress = ranks.progress()
        assert (progress.answered_generation, progress.newest_save) == (generation, pointer.save)
        ranks.order(ControlKind.STOP)
        assert ranks.finish() == [0], ranks.log(0)

    with started(tmp_path, corpus_dir, spec, 2, bucket=bucket, attempt=3, resume_from=pointer) as ranks:
        generation = ranks.order(ControlKind.CHECKPOINT_STOP)
        assert ranks.finish() == [0, 0], ranks.log(0)
        for outcome in ranks.outcomes():
            assert (outcome.outcome, outcome.save, outcome.existing) == ("stopped", pointer.save, True)
            assert (outcome.step, outcome.answers_generation) == (pointer.step, generation)
        assert ranks.metrics() == []
    assert bucket.committed == [pointer]


def test_replicated_state_is_written_by_the_node_that_will_live(tmp_path, corpus_dir, bucket):
    spec = tiny_spec(steps=ENDLESS, interval_steps=ENDLESS, parallel="ddp")
    with started(tmp_path, corpus_dir, spec, 2, bucket=bucket) as ranks:
        ranks.until(lambda: ranks.saw("first_step"))
        ranks.order(ControlKind.CHECKPOINT_STOP, nodes=[1], doomed=(0,))
        assert ranks.finish() == [0, 0], ranks.log(0)
        save = bucket.committed[-1].save
        shares = [
            read_message(ranks.run_dir(rank) / "saves" / save / f"rank-{rank}.json", RankSave) for rank in ranks.ranks
        ]
        assert [share.files for share in shares] == [(".metadata",), ("__1_0.distcp",)]


def test_o24_an_order_while_a_save_is_written_and_a_second_one_right_after_it_make_one_more_save(
    tmp_path, corpus_dir, bucket
):
    spec = tiny_spec(steps=ENDLESS, interval_steps=ENDLESS, micro_batch=8)
    slow = ("-m", "bench.altered_trainer", "writes_slowly")
    with started(tmp_path, corpus_dir, spec, 2, bucket=bucket, command=slow) as ranks:
        ranks.until(lambda: ranks.saw("first_step"))
        first = ranks.order(ControlKind.CHECKPOINT)
        ranks.until(lambda: ranks.saw("save_started"))
        begun_at = ranks.metrics()[-1]["step"]
        ranks.until(lambda: ranks.metrics()[-1]["step"] > begun_at)
        assert not ranks.saw("save_written"), "the training went on while the save was written"
        ranks.order(ControlKind.CHECKPOINT_STOP, nodes=[1])
        last = ranks.order(ControlKind.CHECKPOINT_STOP)
        assert ranks.finish() == [0, 0], ranks.log(0)

        assert [parse_save_name(pointer.save).number for pointer in bucket.committed] == [1, 2]
        final = bucket.committed[-1]
        assert {(one.outcome, one.save, one.existing) for one in ranks.outcomes()} == {("stopped", final.save, False)}
        assert {one.answers_generation for one in ranks.outcomes()} <= {last - 1, last}
        assert final.step == ranks.metrics()[-1]["step"] > bucket.committed[0].step
        for rank in ranks.ranks:
            writing = [line for line in ranks.events(rank) if line["event"] in ("save_started", "save_written")]
            assert [line["event"] for line in writing] == ["save_started", "save_written"] * 2, "never two writers"
            assert writing[0]["generation"] == first


def test_o24_an_order_before_the_first_step_of_a_new_job_ends_it_cleanly_and_publishes_no_save(
    tmp_path, corpus_dir, bucket
):
    spec = tiny_spec(steps=ENDLESS, interval_steps=ENDLESS)
    with started(tmp_path, corpus_dir, spec, 1, bucket=bucket) as ranks:
        generation = ranks.order(ControlKind.CHECKPOINT_STOP)
        assert ranks.finish() == [0], ranks.log(0)
        [outcome] = ranks.outcomes()
        assert (outcome.outcome, outcome.save, outcome.answers_generation) == ("stopped", None, generation)
        assert (bucket.committed, list(ranks.run_dir(0).glob("saves/*"))) == ([], [])


def test_o24_ranks_that_wait_for_weights_answer_a_checkpoint_and_a_stop_and_publish_no_save(
    tmp_path, corpus_dir, bucket
):
    spec = tiny_spec(steps=ENDLESS, interval_steps=ENDLESS, init_from="s3://bucket/teams/research/llama")
    with started(tmp_path, corpus_dir, spec, 2, bucket=bucket) as ranks:
        ranks.until(lambda: ranks.saw("weights_awaited", 1))
        first = ranks.order(ControlKind.CHECKPOINT, nodes=[1])
        ranks.until(lambda: (ranks.progress() or NOTHING).answered_generation == first)
        assert ranks.progress().newest_save is None
        last = ranks.order(ControlKind.CHECKPOINT_STOP, nodes=[1])
        assert ranks.finish() == [0, 0], ranks.log(0)
        for outcome in ranks.outcomes():
            assert (outcome.outcome, outcome.step, outcome.save) == ("stopped", 0, None)
            assert outcome.answers_generation == last
        assert (bucket.committed, list(ranks.run_dir(0).glob("saves/*"))) == ([], [])


def test_o21_a_rank_that_cannot_write_ends_the_save_on_all_ranks_and_the_training_goes_on(tmp_path, corpus_dir, bucket):
    spec = tiny_spec(steps=6, interval_steps=2, micro_batch=8)
    full = ("-m", "bench.altered_trainer", "first_save_meets_a_full_disk")
    with started(tmp_path, corpus_dir, spec, 2, bucket=bucket, command=full) as ranks:
        assert ranks.finish() == [0, 0], ranks.log(0)
        first = save_name(2, 1, 1)
        shares = [
            read_message(ranks.run_dir(rank) / "saves" / first / f"rank-{rank}.json", RankSave) for rank in ranks.ranks
        ]
        for rank, share in enumerate(shares):
            assert (share.rank, share.files, share.step) == (rank, (), 2)
            assert "rank 1: OSError(28, 'No space left on device')" in share.failed
        assert [pointer.step for pointer in bucket.committed] == [4, 6]
        assert len(ranks.metrics()) == 6
