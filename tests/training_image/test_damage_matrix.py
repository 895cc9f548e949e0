"""Every file of a save, damaged in every way: found, named, and fallen back from; no code in a save is ever run.

Two saves of two nodes are made once. Each case damages the newer one in the bucket and brings the job back with the
agent's fetch and the trainer's restore; `verify` has to name the same file.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from moto import mock_aws
from torch import distributed as dist

import agent.fetch
import trainer.restore
from agent.cloud import Bucket
from agent.commit import Committed, Committer
from agent.fetch import Fetch
from agent.journal import Journal
from agent.ranks import Seats
from agent.saves import Saved, SaveFailed, Saves, local_save
from agent.settings import Pace
from holdfast.adapters.checkpoints_s3 import S3Checkpoints
from holdfast.domain.errors import IllegalTransition
from holdfast.domain.job import Job
from job_contract.checkpoint_layout import (
    Head,
    Manifest,
    SavePointer,
    file_key,
    head_key,
    job_prefix,
    part_file,
    save_name,
    seal,
)
from job_contract.node_files import Control, JobFile, RankSave, write_message
from job_contract.verification import verify
from job_contract.version import canonical_json, decode
from tests import builders as b
from tests.training_image.trainer.folder_agent import tiny_spec
from trainer.checkpoint import SavePlanner, SaveWriter, versions
from trainer.config import config_of
from trainer.control import ControlFile
from trainer.endings import BadCheckpoint
from trainer.metrics import Journal as RankJournal
from trainer.parallel import Ranks
from trainer.restore import Restore, Restored

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB = "demo-0123456789"
PREFIX = job_prefix("research", JOB)
SPEC = replace(tiny_spec(), job=JOB, prefix=PREFIX)
CONFIG = config_of(SPEC)
SHARDS = ("__0_0.distcp", "__1_0.distcp")
NODES = 2
PACE = Pace(parts_s=0.01, save_grace_s=5.0)


class RunsCode:
    """Leaves a folder behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return (os.mkdir, (str(self.trace),))


def state(value: float) -> dict[str, torch.Tensor]:
    """Return eight tensors of one size, four of them on each rank, so that the two shards are equally long."""
    return {f"parameter.{n}": torch.full((32, 64), value + n) for n in range(8)}


@dataclass
class Vault:
    """A bucket with committed saves; `saves[0]` is the older of the two good ones, `saves[1]` the newer."""

    root: Path
    s3: Any
    ranks: Ranks
    saves: list[Committed]
    runs: int = 0
    touched: dict[str, bytes] = field(default_factory=dict)

    def key(self, file: str, save: str | None = None) -> str:
        return head_key(PREFIX) if file == "head.json" else file_key(PREFIX, save or self.newer.manifest.save, file)

    def read(self, file: str, save: str | None = None) -> bytes:
        return self.s3.get_object(Bucket="bucket", Key=self.key(file, save))["Body"].read()

    def put(self, file: str, body: bytes | None, save: str | None = None) -> None:
        self.touched.setdefault(self.key(file, save), self.read(file, save))
        if body is None:
            self.s3.delete_object(Bucket="bucket", Key=self.key(file, save))
        else:
            self.s3.put_object(Bucket="bucket", Key=self.key(file, save), Body=body)

    @property
    def older(self) -> Committed:
        return self.saves[0]

    @property
    def newer(self) -> Committed:
        return self.saves[1]

    def folder(self) -> Path:
        self.runs += 1
        return self.root / f"run-{self.runs}"

    def chunks(self, path: str, save: str | None = None) -> list[bytes] | None:
        try:
            return [self.read(path, save)]
        except self.s3.exceptions.NoSuchKey:
            return None

    def verified(self, save: Committed | None = None, pointer: SavePointer | None = None) -> set[str]:
        """Return the files that `verify` names."""
        save = save or self.newer
        name = save.manifest.save
        files = type("Files", (), {"chunks": lambda _, path: self.chunks(path, name)})()
        damages = verify(
            files, job=JOB, save=name, pointer=pointer or save.pointer, head=b"".join(self.chunks("head.json") or [b""])
        )
        assert all(damage.reason for damage in damages)
        return {damage.file for damage in damages}

    def restored(
        self, pointer: SavePointer | None = None, parent: SavePointer | None = None
    ) -> tuple[Restored, dict[str, torch.Tensor]]:
        """Return what a job that is sent to `pointer` restores, and the state that it then has."""
        run_dir = self.folder()
        run_dir.mkdir()
        job = JobFile(
            job=JOB,
            attempt=2,
            spec=SPEC,
            node_rank=0,
            nodes=1,
            agent_pid=0,
            corpus_dir="",
            roster_id="r",
            resume_from=pointer or self.newer.pointer,
            resume_parent=parent or self.newer.manifest.parent,
        )
        fetch = Fetch(
            [0],
            job=JOB,
            prefix=PREFIX,
            run_dir=run_dir,
            local=(),
            bucket=Bucket(self.s3, "bucket"),
            downloads=2,
            journal=Journal(run_dir / "agent.jsonl"),
        )
        control = ControlFile(run_dir, 2, RankJournal(run_dir, 0, 2))
        tensors = state(-1.0)
        fetch.loop.start()
        try:
            return Restore(run_dir, job, CONFIG, "corpus", self.ranks, control).into(tensors), tensors
        finally:
            fetch.loop.close(wait_s=5.0)


