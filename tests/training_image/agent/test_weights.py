"""What a training that starts from weights in a bucket gets: files proved by SHA256SUMS, or the damaged one named."""

import hashlib
import json
from dataclasses import replace

import pytest

from agent.cloud import Bucket
from agent.journal import Journal
from agent.shards import place_of
from agent.weights import WeightFiles, address_of
from job_contract.checkpoint_layout import Manifest, SavedFile, seal
from job_contract.node_files import WEIGHTS_FOLDER
from job_contract.spec import DataSpec, LoraSpec, ModelSpec, TrainingSpec

URI = "s3://bucket/teams/research/llama"
FILES = {"config.json": b"{}", "model-1.safetensors": b"one" * 100, "model-2.safetensors": b"two" * 100}
MODEL = ModelSpec(dim=64, layers=1, heads=1, kv_heads=1, ffn_dim=64)
TRAINING = TrainingSpec(
    model=MODEL, data=DataSpec(corpus="stdlib"), steps=1, global_batch=1, sequence_length=8, learning_rate=0.1,
    warmup_steps=0, seed=1, init_from=URI,
)  # fmt: skip


def sums(files):
    return "".join(f"{hashlib.sha256(body).hexdigest()}  {name}\n" for name, body in files.items()).encode()


@pytest.fixture
def stored(s3):
    """The folder in the bucket, with a file that no trainer reads."""
    files = {**FILES, "README.md": b"hello"}
    s3.objects |= {f"teams/research/llama/{name}": body for name, body in files.items()}
    s3.objects["teams/research/llama/SHA256SUMS"] = sums(files)
    return s3


@pytest.fixture
def make(tmp_path, stored):
    def make(attempt=1, pinned=None, uri=URI):
        run_dir = tmp_path / f"run-{attempt}"
        run_dir.mkdir(exist_ok=True)
        return WeightFiles(
            uri, pinned, run_dir=run_dir, root=tmp_path, place=place_of(uri, Bucket(stored, "bucket")), downloads=2,
            journal=Journal(tmp_path / "events.jsonl"),
        )  # fmt: skip

    return make


def shown(tmp_path, attempt=1):
    folder = tmp_path / f"run-{attempt}" / WEIGHTS_FOLDER
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else None


def test_every_listed_file_is_there_before_a_rank_can_see_the_folder(make, tmp_path):
    make().round()
    assert shown(tmp_path) == {**FILES, "SHA256SUMS": sums({**FILES, "README.md": b"hello"})}


def test_a_survivor_brings_nothing_twice(make, stored, tmp_path):
    make().round()
    for name in FILES:
        stored.fail("get", name, "AccessDenied", 403, times=9)
    make(attempt=2).round()
    assert shown(tmp_path, 2) == shown(tmp_path, 1)


def test_a_file_of_other_bytes_is_named_and_no_folder_is_shown(make, stored, tmp_path):
    stored.objects["teams/research/llama/model-2.safetensors"] = b"twp" * 100
    files = make()
    files.round()
    assert files.damaged is not None and files.damaged.file == "model-2.safetensors"
    assert "SHA256SUMS says" in files.damaged.reason and shown(tmp_path) is None
    assert json.loads((tmp_path / "run-1" / "damaged-data.json").read_text())["file"] == "model-2.safetensors"


def test_another_list_than_the_accepted_one_is_named_even_where_every_file_agrees_with_it(make, stored, tmp_path):
    pinned = hashlib.sha256(stored.objects["teams/research/llama/SHA256SUMS"]).hexdigest()
    make(pinned=pinned).round()
    assert shown(tmp_path) is not None
    changed = {**FILES, "model-2.safetensors": b"new" * 100}
    stored.objects |= {f"teams/research/llama/{name}": body for name, body in changed.items()}
    stored.objects["teams/research/llama/SHA256SUMS"] = sums(changed)
    files = make(attempt=2, pinned=pinned)
    files.round()
    assert shown(tmp_path, 2) is None
    for words in ("when the job was accepted it was " + pinned[:12], "put the old ones back, or submit a new job"):
        assert words in files.damaged.reason
    make(attempt=3).round()
    assert shown(tmp_path, 3)["model-2.safetensors"] == b"new" * 100, "a spec of an older supervisor pins nothing"


