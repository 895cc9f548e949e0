"""Would this save really come back? `python -m trainer.rehearse FOLDER`, FOLDER a copy of a save's folder.

Every file is proved first. Then the state is read from the shards here, and restored by a fresh process into a model
made from the config that the save carries; the digests over all parameters and moments must be equal. Both need the
whole state in memory, once each.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from job_contract.checkpoint_layout import MANIFEST_FILE, Manifest, read_manifest
from job_contract.spec import CheckpointSpec, JobSpec, TrainingSpec
from job_contract.verification import Folder, verify
from job_contract.version import ContractError, build
from trainer.checkpoint import METADATA_FILE, LoadPlanner, Refused, VerifiedReader, read_metadata
from trainer.config import config_of
from trainer.endings import Ending
from trainer.parallel import Learner, join

CHILD = "--restored"
EXIT_WRONG, EXIT_USAGE = 1, 2


def state_sha256(tensors: dict[str, Tensor]) -> str:
    """Return one digest over names and bytes of all tensors, equal for every way of sharding them."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(name.encode())
        digest.update(whole.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of the save, unsharded. Raises Refused."""
    metadata = read_metadata(folder / METADATA_FILE)
    tensors = {
        name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in metadata.state_dict_metadata.items()
    }
    dcp.load(tensors, storage_reader=VerifiedReader(folder, metadata), planner=LoadPlanner(), no_dist=True)
    return tensors


def restored_sha256(folder: Path) -> str:
    """Return the digest of a model and optimizer made anew and restored from the save, as one rank of a resume does."""
    manifest = read_manifest((folder / MANIFEST_FILE).read_bytes())
    ranks = join()
    learner = Learner(config_of(_spec(manifest)), ranks)
    tensors = learner.tensors()
    reader = VerifiedReader(folder, read_metadata(folder / METADATA_FILE))
    dcp.load(tensors, storage_reader=reader, planner=LoadPlanner(), process_group=ranks.saves)
    digest = state_sha256(learner.tensors())
    dist.destroy_process_group()
    return digest


def _spec(manifest: Manifest) -> JobSpec:
    training = build(TrainingSpec, manifest.facts.get("config", {}))
    return JobSpec(
        job=manifest.job, team="", spec_id="", prefix="", training=training, checkpoint=CheckpointSpec(interval_steps=1)
    )


def rehearse(folder: Path) -> list[str]:
    """Return what is wrong with the save, nothing when it comes back whole. Raises ContractError, Refused, OSError."""
    manifest = read_manifest((folder / MANIFEST_FILE).read_bytes())
    if damages := verify(Folder(folder), job=manifest.job, save=manifest.save):
        return [f"{damage.file}: {damage.reason}" for damage in damages]
    expected = state_sha256(read_whole(folder))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    child = subprocess.run(
        [sys.executable, "-m", "trainer.rehearse", CHILD, str(folder)],
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        return [f"a fresh process cannot restore it: {child.stderr.strip()[-2000:]}"]
    found = child.stdout.split()[-1]
    if found != expected:
        return [f"restored state has sha256 {found[:12]}, the shards hold {expected[:12]}"]
    print(f"{manifest.save}: comes back whole, sha256 of all parameters and moments {expected}")
    return []


def main(arguments: list[str]) -> int:
    """Return 0 when the save comes back, 1 with the reason when not."""
    if arguments[:1] == [CHILD]:
        print(restored_sha256(Path(arguments[1])))
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m trainer.rehearse FOLDER   (a copy of a save's folder)", file=sys.stderr)
        return EXIT_USAGE
    try:
        wrong = rehearse(Path(arguments[0]))
    except (ContractError, Refused, Ending, OSError) as error:
        wrong = [str(error)]
    for reason in wrong:
        print(f"{arguments[0]}: {reason}", file=sys.stderr)
    return EXIT_WRONG if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
