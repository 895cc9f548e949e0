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

from job_contract.dataset import BLOCK_SHARDS
from trainer.config import Config
from trainer.corpus import Corpus
from trainer.endings import UserError


@dataclass(frozen=True)
class MicroBatch:
    """Input tokens, the tokens that follow them, and the weight of each as a target: 0 for padding and where masked."""

    tokens_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor


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
    """The order of all windows, epoch after epoch. `shards` are their sizes in tokens; windows stay inside a shard."""

    def __init__(self, shards: tuple[int, ...], window: int, seed: int) -> None:
        self.window, self.seed = window, seed
        # A window needs one token more than it is long: the target of its last token.
        self.windows = np.array([max(0, (tokens - 1) // window) for tokens in shards], dtype=np.int64)
        self.epoch_windows = int(self.windows.sum())
        if self.epoch_windows == 0:
            raise UserError(f"the data set has no window of {window} tokens; shorten sequence_length")
        self.first_windows = np.concatenate(([0], np.cumsum(self.windows)[:-1]))
        self._blocks = lru_cache(maxsize=2)(self._make_blocks)
        self._block = lru_cache(maxsize=2)(self._make_block)

    def sample(self, index: int) -> int:
        """Return the id of the `index`-th window since the start of the training, counted through all epochs."""
        epoch, block, place = self._place(index)
        return int(self._block(epoch, block)[place])

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the shard that the window of this id lies in, and its first token there."""
        shard = int(np.searchsorted(self.first_windows, sample, side="right")) - 1
        return shard, int((sample - self.first_windows[shard]) * self.window)

    def reading(self, first: int, last: int, end: int | None = None) -> tuple[int, ...]:
        """Return the shards of the blocks from that of the index `first` to that of `last`, and of the block after.

        Nothing is read from the index `end` on, so a block that begins there is left out.
        """
        at, until = self._place(first)[:2], self._place(last)[:2]
        if end is None or self._first_index(*self._next(*until)) < end:
            until = self._next(*until)
        shards: dict[int, None] = {}
        while at <= until:
            shards |= dict.fromkeys(self._blocks(at[0])[0][at[1]].tolist())
            at = self._next(*at)
        return tuple(shards)

    def _place(self, index: int) -> tuple[int, int, int]:
        """Return epoch, block, and place in the block."""
        epoch, position = divmod(index, self.epoch_windows)
        ends = self._blocks(epoch)[1]
        block = int(np.searchsorted(ends, position, side="right"))
        return epoch, block, position - (int(ends[block - 1]) if block else 0)

    def _first_index(self, epoch: int, block: int) -> int:
        return epoch * self.epoch_windows + (int(self._blocks(epoch)[1][block - 1]) if block else 0)

    def _next(self, epoch: int, block: int) -> tuple[int, int]:
        return (epoch, block + 1) if block + 1 < len(self._blocks(epoch)[0]) else (epoch + 1, 0)

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

    def __init__(
        self, config: Config, rank: int, world_size: int, *, seed: int | None = None, steps: int | None = None
    ) -> None:
        """`seed` and `steps` are the training's where none are given."""
        training = config.training
        self.end = (training.steps if steps is None else steps) * training.global_batch
        self.window, self.global_batch = training.sequence_length, training.global_batch
        self.seed = training.seed if seed is None else seed
        self.vocab = config.model.vocab
        share, more = divmod(training.global_batch, world_size)
        self.first = rank * share + min(rank, more)
        self.count = share + (rank < more)
        largest = share + (more > 0)
        self.micro_batch = min(training.micro_batch or largest, largest)
        self.micro_steps = -(-largest // self.micro_batch)

    def read_from(self, corpus: Corpus) -> None:
        """Samples are the corpus's from now on. Raises UserError when it does not fit the model or the window."""
        if corpus.index.vocab > self.vocab:
            raise UserError(
                f"model.vocab is {self.vocab}, the data set has tokens up to {corpus.index.vocab - 1}; "
                f"set it to {corpus.index.vocab} at least"
            )
        self.corpus = corpus
        self.order = Order(corpus.shard_tokens, self.window, self.seed)

    def samples(self, step: int) -> list[int]:
        """Return the ids of the global batch that follows `step` finished steps; the same for every world size."""
        return [self.order.sample(step * self.global_batch + place) for place in range(self.global_batch)]

    def reading(self, step: int) -> tuple[int, ...]:
        """Return the shards that this rank may read in the step after `step` finished ones, before it, and soon after.

        The step before counts, because what comes next is asked for while that step still reads.
        """
        return self.order.reading(self._span(max(0, step - 1))[0], self._span(step)[1], self.end)

    def shards(self, step: int) -> set[int]:
        """Return the shards that hold this rank's samples of the step after `step` finished ones."""
        first = self._span(step)[0]
        return {self.order.locate(self.order.sample(first + place))[0] for place in range(self.count)}

    def micro(self, step: int, number: int) -> MicroBatch:
        """Return this rank's micro-batch `number` of the step after `step` finished ones, filled up with weight 0."""
        places = range(number * self.micro_batch, (number + 1) * self.micro_batch)
        tokens = np.zeros((self.micro_batch, self.window + 1), np.int64)
        weights = np.zeros((self.micro_batch, self.window), np.float32)
        for row, place in enumerate(places):
            if place < self.count:
                tokens[row], weights[row] = self._row(self._span(step)[0] + place)
        rows_BT = torch.from_numpy(tokens)
        return MicroBatch(rows_BT[:, :-1], rows_BT[:, 1:], torch.from_numpy(weights))

    def targets(self, step: int) -> float:
        """Return the sum of the weights of this rank's targets in the step after `step` finished ones."""
        first = self._span(step)[0]
        return float(sum(self._row(first + place)[1].sum(dtype=np.float64) for place in range(self.count)))

    def _span(self, step: int) -> tuple[int, int]:
        """Return the index of this rank's first sample of the step and of its last; the first, where it has none."""
        first = step * self.global_batch + self.first
        return first, first + max(0, self.count - 1)

    def _row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the window's tokens with the one after, and the weight of each target."""
        shard, first = self.order.locate(self.order.sample(index))
        tokens, weights = self.corpus.row(shard, first, self.window + 1)
        return tokens, np.ones(self.window, np.float32) if weights is None else weights[1:]


def warm_up_batch(config: Config, micro_batch: int) -> MicroBatch:
    """Return a batch of fixed tokens in the shape of the real ones."""
    length = config.training.sequence_length + 1
    rows_BT = torch.arange(micro_batch * length).reshape(micro_batch, length) % config.model.vocab
    return MicroBatch(rows_BT[:, :-1], rows_BT[:, 1:], torch.ones(micro_batch, length - 1))
