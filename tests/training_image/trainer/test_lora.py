"""Claims about training adapters alone: what is trained, what a save holds, what an export makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from holdfast.domain.estimate import trained_parameters
from holdfast.messages.job_request import PRESETS
from job_contract.checkpoint_layout import open_manifest
from job_contract.node_files import ControlKind
from job_contract.spec import JobSpec, LoraSpec
from tests.training_image.trainer.folder_agent import FolderBucket, started, tiny_spec
from tests.training_image.trainer.one_rank import alone, learner, losses
from tests.training_image.trainer.states import state_sha256, whole_tensors
from tests.training_image.trainer.test_llama_layout import SIZES, committed, theirs, tokens
from trainer.export import main
from trainer.llama import Weights, base_of_seed
from trainer.model import Decoder

pytestmark = pytest.mark.filterwarnings("ignore")

LORA = LoraSpec(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"))
SIZE = {"model": SIZES, "sequence_length": 16, "global_batch": 2, "learning_rate": 0.05}
# Large enough that adapters are a small part of it, as they are in real models.
WIDE = {"dim": 256, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 512}


def bytes_of(bucket: FolderBucket, spec: JobSpec) -> int:
    """Bytes of the files of the newest save, as its manifest lists them."""
    pointer = bucket.committed[-1]
    raw = (bucket.folder(pointer.save) / "manifest.json").read_bytes()
    return sum(file.size_bytes for file in open_manifest(raw, job=spec.job, pointer=pointer).files)


def test_only_adapters_are_trained_and_the_start_is_the_base():
    with alone() as ranks:
        plain = losses(learner(ranks, **SIZE), range(1))
        own = learner(ranks, **SIZE, lora=LORA)
        before = {name: one.full_tensor().clone() for name, one in own.frozen.items()}
        assert losses(own, range(3))[:1] == plain, "adapters that are zero change nothing"
        assert all(torch.equal(one.full_tensor(), before[name]) for name, one in own.frozen.items())
        assert all(float(one.full_tensor().abs().max()) > 0 for one in own.parameters.values())
        assert {name.rpartition(".")[2] for name in own.tensors()} == {"adapter_in", "adapter_out"}
        assert len(own.tensors()) == 3 * 2 * 2 * len(LORA.targets)


@pytest.mark.parametrize("preset", ["tiny", "1b", "70b"])
def test_the_estimate_counts_the_adapters_of_the_module(preset: str):
    every = LoraSpec(
        rank=16, alpha=16.0, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    )
    for lora in (LORA, every):
        with torch.device("meta"):
            net = Decoder(PRESETS[preset], 128, lora)
        trained = sum(one.numel() for one in net.parameters() if one.requires_grad)
        assert trained == trained_parameters(PRESETS[preset], lora)


@pytest.mark.ranks
def test_a_forced_save_of_adapters_is_under_a_tenth_and_resumes_bit_identical_on_its_base(tmp_path, corpus_dir):
    theirs(tmp_path / "base", hidden_size=256, intermediate_size=512, rope_theta=10_000.0)
    start = {"model": WIDE, "sequence_length": 16, "global_batch": 2, "init_from": (tmp_path / "base").as_uri()}
    spec = tiny_spec(**start, lora=LORA, steps=5, interval_steps=100)
    bucket = FolderBucket(tmp_path / "bucket")
    with started(tmp_path, corpus_dir, spec, 2, bucket=bucket) as ranks:
        ranks.until(lambda: ranks.saw("first_step"))
        ranks.order(ControlKind.CHECKPOINT)
        assert ranks.finish() == [0, 0], ranks.log(0)
        whole = ranks.losses()
    forced, last = bucket.committed
    parameters = sum(one.numel() for one in Decoder(spec.training.model, 16).parameters())
    assert bytes_of(FolderBucket(bucket.root, [forced]), spec) < 12 * parameters / 10

    resumed = FolderBucket(bucket.root, [forced])
    with started(tmp_path, corpus_dir, spec, 2, bucket=resumed, attempt=2, resume_from=forced) as ranks:
        assert ranks.finish() == [0, 0], ranks.log(0)
        assert ranks.losses() == {step: loss for step, loss in whole.items() if step > forced.step}
    assert state_sha256(bucket.folder(resumed.committed[-1].save)) == state_sha256(bucket.folder(last.save))

    weights = tmp_path / "base/model.safetensors.index.json"
    moved = sorted((tmp_path / "base").glob("*.safetensors"))[0]
    raw = bytearray(moved.read_bytes())
    raw[-1] ^= 1
    moved.write_bytes(raw)
    assert weights.exists()
    with started(tmp_path, corpus_dir, spec, 1, bucket=bucket, attempt=3, resume_from=forced) as ranks:
        assert ranks.finish() == [74], ranks.log(0)
        assert "holds adapters for another base" in ranks.log(0)


@pytest.mark.parametrize("from_files", [False, True])
def test_merged_adapters_give_the_logits_of_the_training(tmp_path, from_files: bool, capsys):
    spec = tiny_spec(**SIZE, lora=LORA)
    base = tmp_path / "base"
    with alone() as ranks:
        own = learner(ranks, **SIZE, lora=LORA)
        digest = base_of_seed(own.config.fixed)
        if from_files:
            theirs(base)
            weights = Weights(base, spec.training.model)
            own.start_from(weights)
            digest = weights.digest()
        losses(own, range(3))
        (tmp_path / "save").mkdir()
        committed(tmp_path / "save", own.tensors(), spec, base_sha256=digest)
        with torch.no_grad():
            logits = own.net.eval()(tokens())
    from_base = ["--base", str(base)] if from_files else []
    assert main([str(tmp_path / "save"), str(tmp_path / "out"), *from_base]) == 0
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.allclose(read(tokens()).logits, logits, rtol=0, atol=1e-5)
    wrong_base = [] if from_files else ["--base", str(tmp_path / "out")]
    assert main([str(tmp_path / "save"), str(tmp_path / "again"), *wrong_base]) == 1
    assert "belong to a base with the digest" in capsys.readouterr().err


def test_adapters_alone_are_written_under_the_names_of_peft(tmp_path):
    spec = tiny_spec(**SIZE, lora=LORA)
    save = Path(tmp_path / "save")
    save.mkdir()
    with alone() as ranks:
        own = learner(ranks, **SIZE, lora=LORA)
        losses(own, range(1))
        committed(save, own.tensors(), spec, base_sha256="b")
    assert main([str(save), str(tmp_path / "out"), "--adapters"]) == 0
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    assert torch.equal(written[name], whole_tensors(save)["parameter.blocks.1.feed_forward.output.adapter_out"])
    assert len(written) == 2 * 2 * len(LORA.targets)