def written(root: Path, step: int, number: int, states: list[dict[str, Any]]) -> Path:
    """Return the folder of a save whose ranks hold `states`, as DCP's own steps write it; the ranks take turns."""
    name = save_name(step, 1, number)
    folder = root / "saves" / name
    writer = SaveWriter(folder)
    writer.reset()
    planners = [SavePlanner(frozenset()) for _ in states]
    plans = []
    for rank, (planner, tensors) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(tensors, is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for planner, plan in zip(planners, plans, strict=True)
    ]
    writer.finish(metadata, results)
    for rank in range(len(states)):
        own = sorted(path.name for path in folder.glob(f"__{rank}_*"))
        share = RankSave(
            rank=rank,
            save=name,
            step=step,
            world_size=NODES,
            mesh=(NODES,),
            config_hash=CONFIG.hash,
            corpus_digest="corpus",
            versions=versions(),
            facts={"step": step, "last_loss": 1.0},
            files=(*own, *[".metadata"] * (rank == 0)),
        )
        write_message(folder / f"rank-{rank}.json", share)
    return folder


def node_saves(s3: Any, root: Path, node_rank: int, pace: Pace = PACE) -> Saves:
    """Return what uploads and commits a save on one of the two nodes."""
    journal = Journal(root / f"agent-{node_rank}.jsonl")
    bucket = Bucket(s3, "bucket")
    return Saves(
        Seats(
            job=JOB,
            attempt=1,
            node_rank=node_rank,
            nodes=NODES,
            ranks_per_node=1,
            leader_ip="",
            leader_port=0,
            interface="lo",
        ),
        roster_id="roster-1",
        prefix=PREFIX,
        run_dir=root,
        bucket=bucket,
        committer=Committer(bucket, prefix=PREFIX, job=JOB, attempt=1, journal=journal),
        control=lambda: Control(attempt=1, generation=0),
        pace=pace,
        journal=journal,
    )


def committed(s3: Any, root: Path, folder: Path) -> Committed:
    with ThreadPoolExecutor(NODES) as pool:
        nodes = [node_saves(s3, root, rank) for rank in range(NODES)]
        results = list(pool.map(lambda rank: nodes[rank].settle(local_save(folder, [rank])), range(NODES)))
    assert all(isinstance(result, Saved) for result in results), results
    return results[0].committed


