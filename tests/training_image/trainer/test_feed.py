"""Claims about data that come while training runs: agents and ranks together, without a process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from agent.journal import Journal
from agent.shards import Shards
from job_contract.dataset import BLOCK_SHARDS, DatasetIndex, TokenizerFacts
from job_contract.dataset_writer import DatasetWriter
from job_contract.spec import DataSpec, JobSpec
from tests.training_image.trainer.folder_agent import tiny_spec
from trainer.config import config_of
from trainer.data import Batches
from trainer.feed import Feed

SHARDS, SHARD_TOKENS, WINDOW, BATCH = 1000, 17, 8, 16
STEPS = 125
NODES, RANKS_PER_NODE = 4, 2


@dataclass
class Counted:
    """A place from which each file is brought, and that counts it."""

    folder: Path
    asked: Counter[str] = field(default_factory=Counter)

    def stream(self, file: str) -> Iterator[bytes]:
        self.asked[file] += 1
        yield (self.folder / file).read_bytes()

    def path(self, file: str) -> None:
        return None


class Node:
    """The data of one node's ranks, brought by the agent's own code."""

    def __init__(self, root: Path, number: int, spec: JobSpec, source: Path, world_size: int) -> None:
        self.place, run_dir = Counted(source), root / "run"
        ranks = range(number * RANKS_PER_NODE, (number + 1) * RANKS_PER_NODE)
        self.shards = Shards(
            spec.training.data,
            ranks,
            run_dir=run_dir,
            root=root,
            place=self.place,
            downloads=1,
            journal=Journal(root / "events.jsonl"),
        )
        config, digest = config_of(spec), spec.training.data.index_sha256
        self.feeds = [
            Feed(run_dir, self.shards.visible, digest, Batches(config, rank, world_size), rank) for rank in ranks
        ]

    def train(self, step: int) -> list[int]:
        """Return the windows that this node's ranks train in a step, each by its first token."""
        while [feed for feed in self.feeds if feed.lacks(step)]:
            self.shards.round()
        # As the loop does it: the next step's data are asked for before the last of this one's are read.
        for feed in self.feeds:
            feed.lacks(min(step + 1, STEPS - 1))
        self.shards.round()
        return [row for feed in self.feeds for row in _windows(feed.batches, step)]

    def most_files(self) -> int:
        return len(list(self.shards.store.iterdir()))


def _windows(batches: Batches, step: int) -> list[int]:
    return [
        int(tokens[0])
        for number in range(batches.micro_steps)
        for place, tokens in enumerate(batches.micro(step, number).tokens_BT)
        if number * batches.micro_batch + place < batches.count
    ]


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DatasetIndex]:
    """A thousand shards of two windows each; a token says where it stands."""
    folder = tmp_path_factory.mktemp("counting") / "v1"
    with DatasetWriter(
        folder,
        vocab=SHARDS * SHARD_TOKENS,
        tokenizer=TokenizerFacts(kind="bytes"),
        source="",
        licence="",
        shard_tokens=SHARD_TOKENS,
    ) as writer:
        writer.add(range(SHARDS * SHARD_TOKENS))
        return folder, writer.close()


def test_a_thousand_shards_on_eight_ranks_with_a_replaced_node_are_trained_once_an_epoch_each_brought_once(
    tmp_path: Path, counting: tuple[Path, DatasetIndex], capsys: pytest.CaptureFixture[str]
) -> None:
    source, index = counting
    spec = tiny_spec(model={"vocab": index.vocab}, sequence_length=WINDOW, global_batch=BATCH, steps=STEPS)
    data = DataSpec(uri="s3://corpora/v1", index_sha256=index.sha256)
    spec = replace(spec, training=replace(spec.training, data=data), ranks_per_node=RANKS_PER_NODE)
    world_size = NODES * RANKS_PER_NODE

    def join(name: str, number: int) -> Node:
        return Node(tmp_path / name, number, spec, source, world_size)

    nodes = [join(f"node-{number}", number) for number in range(NODES)]
    trained, most = [], 0
    for step in range(STEPS):
        if step == 60:
            killed, nodes[2] = nodes[2], join("node-4", 2)
        trained += [window for node in nodes for window in node.train(step)]
        most = max(most, *(node.most_files() for node in nodes))
    windows = [SHARD_TOKENS * shard + WINDOW * place for shard in range(SHARDS) for place in range(2)]
    assert sorted(trained) == windows
    assert {count for node in (*nodes, killed) for count in node.place.asked.values()} == {1}
    # Two windows a shard and sixteen a batch: a step spans two blocks, and the next is on its way.
    assert most <= 3 * BLOCK_SHARDS + BLOCK_SHARDS
    assert len(killed.place.asked) + len(nodes[2].place.asked) < 1.1 * len(nodes[3].place.asked)
