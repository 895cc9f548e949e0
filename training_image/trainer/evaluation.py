"""The evaluation set: an index of its own, and the same windows of it each time."""

from __future__ import annotations

from pathlib import Path

from trainer.config import Config
from trainer.data import Batches
from trainer.feed import Feed
from trainer.parallel import Ranks

# The order of the training may be another in each job; these windows are the same in all.
SEED = 0


class Evaluation:
    """Gives the evaluation its batches; each is a step of an order of its own."""

    def __init__(self, feed: Feed, batches: Batches, *, every_steps: int, most: int) -> None:
        self.feed, self.batches, self.every_steps, self.most = feed, batches, every_steps, most

    @classmethod
    def of(cls, config: Config, run_dir: Path, ranks: Ranks) -> Evaluation | None:
        """Return the evaluation that the job asks for, None when it asks for none."""
        asked = config.training.evaluation
        if asked is None:
            return None
        batches = Batches(config, ranks.rank, ranks.world_size, seed=SEED, steps=asked.batches)
        feed = Feed(
            run_dir,
            run_dir / "evaluation",
            asked.data.index_sha256,
            batches,
            ranks.rank,
            sharing=config.ranks_per_node,
        )
        return cls(feed, batches, every_steps=asked.every_steps, most=asked.batches)

    def is_whole(self, batches: int) -> bool:
        """Return whether so many batches are all: those asked for, but no window twice, and one at least."""
        if batches == 0:
            return False
        windows = self.batches.order.epoch_windows
        return batches >= min(self.most, max(1, windows // self.batches.global_batch))