SAVE = "step-00000025.a0001.s01"
OF_A_JOB = f"s3://bucket/teams/research/jobs/first-0123456789/saves/{SAVE}/"
BYTES = {".metadata": b"m" * 10, "__0_0.distcp": b"d" * 100}


@pytest.fixture
def committed(stored):
    """The save of another job, in the bucket; returns the digest of its manifest."""
    files = tuple(
        SavedFile(path=name, size_bytes=len(body), sha256=hashlib.sha256(body).hexdigest(), node_rank=0)
        for name, body in BYTES.items()
    )
    raw, digest = seal(
        Manifest(
            job="first-0123456789", attempt=1, step=25, save=SAVE, world_size=1, mesh=(1,), config_hash="c",
            corpus_digest="d", versions={}, facts={}, files=files,
        )
    )  # fmt: skip
    prefix = OF_A_JOB.removeprefix("s3://bucket/")
    stored.objects |= {f"{prefix}{name}": body for name, body in {**BYTES, "manifest.json": raw}.items()}
    return digest


def test_a_save_of_another_job_is_brought_and_proved_by_its_manifest(make, committed, stored, tmp_path):
    make(pinned=committed, uri=OF_A_JOB).round()
    assert set(shown(tmp_path)) == {*BYTES, "manifest.json"}
    stored.objects[f"{OF_A_JOB.removeprefix('s3://bucket/')}.metadata"] = b"n" * 10
    other = make(attempt=2, pinned="0" * 64, uri=OF_A_JOB)
    other.round()
    assert other.damaged.file == "manifest.json" and "committed was 000000000000" in other.damaged.reason
    (tmp_path / "weights").rename(tmp_path / "gone")
    fresh = make(attempt=3, pinned=committed, uri=OF_A_JOB)
    fresh.round()
    assert fresh.damaged.file == ".metadata" and "manifest.json says" in fresh.damaged.reason
    assert shown(tmp_path, 2) is shown(tmp_path, 3) is None


def test_a_bucket_that_does_not_answer_is_asked_again_and_not_blamed(make, stored, tmp_path):
    stored.fail("get", "model-1.safetensors", "SlowDown", 503)
    files = make()
    files.round()
    assert files.damaged is None and shown(tmp_path) is None
    files.round()
    assert shown(tmp_path) is not None


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (None, "there is no such file"),
        (b"nonsense\n", "not what sha256sum writes"),
        (sums({"config.json": b"{}"}), "it lists no safetensors file"),
        (sums({"../../etc/x.safetensors": b""}), "is not a plain file name"),
        (sums({**FILES, "model-3.safetensors": b"x"}), "there is no such file"),
    ],
)
def test_a_list_that_cannot_be_used_is_named_with_the_way_out(make, stored, listed, said):
    if listed is None:
        del stored.objects["teams/research/llama/SHA256SUMS"]
    else:
        stored.objects["teams/research/llama/SHA256SUMS"] = listed
    files = make()
    files.round()
    assert files.damaged is not None and said in files.damaged.reason


def test_a_folder_that_nodes_may_not_read_is_named_with_the_way_out(make, stored):
    stored.fail("get", "SHA256SUMS", "AccessDenied", 403)
    files = make()
    files.round()
    assert files.damaged is not None and "nodes may not read it" in files.damaged.reason


def test_weights_are_brought_at_the_first_start_and_under_adapters_only():
    assert address_of(TRAINING, None) == URI
    assert address_of(TRAINING, "a save") is None
    assert address_of(replace(TRAINING, lora=LoraSpec(rank=4, alpha=8.0, targets=("q_proj",))), "a save") == URI
    assert address_of(replace(TRAINING, init_from="file:///mnt/llama"), None) is None


def test_the_node_says_which_file_of_the_weights_was_damaged(start_node, play, stored):
    del stored.objects["teams/research/llama/SHA256SUMS"]
    spec, node = play.spec("needs-data"), start_node()
    spec = replace(spec, training=replace(spec.training, init_from=URI))
    node.orders.value = play.seen("run", 1, spec=spec)
    report = node.wait_for("failed")
    assert report.failure == "user_error"
    assert report.reason.startswith("init_from: SHA256SUMS: there is no such file")
