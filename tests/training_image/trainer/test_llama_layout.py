"""Claims about weights that come from and go to Hugging Face's Llama layout, judged by transformers itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from job_contract.checkpoint_layout import Manifest, SavedFile, seal
from job_contract.spec import JobSpec
from tests.training_image.trainer.folder_agent import FolderBucket, started, tiny_spec
from tests.training_image.trainer.one_rank import alone, learner, losses
from tests.training_image.trainer.states import whole_tensors
from trainer.config import config_of
from trainer.endings import UserError
from trainer.export import Save, export, main
from trainer.llama import SUMS_FILE, Weights
from trainer.model import Decoder

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "rope_theta": 500_000.0}
SPEC = tiny_spec(model=SIZES, sequence_length=16, global_batch=2)
MODEL = SPEC.training.model


def theirs(folder: Path, **changes: object) -> LlamaForCausalLM:
    """A model of transformers with random weights, in several files in `folder`."""
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "vocab_size": MODEL.vocab, "rms_norm_eps": 1e-5, "max_position_embeddings": 16,
        "rope_theta": 500_000.0, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()
    model.save_pretrained(folder, max_shard_size="40KB")
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, MODEL.vocab, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, torch.Tensor]:
    """A save of a model trained for two steps, and its logits; the values of norms and matrices are all their own."""
    folder = tmp_path_factory.mktemp("save")
    with alone() as ranks:
        own = learner(ranks, model=SIZES, sequence_length=16, global_batch=2, learning_rate=0.1)
        losses(own, range(2))
        committed(folder, own.tensors(), SPEC)
        with torch.no_grad():
            return folder, own.net.eval()(tokens())


def committed(folder: Path, tensors: dict[str, torch.Tensor], spec: JobSpec, **facts: str) -> None:
    """The folder holds the tensors as a save with its manifest."""
    import hashlib

    import torch.distributed.checkpoint as dcp

    from trainer.checkpoint import SavePlanner, SaveWriter

    dcp.save(tensors, storage_writer=SaveWriter(folder), planner=SavePlanner(frozenset()))
    files = tuple(
        SavedFile(
            path=path.name,
            size_bytes=path.stat().st_size,
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            node_rank=0,
        )
        for path in sorted(folder.iterdir())
    )
    name = "step-00000002.a0001.s01"
    manifest = Manifest(
        job=spec.job, attempt=1, step=2, save=name, world_size=1, mesh=(1,), config_hash="c", corpus_digest="d",
        versions={}, facts={"config": config_of(spec).fixed, **facts}, files=files, final=True, answers_generation=0,
        parent=None,
    )  # fmt: skip
    (folder / "manifest.json").write_bytes(seal(manifest)[0])


@pytest.mark.parametrize("file_bytes", [5_000_000_000, 40_000])
def test_what_is_exported_gives_equal_logits_in_transformers(trained, tmp_path, file_bytes: int):
    folder, logits = trained
    export(Save(folder), tmp_path / "out", file_bytes=file_bytes)
    several = file_bytes < 5_000_000_000
    assert (tmp_path / "out/model.safetensors.index.json").exists() == several
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.allclose(read(tokens()).logits, logits, rtol=0, atol=1e-5)
    assert float(logits.abs().max()) > 0.1, "logits near zero would prove nothing"


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_transformers_give_equal_logits_here(tmp_path, tied: bool):
    model = theirs(tmp_path, tie_word_embeddings=tied)
    with alone() as ranks:
        own = learner(ranks, model=SIZES, sequence_length=16, global_batch=2)
        weights = Weights(tmp_path, MODEL)
        weights.digest()
        own.start_from(weights)
        with torch.no_grad():
            assert torch.allclose(own.net.eval()(tokens()), model(tokens()).logits, rtol=0, atol=1e-5)


def test_an_export_is_a_start(trained, tmp_path):
    export(Save(trained[0]), tmp_path / "out")
    weights, saved = Weights(tmp_path / "out", MODEL), whole_tensors(trained[0])
    for name, parameter in Decoder(MODEL, 16).named_parameters():
        assert torch.equal(weights.read(name, tuple(parameter.shape), ()), saved[f"parameter.{name}"]), name


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ({"rope_theta": 10_000.0}, "rope_theta"),
        ({"attention_bias": True}, "attention_bias"),
        ({"vocab_size": 512}, "vocab_size is 512, here 260"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500_000.0}}, "rope_type is 'linear'"),
    ],
)
def test_another_model_is_refused_by_the_field(tmp_path, changes: dict, named: str):
    theirs(tmp_path, **changes)
    with pytest.raises(UserError, match=named):
        Weights(tmp_path, MODEL)


def test_damaged_missing_and_strange_files_are_named(trained, tmp_path):
    out = tmp_path / "out"
    export(Save(trained[0]), out, file_bytes=40_000)
    first = sorted(out.glob("*.safetensors"))[0]
    flip(first)
    with pytest.raises(UserError, match=f"{first.name} .* has not the digest in {SUMS_FILE}"):
        Weights(out, MODEL).digest()
    first.unlink()
    with pytest.raises(UserError, match=f"{first.name} .* cannot be read"):
        Weights(out, MODEL).read("embedding.weight", (MODEL.vocab, MODEL.dim), ())
    index = out / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(UserError, match="no plain file name"):
        Weights(out, MODEL)
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        Weights(tmp_path, MODEL)


def test_an_export_refuses_a_damaged_save_and_a_folder_that_is_there(trained, tmp_path, capsys):
    save = tmp_path / "save"
    shutil.copytree(trained[0], save)
    assert main([str(save), str(save)]) == 1
    assert "is there already" in capsys.readouterr().err
    flip(save / "__0_0.distcp")
    assert main([str(save), str(tmp_path / "out")]) == 1
    assert "__0_0.distcp: sha256" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.ranks
def test_two_ranks_start_from_weights_and_do_not_load_them_again(tmp_path, corpus_dir):
    """Each reads its shards; the first save after no step would hold them, so the last of one small step is near."""
    theirs(tmp_path / "base")
    spec = tiny_spec(
        model=SIZES, sequence_length=16, steps=1, learning_rate=1e-9, init_from=(tmp_path / "base").as_uri()
    )
    bucket = FolderBucket(tmp_path / "bucket")
    with started(tmp_path, corpus_dir, spec, 2, bucket=bucket) as ranks:
        assert ranks.finish() == [0, 0], ranks.log(0)
        assert ranks.saw("weights_loaded")
    saved, weights = whole_tensors(bucket.folder(bucket.committed[-1].save)), Weights(tmp_path / "base", MODEL)
    for name, parameter in Decoder(MODEL, 16).named_parameters():
        read = weights.read(name, tuple(parameter.shape), ())
        assert torch.allclose(saved[f"parameter.{name}"], read, rtol=0, atol=1e-7), name

    # Another job starts from that save, on other ranks in another mode. Weights only: its first step takes the same
    # samples, so its moments are those of the first job's only if they began as zeros again.
    name = bucket.committed[-1].save
    start = {"init_from": f"s3://bucket/teams/research/jobs/job-1/saves/{name}/", "parallel": "ddp"}
    second = tiny_spec(model=SIZES, sequence_length=16, steps=1, learning_rate=1e-9, **start)
    lent = FolderBucket(tmp_path / "second")
    with started(tmp_path, corpus_dir, second, 1, bucket=lent) as ranks:
        (ranks.run_dir(0) / "weights").symlink_to(bucket.folder(name))
        assert ranks.finish() == [0], ranks.log(0)
        assert ranks.saw("weights_loaded")
    again = whole_tensors(lent.folder(lent.committed[-1].save))
    for name, tensor in saved.items():
        assert torch.allclose(again[name], tensor, rtol=1e-3, atol=1e-7), name
    assert saved["moment1.embedding.weight"].abs().max() > 1e-5

    wider = tiny_spec(model={**SIZES, "ffn_dim": 128}, sequence_length=16, steps=1, **start)
    with started(tmp_path, corpus_dir, wider, 1) as ranks:
        (ranks.run_dir(0) / "weights").symlink_to(bucket.folder(bucket.committed[-1].save))
        assert ranks.finish() == [74]
        assert "holds another model; different: ffn_dim" in ranks.log(0)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 1
    path.write_bytes(raw)
