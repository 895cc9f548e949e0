"""Claims about which samples are trained when."""

from __future__ import annotations

import shutil

import pytest

from job_contract.dataset import BLOCK_SHARDS, TokenizerFacts
from job_contract.dataset_writer import DatasetWriter
from tests.training_image.trainer.folder_agent import tiny_spec
from trainer.config import Config, config_of
from trainer.corpus import Corpus, open_corpus
from trainer.data import Batches, Order, permutation
from trainer.endings import UserError

# Ten shards of 100 to 190 tokens.
SHARDS = tuple(100 + 10 * shard for shard in range(10))


def config(**training: object) -> Config:
    return config_of(tiny_spec(model={"vocab": 4096}, **{"sequence_length": 8, **training}))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The tokens 0 to 4095 in 16 shards, so each says where it stands; every third is no target."""
    folder = tmp_path_factory.mktemp("counting") / "corpus"
    facts = TokenizerFacts(kind="bytes")
    with DatasetWriter(folder, vocab=4096, tokenizer=facts, source="", licence="", shard_tokens=256) as writer:
        writer.add(range(4096), bytes(place % 3 > 0 for place in range(4096)))
        return Corpus(folder, writer.close())


def batches_of(corpus: Corpus, settings: Config, rank: int = 0, world_size: int = 1) -> Batches:
    batches = Batches(settings, rank, world_size)
    batches.read_from(corpus)
    return batches


def test_each_epoch_has_every_window_once_and_in_another_order():
    order = Order(SHARDS, window=8, seed=3)
    epochs = [
        [order.sample(epoch * order.epoch_windows + index) for index in range(order.epoch_windows)]
        for epoch in range(2)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(order.epoch_windows))] * 2
    assert epochs[0] != epochs[1]


def test_a_window_with_its_last_target_stays_inside_its_shard():
    order = Order(SHARDS, window=8, seed=3)
    places = [order.locate(sample) for sample in range(order.epoch_windows)]
    assert len(set(places)) == order.epoch_windows
    assert all(first >= 0 and first % 8 == 0 and first + 8 < SHARDS[shard] for shard, first in places)


def test_a_block_of_shards_is_read_to_its_end_before_the_next():
    order = Order(SHARDS, window=8, seed=3)
    seen = [order.locate(order.sample(index))[0] for index in range(order.epoch_windows)]
    shards = permutation(len(SHARDS), 3, 0)
    first_block = shards[:BLOCK_SHARDS]
    assert set(seen[: int(order.windows[first_block].sum())]) == set(first_block.tolist())


def test_the_order_is_a_function_of_the_index_whatever_was_asked_before():
    order = Order(SHARDS, window=8, seed=3)
    straight = [order.sample(index) for index in range(300)]
    fresh = Order(SHARDS, window=8, seed=3)
    assert [fresh.sample(index) for index in reversed(range(300))] == straight[::-1]
    assert [Order(SHARDS, window=8, seed=4).sample(index) for index in range(300)] != straight


def test_the_permutation_is_frozen():
    assert permutation(8, 1, 2).tolist() == [1, 3, 7, 2, 6, 4, 5, 0]


def test_two_blocks_are_all_that_a_rank_reads_now_and_next():
    order = Order(SHARDS, window=8, seed=3)
    for index in range(2 * order.epoch_windows - 1):
        reading = order.reading(index, index)
        assert len(reading) <= 2 * BLOCK_SHARDS
        assert order.locate(order.sample(index))[0] in reading[:BLOCK_SHARDS]
        assert order.locate(order.sample(index + 1))[0] in reading


def test_a_batch_over_several_blocks_reads_them_in_their_order_and_the_one_after():
    order = Order(SHARDS, window=8, seed=3)
    shards = permutation(len(SHARDS), 3, 0).tolist()
    assert order.reading(0, order.epoch_windows - 1)[: len(SHARDS)] == tuple(shards)
    assert order.reading(0, 0) == tuple(shards[: 2 * BLOCK_SHARDS])


def test_nothing_is_brought_that_no_step_reads():
    order = Order(SHARDS, window=8, seed=3)
    first_block = order.reading(0, 0, end=1)
    assert len(first_block) == BLOCK_SHARDS
    windows = int(order.windows[list(first_block)].sum())
    assert order.reading(0, 0, end=windows) == first_block
    assert len(order.reading(0, 0, end=windows + 1)) == 2 * BLOCK_SHARDS


def test_a_batch_may_span_two_epochs(corpus: Corpus):
    batches = batches_of(corpus, config(global_batch=100))
    last = batches.order.epoch_windows // 100
    samples = batches.samples(last)
    assert len(samples) == 100
    assert samples == [batches.order.sample(last * 100 + place) for place in range(100)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 16])
@pytest.mark.parametrize("micro_batch", [None, 2, 3])
def test_the_ranks_together_train_the_same_global_batch_for_every_world_size(
    corpus: Corpus, world_size: int, micro_batch: int | None
):
    settings = config(micro_batch=micro_batch)
    ranks = [batches_of(corpus, settings, rank, world_size) for rank in range(world_size)]
    assert len({batches.micro_steps for batches in ranks}) == 1
    whole = batches_of(corpus, config())
    assert trained(ranks, 5) == trained([whole], 5)
    assert sum(batches.targets(5) for batches in ranks) == whole.targets(5)


@pytest.mark.parametrize(("saved_on", "resumed_on"), [(4, 2), (2, 4), (4, 3), (2, 2)])
def test_o22_a_resume_on_another_number_of_ranks_leaves_no_gap_and_repeats_nothing(
    corpus: Corpus, saved_on: int, resumed_on: int
):
    settings = config(global_batch=10, micro_batch=2)
    first = [batches_of(corpus, settings, rank, saved_on) for rank in range(saved_on)]
    second = [batches_of(corpus, settings, rank, resumed_on) for rank in range(resumed_on)]
    windows, steps = first[0].order.epoch_windows, -(-first[0].order.epoch_windows // 10)
    rows = [row for step in range(steps) for row in trained(first if step < steps // 3 else second, step)]
    order = first[0].order
    every = [order.locate(sample) for sample in range(windows)]
    assert len(rows) == 10 * steps
    # The last batch begins the next epoch, so the epoch itself is what comes before.
    assert sorted(rows[:windows]) == sorted(window_of(corpus, shard, at) for shard, at in every)


def trained(ranks: list[Batches], step: int) -> list[tuple[list[int], list[float]]]:
    """Return tokens and weights of all samples that the ranks train in a step, in the order of the global batch."""
    return [
        (tokens.tolist(), weights.tolist())
        for batches in ranks
        for number in range(batches.micro_steps)
        for place, (tokens, weights) in enumerate(_rows(batches, step, number))
        if number * batches.micro_batch + place < batches.count
    ]


def window_of(corpus: Corpus, shard: int, at: int) -> tuple[list[int], list[float]]:
    tokens, weights = corpus.row(shard, at, 9)
    assert weights is not None
    return tokens[:-1].tolist(), weights[1:].tolist()


def _rows(batches: Batches, step: int, number: int):
    batch = batches.micro(step, number)
    return zip(batch.tokens_BT, batch.weights_BT, strict=True)


def test_what_fills_up_a_micro_batch_has_no_weight(corpus: Corpus):
    batches = batches_of(corpus, config(global_batch=3, micro_batch=2))
    weights = batches.micro(0, 1).weights_BT
    assert weights[0].any()
    assert not weights[1].any()


def test_a_masked_token_is_no_target_wherever_it_stands(corpus: Corpus):
    batch = batches_of(corpus, config()).micro(0, 0)
    assert (batch.weights_BT > 0).tolist() == (batch.targets_BT % 3 > 0).tolist()


def test_the_targets_are_the_tokens_one_further(corpus: Corpus):
    batch = batches_of(corpus, config()).micro(0, 0)
    assert batch.tokens_BT[:, 1:].tolist() == batch.targets_BT[:, :-1].tolist()


def test_a_corpus_without_one_window_is_the_users_fault():
    with pytest.raises(UserError, match="sequence_length"):
        Order((8,), window=8, seed=0)


def test_a_model_with_a_smaller_vocabulary_than_the_data_is_the_users_fault(tmp_path):
    with DatasetWriter(
        tmp_path / "large",
        vocab=50_000,
        tokenizer=TokenizerFacts(kind="huggingface"),
        source="",
        licence="",
        shard_tokens=64,
    ) as writer:
        writer.add(list(range(40_000, 40_100)))
        large = Corpus(tmp_path / "large", writer.close())
    with pytest.raises(UserError, match=r"model.vocab is 4096.*49999; set it to 50000"):
        batches_of(large, config())


def test_two_builds_of_the_corpus_have_the_same_bytes(tmp_path, corpus_dir):
    built, again = open_corpus(corpus_dir), open_corpus(tmp_path / "again")
    assert built.digest == again.digest
    assert built.index.tokens > 5_000_000


@pytest.mark.parametrize("file", ["shard-00001.bin", "shard-00000.documents", "index.json"])
def test_a_corpus_with_a_flipped_byte_is_not_trained_on(tmp_path, corpus_dir, file):
    open_corpus(corpus_dir)
    shutil.copytree(corpus_dir, tmp_path / "corpus")
    with (tmp_path / "corpus" / file).open("r+b") as stream:
        stream.write(b"\xff")
    with pytest.raises(OSError, match="damaged"):
        open_corpus(tmp_path / "corpus")
