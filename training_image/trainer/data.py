"""Which samples make which global batch: a pure function of (seed, epoch, index), so a resume only needs the step.

Two levels keep the reading local. The shards of an epoch are permuted and cut into blocks; the windows of a block are
permuted; global batches walk the blocks. One permutation over all windows would touch every shard within ten steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from trainer.config import Config
from trainer.corpus import Corpus
from trainer.endings import UserError

BLOCK_SHARDS = 4


@dataclass(frozen=True)
class MicroBatch:
    """Input tokens, the tokens that follow them, and a weight per sequence: 0 for padding."""

    tokens_BT: Tensor
    targets_BT: Tensor
    weights_B: Tensor


def permutation(count: int, *key: int) -> np.ndarray:
    """Return 0..count-1 in an order that is a function of `key` alone.

    Sorts by splitmix64 (Steele, Lea, Flood 2014) of the position: numpy's own shuffles may change with its version.
    """
    return np.argsort(_mix(np.arange(count, dtype=np.uint64) + np.uint64(mixed(*key))), kind="stable")


def mixed(*key: int) -> int:
    """Return 64 bits that are a function of `key` alone."""
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _mix(state + np.uint64(part))
    return int(state[0])


def _mix(value: np.ndarray) -> np.ndarray:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class Order:
    """The order of all windows, epoch after epoch. Each shard is (first token, tokens); windows stay inside a shard."""

    def __init__(self, shards: tuple[tuple[int, int], ...], window: int, seed: int) -> None:
        self.window, self.seed = window, seed
        self.starts = np.array([start for start, _ in shards], dtype=np.int64)
        # A window needs one token more than it is long: the target of its last token.
        self.windows = np.array([max(0, (tokens - 1) // window) for _, tokens in shards], dtype=np.int64)
        self.epoch_windows = int(self.windows.sum())
        if self.epoch_windows == 0:
            raise UserError(f"the corpus has no window of {window} tokens; shorten sequence_length")
        self.first_windows = np.concatenate(([0], np.cumsum(self.windows)[:-1]))
        self._blocks = lru_cache(maxsize=2)(self._make_blocks)
        self._block = lru_cache(maxsize=2)(self._make_block)

    def sample(self, index: int) -> int:
        """Return the id of the `index`-th window since the start of the training, counted through all epochs."""
        epoch, position = divmod(index, self.epoch_windows)
        _, ends = self._blocks(epoch)
        block = int(np.searchsorted(ends, position, side="right"))
        first = int(ends[block - 1]) if block else 0
        return int(self._block(epoch, block)[position - first])

    def first_token(self, sample: int) -> int:
        """Return where the window of this id begins in the corpus."""
        shard = int(np.searchsorted(self.first_windows, sample, side="right")) - 1
        return int(self.starts[shard] + (sample - self.first_windows[shard]) * self.window)

    def _make_blocks(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
        shards = permutation(len(self.windows), self.seed, epoch)
        blocks = [shards[at : at + BLOCK_SHARDS] for at in range(0, len(shards), BLOCK_SHARDS)]
        return blocks, np.cumsum([int(self.windows[block].sum()) for block in blocks])

    def _make_block(self, epoch: int, block: int) -> np.ndarray:
        shards = self._blocks(epoch)[0][block]
        samples = np.concatenate([self.first_windows[shard] + np.arange(self.windows[shard]) for shard in shards])
        return samples[permutation(len(samples), self.seed, epoch, block + 1)]


class Batches:
    """This rank's share of each global batch, in micro-batches of one size; all ranks have the same number of them."""

    def __init__(self, corpus: Corpus, config: Config, rank: int, world_size: int) -> None:
        training = config.training
        self.tokens, self.window = corpus.tokens, training.sequence_length
        self.order = Order(corpus.shards, training.sequence_length, training.seed)
        self.global_batch = training.global_batch
        share, more = divmod(training.global_batch, world_size)
        self.first = rank * share + min(rank, more)
        self.count = share + (rank < more)
        largest = share + (more > 0)
        self.micro_batch = min(training.micro_batch or largest, largest)
        self.micro_steps = -(-largest // self.micro_batch)

    def samples(self, step: int) -> list[int]:
        """Return the ids of the global batch that follows `step` finished steps; the same for every world size."""
        return [self.order.sample(step * self.global_batch + place) for place in range(self.global_batch)]

    def micro(self, step: int, number: int) -> MicroBatch:
        """Return this rank's micro-batch `number` of the step after `step` finished ones, filled up with weight 0."""
        places = range(number * self.micro_batch, (number + 1) * self.micro_batch)
        index = step * self.global_batch + self.first
        real = [place < self.count for place in places]
        rows = [
            self._row(index + place) if is_real else np.zeros(self.window + 1, np.int64)
            for place, is_real in zip(places, real, strict=True)
        ]
        rows_BT = torch.from_numpy(np.stack(rows))
        return MicroBatch(rows_BT[:, :-1], rows_BT[:, 1:], torch.tensor(real, dtype=torch.float32))

    def _row(self, index: int) -> np.ndarray:
        start = self.order.first_token(self.order.sample(index))
        return self.tokens[start : start + self.window + 1].astype(np.int64)


def warm_up_batch(config: Config, micro_batch: int) -> MicroBatch:
    """Return a batch of fixed tokens in the shape of the real ones."""
    length = config.training.sequence_length + 1
    rows_BT = torch.arange(micro_batch * length).reshape(micro_batch, length) % config.model.vocab
    return MicroBatch(rows_BT[:, :-1], rows_BT[:, 1:], torch.ones(micro_batch))
