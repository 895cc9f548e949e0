"""A learner alone in this process, for claims that need no second rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch.nn import functional as F

from tests.training_image.trainer.folder_agent import free_port, tiny_spec
from trainer.config import Config, config_of
from trainer.parallel import Learner, Ranks, join


@contextmanager
def alone() -> Iterator[Ranks]:
    """This process is the only rank of a gang, as long as the context lasts."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    before = {name: os.environ.get(name) for name in place}
    os.environ.update(place)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield join()
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def learner(ranks: Ranks, **training: Any) -> Learner:
    return Learner(config_of(tiny_spec(**training)), ranks)


def tokens(config: Config, step: int) -> torch.Tensor:
    """Return the rows of a step, one token longer than a sequence, the same in every call."""
    shape = (config.training.global_batch, config.training.sequence_length + 1)
    return torch.randint(0, config.model.vocab, shape, generator=torch.Generator().manual_seed(step))


def losses(of: Learner, steps: range) -> list[float]:
    """Return the loss of each step; the learner has been trained in them."""
    found = []
    for step in steps:
        torch.manual_seed(step)
        rows = tokens(of.config, step)
        loss = F.cross_entropy(of.net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        of.clip()
        of.update(of.config.learning_rate(step))
        found.append(float(loss.detach()))
    return found
