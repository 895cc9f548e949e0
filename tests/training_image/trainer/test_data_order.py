"""Claims about which samples are trained when."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training_image.trainer.folder_agent import tiny_spec
from trainer.config import Config, config_of
from trainer.corpus import Corpus, open_corpus
from trainer.data import BLOCK_SHARDS, Batches, Order, permutation
from trainer.endings import UserError

# Ten shards of 100 to 190 tokens.
SHARDS = tuple((sum(100 + 10 * before for before in range(shard)), 100 + 10 * shard) for shard in range(10))


def config(**training: object) -> Config:
    return config_of(tiny_spec(**{"sequence_length": 8, **training}))


def corpus() -> Corpus:
    tokens = np.arange(4096, dtype=np.int64).astype(np.uint8)
    return Corpus(tokens=tokens, digest="", shard_tokens=256)


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
    starts = [order.first_token(sample) for sample in range(order.epoch_windows)]
    assert len(set(starts)) == order.epoch_windows
    assert all(any(first <= start and start + 8 < first + tokens for first, tokens in SHARDS) for start in starts)


def test_a_block_of_shards_is_read_to_its_end_before_the_next():
    order = Order(SHARDS, window=8, seed=3)
    shard_of = np.repeat(np.arange(len(SHARDS)), order.windows)
    seen = [int(shard_of[order.sample(index)]) for index in range(order.epoch_windows)]
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


def test_a_batch_may_span_two_epochs():
    batches = Batches(corpus(), config(global_batch=100), rank=0, world_size=1)
    last = batches.order.epoch_windows // 100
    samples = batches.samples(last)
    assert len(samples) == 100
    assert samples == [batches.order.sample(last * 100 + place) for place in range(100)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 16])
@pytest.mark.parametrize("micro_batch", [None, 2, 3])
def test_the_ranks_together_train_the_same_global_batch_for_every_world_size(world_size: int, micro_batch: int | None):
    settings = config(micro_batch=micro_batch)
    ranks = [Batches(corpus(), settings, rank, world_size) for rank in range(world_size)]
    assert len({batches.micro_steps for batches in ranks}) == 1
    rows = [
        row.tolist()
        for batches in ranks
        for number in range(batches.micro_steps)
        for row, weight in zip(*_rows_and_weights(batches, number), strict=True)
        if weight
    ]
    whole = Batches(corpus(), config(), rank=0, world_size=1)
    assert rows == whole.micro(5, 0).tokens_BT.tolist()


def test_the_targets_are_the_tokens_one_further():
    batch = Batches(corpus(), config(), rank=0, world_size=1).micro(0, 0)
    assert batch.tokens_BT[:, 1:].tolist() == batch.targets_BT[:, :-1].tolist()


def test_a_corpus_without_one_window_is_the_users_fault():
    with pytest.raises(UserError, match="sequence_length"):
        Order(((0, 8),), window=8, seed=0)


def test_two_builds_of_the_corpus_have_the_same_bytes(tmp_path, corpus_dir):
    built, again = open_corpus(corpus_dir), open_corpus(tmp_path / "again")
    assert built.digest == again.digest
    assert len(built.tokens) > 5_000_000


def test_a_corpus_with_a_flipped_byte_is_not_trained_on(tmp_path):
    open_corpus(tmp_path / "corpus")
    with (tmp_path / "corpus/tokens.bin").open("r+b") as stream:
        stream.write(b"\xff")
    with pytest.raises(OSError, match="damaged"):
        open_corpus(tmp_path / "corpus")


def _rows_and_weights(batches: Batches, number: int):
    batch = batches.micro(5, number)
    return batch.tokens_BT, batch.weights_B.tolist()