@pytest.fixture(scope="module")
def vault(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vault]:
    root = tmp_path_factory.mktemp("matrix")
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=0, world_size=1)
    patched = pytest.MonkeyPatch()
    patched.setattr(agent.fetch, "LOOK_S", 0.002)
    patched.setattr(trainer.restore, "POLL_S", 0.002)
    ranks = Ranks(0, 1, torch.device("cpu"), dist.new_group(backend="gloo"), dist.new_group(backend="gloo"))
    with mock_aws():
        s3 = boto3.client("s3", region_name="us-east-1", aws_access_key_id="t", aws_secret_access_key="t")
        s3.create_bucket(Bucket="bucket")
        S3Checkpoints(s3, bucket="bucket").take_over(PREFIX, b.a_job(), 1)
        saves = []
        for number, value in ((1, 100.0), (2, 200.0)):
            named = list(state(value).items())
            folder = written(root, 10 * number, number, [dict(named[:4]), dict(named[4:])])
            saves.append(committed(s3, root, folder))
        yield Vault(root, s3, ranks, saves)
    patched.undo()
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _whole_again(vault: Vault) -> Iterator[None]:
    """What a case damages is as before afterwards."""
    vault.put("head.json", vault.read("head.json"))
    yield
    for key, body in vault.touched.items():
        vault.s3.put_object(Bucket="bucket", Key=key, Body=body)
    vault.touched.clear()


def flipped(raw: bytes) -> bytes:
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]


def zeroed(raw: bytes) -> bytes:
    """A page of 4 KiB is zero; of a smaller file its second half."""
    at = 4096 if len(raw) > 8192 else len(raw) // 2
    return raw[:at] + bytes(min(4096, len(raw) - at)) + raw[at + 4096 :]


SIBLING = {
    **dict(zip(SHARDS, reversed(SHARDS), strict=True)),
    ".metadata": SHARDS[0],
    "manifest.json": SHARDS[0],
    "head.json": "manifest.json",
    part_file(0): part_file(1),
    part_file(1): part_file(0),
}
DAMAGES: dict[str, Callable[[Vault, str], bytes | None]] = {
    "flip": lambda vault, file: flipped(vault.read(file)),
    "zero page": lambda vault, file: zeroed(vault.read(file)),
    "truncate": lambda vault, file: vault.read(file)[:-1],
    "extend": lambda vault, file: vault.read(file) + b"\n",
    "missing": lambda vault, file: None,
    "empty": lambda vault, file: b"",
    # Of equal size: a sibling that is longer is cut, one that is shorter is repeated.
    "sibling": lambda vault, file: (vault.read(SIBLING[file]) * 100)[: len(vault.read(file))],
    "older": lambda vault, file: vault.read(file, vault.older.manifest.save),
}
RESTORED_FILES = (*SHARDS, ".metadata", "manifest.json")


def falls_back(vault: Vault, file: str, pointer: SavePointer | None = None) -> None:
    """The newer save is passed over because of `file`, and the older one's state is there whole."""
    restored, tensors = vault.restored(pointer)
    assert restored.pointer == vault.older.pointer
    assert {(item.save, item.file) for item in restored.fell_back} == {(vault.newer.manifest.save, file)}
    assert all(item.reason for item in restored.fell_back)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state(100.0).items())


def test_undamaged_saves_are_verified_and_the_newer_one_is_restored(vault: Vault) -> None:
    assert (vault.verified(), vault.verified(vault.older)) == (set(), set())
    restored, tensors = vault.restored()
    assert (restored.pointer, restored.fell_back) == (vault.newer.pointer, ())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state(200.0).items())
    assert len({len(vault.read(shard)) for shard in SHARDS}) == 1, "the swap needs shards of equal size"


