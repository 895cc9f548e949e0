"""Claims about how the model is run: whatever is chosen, the same thing is trained."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training_image.trainer.one_rank import alone, learner, losses

MODEL = {"dim": 32, "layers": 3, "heads": 2, "kv_heads": 1, "ffn_dim": 64, "dropout": 0.1}
WAYS: dict[str, dict[str, Any]] = {
    "full checkpointing": {"activation_checkpointing": "full"},
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "prefetch": {"prefetch": 2},
    "no reshard": {"reshard_after_forward": False},
    "all of them": {"activation_checkpointing": "selective", "prefetch": 1, "reshard_after_forward": False},
    "hsdp on one node": {"parallel": "hsdp"},
}


@pytest.mark.filterwarnings("ignore")
def test_options_change_neither_the_losses_nor_the_names_of_parameters():
    """Dropout included: what is computed again draws the same numbers."""
    with alone() as ranks:
        size = {"model": MODEL, "sequence_length": 16, "global_batch": 2}
        plain = learner(ranks, **size)
        expected, names = losses(plain, range(2)), set(plain.tensors())
        for way, options in WAYS.items():
            other = learner(ranks, **size, **options)
            assert set(other.tensors()) == names, way
            assert losses(other, range(2)) == expected, way
        assert losses(learner(ranks, **{**size, "seed": 8}), range(2)) != expected
