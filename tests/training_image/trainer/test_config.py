"""Claims about the config and the learning-rate schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from job_contract.spec import DataSpec
from tests.training_image.trainer.folder_agent import tiny_spec
from trainer.config import Options, config_of
from trainer.endings import UserError


def test_the_rate_rises_linearly_then_falls_along_a_cosine_to_a_tenth():
    config = config_of(tiny_spec(learning_rate=1.0, warmup_steps=4, steps=20))
    rates = [config.learning_rate(step) for step in range(21)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[12] == pytest.approx(0.55)
    assert rates[20] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_the_hash_covers_what_is_trained_and_not_how_it_is_spread():
    spec = tiny_spec()
    same = replace(
        spec,
        training=replace(
            spec.training,
            parallel="hsdp",
            micro_batch=2,
            activation_checkpointing="full",
            compile=True,
            prefetch=2,
            reshard_after_forward=False,
        ),
    )
    other = replace(spec, training=replace(spec.training, seed=8))
    assert config_of(spec).hash == config_of(same).hash
    assert config_of(spec).hash != config_of(other).hash


def test_a_spec_of_an_older_release_has_the_hash_that_its_saves_carry():
    """Fields that came later are left out of the hash where a spec does not have them."""
    assert set(config_of(tiny_spec()).fixed) == {
        *("model", "data", "steps", "global_batch", "sequence_length", "learning_rate", "warmup_steps"),
        *("weight_decay", "clip_norm", "precision", "seed"),
    }


def test_the_device_decides_where_the_spec_says_nothing():
    config = config_of(tiny_spec())
    assert config.options(gpu=False) == Options(checkpointing="none", compile=False, prefetch=0, reshard=True)
    assert config.options(gpu=True) == Options(checkpointing="none", compile=True, prefetch=1, reshard=True)
    asked = config_of(
        tiny_spec(activation_checkpointing="full", compile=False, prefetch=3, reshard_after_forward=False)
    )
    for gpu in (False, True):
        assert asked.options(gpu=gpu) == Options(checkpointing="full", compile=False, prefetch=3, reshard=False)


def test_a_dataset_is_its_digest_wherever_it_lies_and_whatever_it_is_called():
    def hash_of(**data: str) -> str:
        spec = tiny_spec()
        return config_of(replace(spec, training=replace(spec.training, data=DataSpec(**data)))).hash

    here = hash_of(uri="s3://corpora/web", index_sha256="d" * 64, dataset="web@3")
    assert hash_of(uri="file:///mnt/web", index_sha256="d" * 64) == here
    assert hash_of(uri="s3://corpora/web", index_sha256="e" * 64, dataset="web@3") != here
    with pytest.raises(UserError, match="index_sha256"):
        hash_of(uri="s3://corpora/web")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"parallel": "pipeline"}, "parallel"),
        ({"precision": "fp8"}, "precision"),
        ({"activation_checkpointing": "some"}, "activation_checkpointing"),
        ({"prefetch": -1}, "prefetch"),
        ({"global_batch": 0}, "global_batch"),
        ({"init_from": "https://example.org/llama"}, "init_from"),
        ({"model": {"kv_heads": 3}}, "kv_heads"),
        ({"model": {"vocab": 100}}, "vocab"),
    ],
)
def test_what_the_trainer_cannot_do_is_refused_by_name(wrong: dict, named: str):
    with pytest.raises(UserError, match=named):
        config_of(tiny_spec(**wrong))
