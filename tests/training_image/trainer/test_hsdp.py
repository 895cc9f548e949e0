"""Claims about HSDP: two nodes of two ranks, a replica a node, sharded inside."""

from __future__ import annotations

import pytest

from job_contract.checkpoint_layout import open_manifest
from job_contract.node_files import ControlKind
from tests.training_image.trainer.folder_agent import FolderBucket, started, tiny_spec
from tests.training_image.trainer.states import state_sha256
from trainer.config import config_of

STEPS = 6


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_doomed_replica_writes_nothing_and_the_save_resumes_bit_identical(tmp_path, corpus_dir):
    spec = tiny_spec(parallel="hsdp", ranks_per_node=2, steps=STEPS, interval_steps=100, sequence_length=32)
    bucket = FolderBucket(tmp_path / "bucket")
    with started(tmp_path, corpus_dir, spec, 4, bucket=bucket) as ranks:
        ranks.until(lambda: ranks.saw("first_step"))
        ranks.order(ControlKind.CHECKPOINT, doomed=(1,))
        assert set(ranks.finish()) == {0}, ranks.log(0)
        whole = ranks.losses()
        assert "hsdp on a mesh of 2 x 2" in ranks.log(0)
    forced, last = bucket.committed
    raw = (bucket.folder(forced.save) / "manifest.json").read_bytes()
    manifest = open_manifest(raw, job=spec.job, pointer=forced)
    assert 0 < forced.step < STEPS
    assert manifest.mesh == (2, 2)
    assert {file.path for file in manifest.files} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    shares = {path.name for path in bucket.folder(last.save).glob("*.distcp")}
    assert shares == {f"__{rank}_0.distcp" for rank in range(4)}, (
        "replicas share the work of a save nobody is doomed in"
    )

    resumed = FolderBucket(bucket.root, [forced])
    with started(tmp_path, corpus_dir, spec, 4, bucket=resumed, attempt=2, resume_from=forced) as ranks:
        assert set(ranks.finish()) == {0}, ranks.log(0)
        assert ranks.losses() == {step: loss for step, loss in whole.items() if step > forced.step}
    assert state_sha256(bucket.folder(resumed.committed[-1].save)) == state_sha256(bucket.folder(last.save))


@pytest.mark.parametrize(
    ("parallel", "ranks_per_node", "world_size", "mesh"),
    [
        ("hsdp", 2, 4, (2, 2)),
        ("hsdp", 8, 32, (4, 8)),
        ("hsdp", 1, 3, (3, 1)),
        ("hsdp", 8, 8, (8,)),
        ("hsdp", 2, 3, (3,)),
        ("fsdp", 2, 4, (4,)),
        ("ddp", 2, 4, (4,)),
    ],
)
def test_a_replica_is_a_node(parallel: str, ranks_per_node: int, world_size: int, mesh: tuple[int, ...]):
    config = config_of(tiny_spec(parallel=parallel, ranks_per_node=ranks_per_node))
    assert config.mesh(world_size) == mesh
