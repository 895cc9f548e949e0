"""The frozen messages of contract version 1: what every release of version 1 may send, and must understand."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from job_contract import checkpoint_layout as layout
from job_contract import node_files, orders, reports
from job_contract.checkpoint_layout import Head, Manifest, Part, SavedFile, SavePointer
from job_contract.reports import decode_report, encode_report
from job_contract.spec import (
    CheckpointSpec,
    DataSpec,
    EvaluationSpec,
    ImageSpec,
    JobSpec,
    LoraSpec,
    ModelSpec,
    TrainingSpec,
)
from job_contract.version import CONTRACT_VERSION, ContractError, UnknownVersion, canonical_json, decode, encode

GOLDEN = Path(__file__).parents[2] / "events/contract/v1"

JOB = "tiny-llama-fcea9e2ede"
PREFIX = f"teams/research/jobs/{JOB}"
NODE_0, NODE_1 = "i-0a1b2c3d4e5f60001", "i-0a1b2c3d4e5f60002"
AT = 1796058005.25
SAVE_25, SAVE_50 = "step-00000025.a0001.s01", "step-00000050.a0002.s01"
DIGEST_25, DIGEST_50 = "25" * 32, "50" * 32
POINTER_25 = SavePointer(save=SAVE_25, manifest_sha256=DIGEST_25)
POINTER_50 = SavePointer(save=SAVE_50, manifest_sha256=DIGEST_50)
VERSIONS = {"python": "3.11.9", "torch": "2.13.0"}
FACTS = {"sample_index": 400, "schedule": {"warmup_steps": 10}, "seed": 1234}
DAMAGED = reports.FellBack(save=SAVE_50, file="__0_0.distcp", reason="sha256 differs")
FILES = (
    SavedFile(path="__0_0.distcp", size_bytes=4096, sha256="ab" * 32, node_rank=0),
    SavedFile(path=".metadata", size_bytes=512, sha256="cd" * 32, node_rank=0),
)
SPEC = JobSpec(
    job=JOB,
    team="research",
    spec_id="e36f1012d70cb261",
    prefix=PREFIX,
    training=TrainingSpec(
        model=ModelSpec(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=128),
        data=DataSpec(corpus="stdlib"),
        steps=120,
        global_batch=16,
        sequence_length=128,
        learning_rate=0.001,
        warmup_steps=10,
        seed=1234,
    ),
    checkpoint=CheckpointSpec(interval_steps=25),
    report_s=2.0,
)
OWN_IMAGE_SPEC = JobSpec(
    job=JOB,
    team="research",
    spec_id="67b3f673aaeacd62",
    prefix=PREFIX,
    training=TrainingSpec(
        model=ModelSpec(dim=768, layers=12, heads=12, kv_heads=4, ffn_dim=2048, vocab=32000, dropout=0.1),
        data=DataSpec(uri="s3://corpora/web/index.json"),
        steps=5000,
        global_batch=64,
        sequence_length=2048,
        learning_rate=0.0003,
        parallel="ddp",
        precision="bf16",
        micro_batch=4,
        init_from=f"s3://checkpoints/{PREFIX}/saves/{SAVE_25}/",
    ),
    checkpoint=CheckpointSpec(interval_s=900.0, keep=5),
    ranks_per_node=8,
    image=ImageSpec(uri="registry.example/train:1", command=("python", "-m", "mine")),
)
ENVIRONMENT_SPEC = replace(
    SPEC,
    spec_id="a24953e17438f672",
    environment={"WANDB_PROJECT": "tiny", "GREETING": "$(touch PWNED); é"},
    secrets={
        "WANDB_API_KEY": "secretsmanager:arn:aws:secretsmanager:us-east-1:111122223333:secret:wandb-AbCdEf",
        "HF_TOKEN": "ssm:/research/hf-token",
    },
)
ORDER = {"job": JOB, "attempt": 2, "spec_id": SPEC.spec_id, "issued_at": AT}
REPORT = {"job": JOB, "attempt": 2, "instance": NODE_0, "at": AT}
SAVED = {
    "step": 50,
    "save": SAVE_50,
    "world_size": 2,
    "mesh": (2,),
    "config_hash": "c0ffee",
    "corpus_digest": "c0de",
    "versions": VERSIONS,
    "facts": FACTS,
}
OPTIONS_SPEC = replace(
    SPEC,
    spec_id="707f733980d6fe76",
    training=replace(
        SPEC.training,
        parallel="hsdp",
        init_from="file:///mnt/llama-7b",
        activation_checkpointing="selective",
        compile=True,
        prefetch=1,
        reshard_after_forward=False,
        lora=LoraSpec(rank=8, alpha=16.0, targets=("q_proj", "v_proj")),
    ),
)

DATASET_SPEC = replace(
    SPEC,
    spec_id="d41c0a5e7b9f2c38",
    training=replace(
        SPEC.training,
        data=DataSpec(uri="s3://corpora/web/v3", index_sha256="1d" * 32, dataset="web@3"),
        evaluation=EvaluationSpec(
            data=DataSpec(uri="file:///mnt/held-out", index_sha256="e0" * 32), every_steps=50, batches=4
        ),
    ),
)
MESSAGES: dict[str, Any] = {
    "spec": SPEC,
    "spec-own-image": OWN_IMAGE_SPEC,
    "spec-dataset": DATASET_SPEC,
    "spec-environment": ENVIRONMENT_SPEC,
    "spec-options": OPTIONS_SPEC,
    "orders-wait": orders.Orders(**ORDER, generation=3, action=orders.Action.WAIT),
    "orders-run": orders.Orders(
        **ORDER,
        generation=4,
        action=orders.Action.RUN,
        roster_id="a2",
        resume_from=orders.ResumeFrom(save=SAVE_50, manifest_sha256=DIGEST_50, parent=POINTER_25),
    ),
    "orders-checkpoint": orders.Orders(
        **ORDER, generation=5, action=orders.Action.CHECKPOINT, roster_id="a2", reason="asked for"
    ),
    "orders-checkpoint-stop": orders.Orders(
        **ORDER,
        generation=6,
        action=orders.Action.CHECKPOINT_STOP,
        roster_id="a2",
        deadline_at=AT + 120,
        doomed=(NODE_1,),
        reason="spot interruption",
    ),
    "orders-stop": orders.Orders(**ORDER, generation=7, action=orders.Action.STOP, reason="a member is gone"),
    "orders-release": orders.Orders(**ORDER, generation=8, action=orders.Action.RELEASE),
    "roster": orders.Roster(
        job=JOB,
        attempt=2,
        roster_id="a2",
        nodes=(
            orders.RosterNode(node_rank=0, instance=NODE_0, ip="10.0.1.10"),
            orders.RosterNode(node_rank=1, instance=NODE_1, ip="10.0.1.11"),
        ),
        leader=orders.Leader(ip="10.0.1.10", port=29500),
    ),
    "wait-ready": orders.WaitItem(job=JOB, attempt=2, wait=orders.Wait.READY, token="token-1"),
    "wait-training": orders.WaitItem(job=JOB, attempt=2, wait=orders.Wait.TRAINING, token="token-2"),
    "wait-checkpoint": orders.WaitItem(job=JOB, attempt=2, wait=orders.Wait.CHECKPOINT, token="token-3"),
    "report-ready": reports.Ready(
        **REPORT, ip="10.0.1.10", port=29500, interface="eth0", instance_type="c7i.large", zone="us-east-1a"
    ),
    "report-ready-gpu": reports.Ready(
        **REPORT,
        ip="10.0.1.10",
        port=29500,
        interface="ens32",
        instance_type="p5.48xlarge",
        zone="us-east-1a",
        gpus=8,
        efa_devices=32,
        clock_offset_s=0.25,
        driver="580.95.05",
        placement_group="holdfast-tiny-llama-fcea9e2ede-us-east-1a",
        bandwidth_gbps=3200.0,
        host="gpu-5e1f0c",
    ),
    "report-network-checked-efa": reports.NetworkChecked(**REPORT, provider="efa", seconds=4.5, bandwidth_gbps=2400.0),
    "report-network-checked": reports.NetworkChecked(**REPORT, provider="gloo", seconds=0.5),
    "report-started": reports.Started(**REPORT, step=51, world_size=2, restored=SAVE_50),
    "report-started-fell-back": reports.Started(
        **REPORT, step=26, world_size=2, restored=SAVE_25, fell_back=(DAMAGED,)
    ),
    "report-heard": reports.Heard(**REPORT, generation=6, action="checkpoint_stop"),
    "report-progress": reports.Progress(**REPORT, step=60, loss=2.5, tokens_per_s=40000.0),
    "report-progress-steady": reports.Progress(
        **REPORT,
        step=60,
        loss=2.5,
        tokens_per_s=40000.0,
        step_ms=410.5,
        data_wait_ms=1.5,
        comm_ms=80.25,
        node_ms=(325.5, 330.25),
        evaluation_loss=2.75,
        steady=reports.Steady(
            steps=200, world_size=2, step_ms=409.75, tokens_per_s=40100.0, data_wait_ms=1.25, comm_ms=80.0
        ),
    ),
    "report-checkpoint-saved": reports.CheckpointSaved(
        **REPORT,
        save=SAVE_50,
        manifest_sha256=DIGEST_50,
        step=50,
        final=True,
        answers_generation=6,
        size_bytes=4608,
        parent=POINTER_25,
    ),
    "report-save-lost": reports.SaveLost(
        **REPORT, save=SAVE_50, reason="part of node 1 failed: SlowDown at __1_0.distcp"
    ),
    "report-finished": reports.Finished(**REPORT, step=120, loss=2.25, save="step-00000120.a0002.s03"),
    "report-failed": reports.Failed(
        **REPORT, failure="out_of_memory", reason="rank 1 ran out of memory", exit_code=72, rank=1, log_tail="..."
    ),
    "report-unfit": reports.Unfit(**REPORT, reason="GPU 3: XID 79"),
    "report-notice-seen": reports.NoticeSeen(**REPORT, action="terminate", deadline_at=AT + 120),
    "part": Part(job=JOB, attempt=2, save=SAVE_50, node_rank=0, roster_id="a2", files=FILES),
    "part-failed": Part(job=JOB, attempt=2, save=SAVE_50, node_rank=1, roster_id="a2", failed="deadline"),
    "job-file": node_files.JobFile(
        job=JOB,
        attempt=2,
        spec=SPEC,
        node_rank=0,
        nodes=2,
        agent_pid=4321,
        corpus_dir="/var/lib/holdfast/corpus",
        roster_id="a2",
        resume_from=POINTER_50,
        resume_parent=POINTER_25,
    ),
    "control": node_files.Control(
        attempt=2, generation=6, kind=node_files.ControlKind.CHECKPOINT_STOP, deadline_at=AT + 120, doomed=(1,)
    ),
    "needs": node_files.Needs(number=1, save=POINTER_50, files=(".metadata", "__0_0.distcp")),
    "provided": node_files.Provided(number=1, folder=f"/var/lib/holdfast/saves/{SAVE_50}"),
    "provided-damaged": node_files.Provided(number=1, folder="", damaged=(DAMAGED,)),
    "data-needs": node_files.DataNeeds(number=2, shards=(7, 3, 12, 0, 5)),
    "damaged-data": node_files.DamagedData(file="shard-00007.bin", reason="sha256 differs"),
    "rank-save": node_files.RankSave(
        **SAVED, rank=0, files=("__0_0.distcp", ".metadata"), final=True, answers_generation=6, restored=POINTER_25
    ),
    "progress": node_files.RankProgress(
        step=60, loss=2.5, tokens_per_s=40000.0, state="running", world_size=2, started=True, restored=SAVE_50
    ),
    "network-check": node_files.NetworkCheck(backend="nccl", world_size=16, seconds=4.5, bandwidth_gbps=2400.0),
    "rank-pulse": node_files.RankPulse(rank=1, phase="running", step=60, bound_s=30.0),
    "outcome-finished": node_files.Outcome(
        outcome="finished", step=120, loss=2.25, save="step-00000120.a0002.s03", reason="all steps are trained"
    ),
    "outcome-stopped": node_files.Outcome(
        outcome="stopped", step=50, loss=2.75, answers_generation=6, save=SAVE_50, existing=True
    ),
}
MANIFEST = Manifest(**SAVED, job=JOB, attempt=2, files=FILES, final=True, answers_generation=6, parent=POINTER_25)
HEAD = Head(job=JOB, attempt=2, step=50, save=SAVE_50, manifest_sha256=DIGEST_50, parent=POINTER_25)
NEW_HEAD = Head(job=JOB, attempt=1)
PART = MESSAGES["part"]
SEALED: dict[str, Manifest | Head | Part] = {
    "manifest": MANIFEST,
    "head": HEAD,
    "head-new": NEW_HEAD,
    "part-sealed": PART,
}


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def encoded(message: Any) -> dict[str, Any]:
    return encode_report(message) if isinstance(message, reports.Report) else encode(message)


def decoded(kind: type, body: dict[str, Any]) -> Any:
    return decode_report(body) if issubclass(kind, reports.Report) else decode(kind, body)


def keys() -> dict[str, Any]:
    return {
        "contract": CONTRACT_VERSION,
        "orders_table": {
            "orders": orders.orders_key(JOB),
            "spec": orders.spec_key(JOB, SPEC.spec_id),
            "roster": orders.roster_key(JOB, "a2"),
            **{f"wait_{wait.value}": orders.wait_key(JOB, wait) for wait in orders.Wait},
        },
        "bucket": {
            "prefix": layout.job_prefix("research", JOB),
            "head": layout.head_key(PREFIX),
            "manifest": layout.manifest_key(PREFIX, SAVE_50),
            "part": layout.part_key(PREFIX, SAVE_50, 1),
            "file": layout.file_key(PREFIX, SAVE_50, "__0_0.distcp"),
        },
        "save_name": layout.save_name(50, 2, 1),
    }


@pytest.mark.parametrize("name", MESSAGES)
def test_a_frozen_message_is_read_as_ever(name: str) -> None:
    assert decoded(type(MESSAGES[name]), golden(name)) == MESSAGES[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_written_as_ever(name: str) -> None:
    assert encoded(MESSAGES[name]) == golden(name)


@pytest.mark.parametrize("name", SEALED)
def test_a_sealed_file_is_written_byte_for_byte_as_ever(name: str) -> None:
    assert layout.seal(SEALED[name])[0] == (GOLDEN / f"{name}.json").read_bytes()


def test_a_frozen_manifest_opens_by_the_pointer_to_it() -> None:
    raw = (GOLDEN / "manifest.json").read_bytes()
    pointer = SavePointer(save=SAVE_50, manifest_sha256=json.loads(raw)["sha256"])
    manifest = layout.open_manifest(raw, job=JOB, pointer=pointer)
    assert (manifest.files, manifest.facts, manifest.parent) == (FILES, FACTS, POINTER_25)
    assert layout.read_manifest(raw) == manifest


@pytest.mark.parametrize(("name", "pointer"), [("head", POINTER_50), ("head-new", None)])
def test_a_frozen_head_names_the_newest_save_or_none(name: str, pointer: SavePointer | None) -> None:
    assert layout.open_head((GOLDEN / f"{name}.json").read_bytes(), job=JOB).pointer == pointer


def test_a_frozen_part_opens_as_the_nodes_that_it_is_of() -> None:
    raw = (GOLDEN / "part-sealed.json").read_bytes()
    assert layout.open_part(raw, job=JOB, save=SAVE_50, node_rank=0).files == FILES
    with pytest.raises(layout.Damaged, match=r"parts/node-1\.json"):
        layout.open_part(raw, job=JOB, save=SAVE_50, node_rank=1)


def test_keys_of_table_and_bucket_are_as_ever() -> None:
    assert keys() == golden("keys")


def test_every_kind_every_action_and_every_wait_has_a_frozen_message() -> None:
    assert {type(message).kind for message in MESSAGES.values() if isinstance(message, reports.Report)} == set(
        reports.KINDS
    )
    assert {message.action for message in MESSAGES.values() if isinstance(message, orders.Orders)} == set(orders.Action)
    assert {message.wait for message in MESSAGES.values() if isinstance(message, orders.WaitItem)} == set(orders.Wait)


def test_no_frozen_file_has_changed_and_none_is_unlisted() -> None:
    listed = dict(reversed(line.split("  ")) for line in (GOLDEN / "SHA256SUMS").read_text().splitlines())
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in GOLDEN.glob("*.json")}
    assert found == listed, "frozen messages never change: a new form is a new file, an incompatible one a new version"


@pytest.mark.parametrize("name", MESSAGES)
def test_fields_of_a_later_release_are_ignored(name: str) -> None:
    body = {**golden(name), "a_field_of_tomorrow": {"deep": [1]}}
    assert decoded(type(MESSAGES[name]), body) == MESSAGES[name]


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("version", [2, "1", None])
def test_an_unknown_version_is_refused_by_name(name: str, version: Any) -> None:
    with pytest.raises(UnknownVersion, match=f"contract version {version!r}"):
        decoded(type(MESSAGES[name]), {**golden(name), "contract": version})


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("spec", "training"),
        ("orders-run", "generation"),
        ("roster", "leader"),
        ("report-ready", "port"),
        ("part", "save"),
    ],
)
def test_a_missing_field_is_named(name: str, field: str) -> None:
    body = {key: value for key, value in golden(name).items() if key != field}
    with pytest.raises(ContractError, match=f"lacks the field '{field}'"):
        decoded(type(MESSAGES[name]), body)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("orders-run", "attempt", "2"),
        ("orders-run", "attempt", True),
        ("orders-run", "attempt", 2.5),
        ("orders-run", "attempt", [2]),
        ("orders-run", "attempt", float("nan")),
        ("orders-run", "issued_at", 10**400),
        ("orders-run", "action", "dance"),
        ("orders-checkpoint-stop", "doomed", NODE_1),
        ("roster", "leader", "10.0.1.10"),
        ("report-ready", "ip", 10),
        ("rank-save", "facts", "none"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(name: str, field: str, value: Any) -> None:
    with pytest.raises(ContractError, match=rf"{field}|{type(value).__name__}"):
        decoded(type(MESSAGES[name]), {**golden(name), field: value})


@pytest.mark.parametrize("body", [[], "text", None, 7])
def test_a_message_that_is_no_object_is_refused(body: Any) -> None:
    with pytest.raises(ContractError, match="must be an object"):
        decode(orders.Orders, body)


def test_a_report_of_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ContractError, match="'sung'"):
        decode_report({**golden("report-heard"), "kind": "sung"})


@pytest.mark.parametrize("name", SEALED)
def test_one_flipped_byte_anywhere_in_a_sealed_file_is_found(name: str) -> None:
    raw = (GOLDEN / f"{name}.json").read_bytes()
    opened = layout.read_manifest if name == "manifest" else lambda body: layout.open_head(body, job=JOB)
    for place in range(len(raw)):
        with pytest.raises(layout.Damaged):
            opened(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])


def test_a_manifest_rewritten_with_a_digest_of_its_own_is_not_the_one_that_was_committed() -> None:
    committed = json.loads((GOLDEN / "manifest.json").read_text())["sha256"]
    body = {**encode(MANIFEST), "step": 51}
    forged = canonical_json({**body, "sha256": layout.body_sha256(body)})
    with pytest.raises(layout.Damaged, match="committed was"):
        layout.open_manifest(forged, job=JOB, pointer=SavePointer(save=SAVE_50, manifest_sha256=committed))


def test_a_sealed_file_of_another_job_or_another_save_is_refused() -> None:
    raw, digest = layout.seal(MANIFEST)
    with pytest.raises(layout.Damaged, match="belongs to job"):
        layout.open_manifest(raw, job="other", pointer=SavePointer(save=SAVE_50, manifest_sha256=digest))
    with pytest.raises(layout.Damaged, match="belongs to job"):
        layout.open_manifest(raw, job=JOB, pointer=SavePointer(save=SAVE_25, manifest_sha256=digest))
    with pytest.raises(layout.Damaged, match="belongs to job"):
        layout.open_head(layout.seal(HEAD)[0], job="other")


@pytest.mark.parametrize("name", ["step-25.a1.s1", "../step-00000025.a0001.s01", "step-00000025.a0001.s01/x", ""])
def test_a_name_that_is_no_save_is_refused(name: str) -> None:
    with pytest.raises(ContractError, match="is not the name of a save"):
        layout.parse_save_name(name)


def test_the_polled_item_stays_under_one_kilobyte_with_sixteen_doomed_nodes() -> None:
    doomed = tuple(f"i-0a1b2c3d4e5f6{number:04x}" for number in range(16))
    item = orders.Orders(
        **ORDER,
        generation=6,
        action=orders.Action.CHECKPOINT_STOP,
        roster_id="a2",
        deadline_at=AT + 120,
        doomed=doomed,
        reason="spot interruption",
        resume_from=orders.ResumeFrom(save=SAVE_50, manifest_sha256=DIGEST_50, parent=POINTER_25),
    )
    assert len(canonical_json(encode(item))) < 1024


def test_a_message_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "run/control.json"
    assert node_files.read_message(path, node_files.Control) is None
    node_files.write_message(path, MESSAGES["control"])
    assert node_files.read_message(path, node_files.Control) == MESSAGES["control"]
    assert [file.name for file in path.parent.iterdir()] == ["control.json"]