@pytest.mark.parametrize("file", RESTORED_FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_parent_is_restored(vault: Vault, file: str, damage: str) -> None:
    body = DAMAGES[damage](vault, file)
    if damage == "older" and body == vault.read(file):
        # `.metadata` tells where tensors lie, not what they are, so two saves of one layout may share it.
        assert file == ".metadata"
        body = flipped(vault.read(file, vault.older.manifest.save))
    assert body != vault.read(file)
    vault.put(file, body)
    assert vault.verified() == {file}
    falls_back(vault, file)


@pytest.mark.parametrize("node_rank", range(NODES))
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_of_a_committed_save_is_named_and_the_save_still_serves(
    vault: Vault, node_rank: int, damage: str
) -> None:
    file = part_file(node_rank)
    vault.put(file, DAMAGES[damage](vault, file))
    assert vault.verified() == {file}
    assert vault.restored()[0].pointer == vault.newer.pointer


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_part_damaged_before_the_commit_ends_the_save_and_is_named(vault: Vault, damage: str) -> None:
    file, name = part_file(1), vault.newer.manifest.save
    vault.put("manifest.json", None)
    vault.put(file, DAMAGES[damage](vault, file))
    node = node_saves(vault.s3, vault.root, 0, replace(PACE, save_grace_s=0.05))
    result = node.settle(local_save(vault.root / "saves" / name, [0]))
    assert isinstance(result, SaveFailed)
    assert (file in result.reason) == (damage != "missing") and "part" in result.reason
    assert vault.chunks("manifest.json") is None


MANIFEST_EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "job": lambda body: body.update(job="another-job"),
    "attempt": lambda body: body.update(attempt=2),
    "step": lambda body: body.update(step=21),
    "save": lambda body: body.update(save=save_name(20, 1, 9)),
    "world_size": lambda body: body.update(world_size=4),
    "config_hash": lambda body: body.update(config_hash="0"),
    "facts": lambda body: body["facts"].update(step=19),
    "parent": lambda body: body.pop("parent"),
    "files.sha256": lambda body: body["files"][0].update(sha256="0" * 64),
    "files.size_bytes": lambda body: body["files"][0].update(size_bytes=1),
    "files.path": lambda body: body["files"][0].update(path="../../../head.json"),
    "files": lambda body: body["files"].pop(),
    "not a number": lambda body: body["facts"].update(last_loss=float("nan")),
}


@pytest.mark.parametrize("sealed", [False, True], ids=["as it was sealed", "sealed anew"])
@pytest.mark.parametrize("field", MANIFEST_EDITS)
def test_an_edited_manifest_is_named_and_the_parent_is_restored(vault: Vault, field: str, sealed: bool) -> None:
    body = json.loads(vault.read("manifest.json"))
    MANIFEST_EDITS[field](body)
    if field == "not a number":
        raw = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    else:
        raw = seal(replace(decode(Manifest, body), sha256=None))[0] if sealed else canonical_json(body)
    vault.put("manifest.json", raw)
    assert vault.verified() == {"manifest.json"}
    falls_back(vault, "manifest.json")


def row(vault: Vault) -> Job:
    """Return the job as it stands once the newer save has been reported."""
    job = b.a_running_job()
    newest, parent = vault.newer, vault.newer.manifest.parent
    return b.after(job, replace(b.saved(20), pointer=newest.pointer, parent=parent))


def taken_over(vault: Vault) -> Head:
    return S3Checkpoints(vault.s3, bucket="bucket").take_over(PREFIX, row(vault), 2)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_head_is_named_and_written_anew_from_the_row(vault: Vault, damage: str) -> None:
    older = Head(
        job=JOB,
        attempt=1,
        step=10,
        save=vault.older.manifest.save,
        manifest_sha256=vault.older.sha256,
    )
    vault.put("head.json", seal(older)[0] if damage == "older" else DAMAGES[damage](vault, "head.json"))
    if damage != "older":
        # An older head is whole in itself: only the row knows that it is not the newest.
        assert vault.verified() == {"head.json"}
    head = taken_over(vault)
    assert (head.pointer, head.parent, head.attempt) == (vault.newer.pointer, vault.older.pointer, 2)
    assert vault.verified() == set()


HEAD_EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "job": lambda body: body.update(job="another-job"),
    "attempt": lambda body: body.update(attempt=0),
    "branch": lambda body: body.update(branch=1),
    "step": lambda body: body.update(step=21),
    "save": lambda body: body.update(save=save_name(10, 1, 1)),
    "no save": lambda body: (body.pop("save"), body.update(step=0)),
    "manifest_sha256": lambda body: body.update(manifest_sha256="0" * 64),
    "parent": lambda body: body.pop("parent"),
}


@pytest.mark.parametrize("sealed", [False, True], ids=["as it was sealed", "sealed anew"])
@pytest.mark.parametrize("field", HEAD_EDITS)
def test_an_edited_head_is_written_anew_from_the_row(vault: Vault, field: str, sealed: bool) -> None:
    body = json.loads(vault.read("head.json"))
    HEAD_EDITS[field](body)
    vault.put("head.json", seal(replace(decode(Head, body), sha256=None))[0] if sealed else canonical_json(body))
    head = taken_over(vault)
    assert (head.pointer, head.parent, head.branch) == (vault.newer.pointer, vault.older.pointer, 0)


def test_a_head_of_a_later_attempt_stops_the_older_one(vault: Vault) -> None:
    body = json.loads(vault.read("head.json")) | {"attempt": 3}
    vault.put("head.json", seal(replace(decode(Head, body), sha256=None))[0])
    with pytest.raises(IllegalTransition, match="past 2"):
        taken_over(vault)


def test_a_head_that_names_a_save_which_never_was_leads_to_its_parent(vault: Vault) -> None:
    never = SavePointer(save=save_name(99, 1, 9), manifest_sha256="0" * 64)
    restored, _ = vault.restored(never, vault.newer.pointer)
    assert restored.pointer == vault.newer.pointer
    assert {(item.save, item.file) for item in restored.fell_back} == {(never.save, "manifest.json")}


def test_a_good_save_of_another_job_under_this_jobs_key_is_not_taken(vault: Vault) -> None:
    foreign, digest = seal(replace(vault.newer.manifest, job="another-job", sha256=None))
    vault.put("manifest.json", foreign)
    pointer = SavePointer(save=vault.newer.manifest.save, manifest_sha256=digest)
    assert vault.verified(pointer=pointer) == {"manifest.json"}
    falls_back(vault, "manifest.json", pointer)


def test_a_save_without_an_undamaged_ancestor_is_given_up_by_name(vault: Vault) -> None:
    for save in vault.saves:
        vault.put(SHARDS[0], b"", save.manifest.save)
    with pytest.raises(BadCheckpoint) as given_up:
        vault.restored()
    for save in vault.saves:
        assert f"{save.manifest.save}/{SHARDS[0]}: 0 bytes" in str(given_up.value)


@pytest.mark.parametrize(("number", "evil"), [(3, "an item of bytes"), (4, "a foreign class")])
def test_a_committed_save_with_code_in_it_is_passed_over_and_the_code_does_not_run(
    vault: Vault, tmp_path: Path, number: int, evil: str
) -> None:
    trace = tmp_path / "trace"
    named = list(state(300.0).items())
    first: dict[str, Any] = dict(named[:4])
    if evil == "an item of bytes":
        first["extra"] = RunsCode(trace)
    folder = written(vault.folder(), 30, number, [first, dict(named[4:])])
    if evil == "a foreign class":
        (folder / ".metadata").write_bytes(pickle.dumps(RunsCode(trace)))
    save = committed(vault.s3, folder.parents[1], folder)
    assert vault.verified(save) == set(), "its bytes are the committed ones: only the reader can refuse them"
    restored, tensors = vault.restored(save.pointer, save.manifest.parent)
    assert restored.pointer == vault.newer.pointer
    assert {(item.save, item.file) for item in restored.fell_back} == {(save.manifest.save, ".metadata")}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in state(200.0).items())
    assert not trace.exists()
