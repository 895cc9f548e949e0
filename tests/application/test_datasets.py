"""Claims about the data of a request: looked up once, pinned by digest, and refused with the way out."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.application.control import obey
from holdfast.application.datasets import Facts, pinned
from holdfast.application.intake import plan_for, take_in
from holdfast.application.requests import read_order
from holdfast.domain.catalogue import InstanceType, Offers
from holdfast.domain.errors import Rejected
from holdfast.domain.locations import dataset_place
from holdfast.messages.acceptance import Acceptance
from holdfast.messages.control_request import RegisterDataset, read_control
from holdfast.messages.job_request import read_request
from job_contract.checkpoint_layout import Manifest, seal
from job_contract.dataset import TokenizerFacts, open_index
from job_contract.dataset_writer import DatasetWriter
from job_contract.spec import DataSpec, EvaluationSpec, JobSpec
from tests import builders as b
from tests.application.fakes import FakePorts

BUCKET = "ckpt-bucket"
OWN = f"s3://{BUCKET}/teams/research/datasets/web"


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An index of two shards of 600 tokens below 260."""
    folder = tmp_path_factory.mktemp("data") / "web"
    facts = TokenizerFacts(kind="bytes", end=256)
    with DatasetWriter(folder, vocab=260, tokenizer=facts, source="a", licence="CC0-1.0", shard_tokens=600) as writer:
        writer.add([7] * 1200)
        writer.close()
    return (folder / "index.json").read_bytes()


@pytest.fixture
def ports(raw: bytes) -> FakePorts:
    """A world with the dataset in a data bucket, in the team's part of the stack's bucket, and in another team's."""
    world = FakePorts()
    for bucket, prefix in (
        ("corpora", "web/v3"),
        (BUCKET, "teams/research/datasets/web"),
        (BUCKET, "teams/vision/datasets/web"),
    ):
        world.request_files.objects[bucket, f"{prefix}/index.json"] = raw
    return world


def body(data: dict[str, Any], **training: Any) -> str:
    request = b.sample("job-request.json")
    return json.dumps({**request, "training": {**request["training"], **training, "data": data}})


def order(ports: FakePorts, data: dict[str, Any], **training: Any) -> Acceptance:
    read = read_order(
        body(data, **training), templates=ports.store, files=ports.request_files, now=b.NOW, bucket=BUCKET
    )
    return pinned(read, registry=ports.store, files=ports.request_files, bucket=BUCKET)


def refused(ports: FakePorts, data: dict[str, Any], **training: Any) -> Rejected:
    with pytest.raises(Rejected) as caught:
        order(ports, data, **training)
    return caught.value


def register(ports: FakePorts, **fields: Any) -> None:
    wish = {"schema": "holdfast.control/1", "action": "register_dataset", "name": "web", "version": 3, **fields}
    assert obey(read_control(json.dumps(wish)), ports, bucket=BUCKET) is None


@pytest.mark.parametrize("uri", ["s3://corpora/web/v3", "s3://corpora/web/v3/", OWN])
def test_a_place_is_pinned_by_the_digest_that_its_index_has_now(ports: FakePorts, raw: bytes, uri: str) -> None:
    made = order(ports, {"uri": uri})
    assert made.spec.training.data == DataSpec(uri=uri.rstrip("/"), index_sha256=open_index(raw).sha256)
    assert made.job.spec_id == made.spec.spec_id


def test_a_registered_dataset_is_pinned_by_what_was_registered(ports: FakePorts, raw: bytes) -> None:
    register(ports, uri="s3://corpora/web/v3")
    ports.request_files.objects.clear()
    made = order(ports, {"dataset": "web@3"})
    assert made.spec.training.data == DataSpec(
        uri="s3://corpora/web/v3", index_sha256=open_index(raw).sha256, dataset="web@3"
    )
    kept = ports.store.dataset("web", 3)
    assert kept is not None
    assert (kept["tokens"], kept["licence"], kept["vocab"], kept["masked"]) == (1200, "CC0-1.0", 260, False)


@pytest.fixture
def stored(ports: FakePorts, monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """The specs that are stored from now on."""
    kept: list[JobSpec] = []
    create = ports.store.create
    monkeypatch.setattr(
        ports.store, "create", lambda job, request, spec: kept.append(spec) or create(job, request, spec)
    )
    return kept


def test_the_plan_keeps_the_data_and_an_accepted_request_is_not_looked_up_again(
    ports: FakePorts, stored: list[JobSpec]
) -> None:
    text = body({"uri": "s3://corpora/web/v3"})
    taken = take_in(text, ports, bucket=BUCKET)
    [spec] = stored
    assert (spec.spec_id, spec.training.data.uri) == (taken.job.spec_id, "s3://corpora/web/v3")
    assert spec.training.data.index_sha256
    ports.request_files.objects.clear()
    assert take_in(text, ports, bucket=BUCKET).plan is None


def test_a_mounted_folder_is_pinned_by_the_digest_that_the_request_gives(ports: FakePorts) -> None:
    made = order(ports, {"uri": "file:///mnt/fsx/web/", "digest": "d" * 64})
    assert made.spec.training.data == DataSpec(uri="file:///mnt/fsx/web", index_sha256="d" * 64)
    assert refused(ports, {"uri": "file:///mnt/fsx/web"}).code == "dataset_digest_needed"
    with pytest.raises(Rejected, match="dataset_digest_needed"):
        register(ports, uri="file:///mnt/fsx/web")
    register(ports, uri="file:///mnt/fsx/web", digest="d" * 64)
    assert order(ports, {"dataset": "web@3"}).spec.training.data.index_sha256 == "d" * 64


@pytest.mark.parametrize(
    ("data", "training", "code", "words"),
    [
        ({"dataset": "web@4"}, {}, "unknown_dataset", "web@4"),
        ({"uri": "s3://corpora/nowhere"}, {}, "dataset_not_found", "s3://corpora/nowhere/index.json"),
        ({"uri": "s3://corpora/web/v3", "digest": "0" * 64}, {}, "dataset_damaged", "pinned was 0000"),
        ({"uri": "s3://corpora/web/v3"}, {"sequence_length": 600}, "data_does_not_fit", "has 600 tokens"),
        ({"uri": f"s3://{BUCKET}/teams/vision/datasets/web"}, {}, "path_outside_team", "another team"),
        ({"uri": f"s3://{BUCKET}/teams/research/jobs/x"}, {}, "path_outside_team", "teams/research/datasets/"),
        ({"uri": f"s3://{BUCKET}/requests/x"}, {}, "path_outside_team", "teams/research/datasets/"),
        ({"uri": "s3://corpora/web", "corpus": "stdlib"}, {}, "bad_value", "exactly one"),
        ({"dataset": "web@3", "digest": "0" * 64}, {}, "bad_value", "with uri only"),
        ({"dataset": "web"}, {}, "bad_value", "name@version"),
        ({"dataset": "web@0"}, {}, "bad_value", "name@version"),
    ],
)
def test_data_that_cannot_be_had_are_refused_with_the_way_out(
    ports: FakePorts, data: dict[str, Any], training: dict[str, Any], code: str, words: str
) -> None:
    refusal = refused(ports, data, **training)
    assert (refusal.code, words in refusal.reason) == (code, True), refusal


def test_a_model_with_too_small_a_vocabulary_is_refused_before_any_machine_is_bought(
    ports: FakePorts, tmp_path: Path
) -> None:
    facts = TokenizerFacts(kind="huggingface")
    with DatasetWriter(
        tmp_path / "d", vocab=50_000, tokenizer=facts, source="", licence="", shard_tokens=600
    ) as writer:
        writer.add([1] * 600)
        writer.close()
    ports.request_files.objects["corpora", "large/index.json"] = (tmp_path / "d/index.json").read_bytes()
    refusal = refused(ports, {"uri": "s3://corpora/large"})
    assert refusal.code == "data_does_not_fit"
    assert "set it to 50000 at least" in refusal.reason


def test_the_evaluation_set_is_pinned_and_judged_as_the_data_are(ports: FakePorts, raw: bytes) -> None:
    register(ports, uri="s3://corpora/web/v3")
    asked = {"data": {"dataset": "web@3"}, "every_steps": 50, "batches": 4}
    made = order(ports, {"corpus": "stdlib"}, evaluation=asked)
    data = DataSpec(uri="s3://corpora/web/v3", index_sha256=open_index(raw).sha256, dataset="web@3")
    assert made.spec.training.evaluation == EvaluationSpec(data=data, every_steps=50, batches=4)
    assert made.spec.training.data == DataSpec(corpus="stdlib")
    for wrong, code in (
        ({"uri": f"s3://{BUCKET}/teams/vision/datasets/web"}, "path_outside_team"),
        ({"dataset": "web@4"}, "unknown_dataset"),
        ({"corpus": "stdlib"}, "bad_value"),
    ):
        assert refused(ports, {"corpus": "stdlib"}, evaluation={**asked, "data": wrong}).code == code


def test_a_damaged_index_is_no_dataset(ports: FakePorts, raw: bytes) -> None:
    ports.request_files.objects["corpora", "web/v3/index.json"] = raw.replace(b"1200", b"1201")
    assert refused(ports, {"uri": "s3://corpora/web/v3"}).code == "dataset_damaged"
    with pytest.raises(Rejected, match="dataset_damaged"):
        register(ports, uri="s3://corpora/web/v3")
    assert ports.store.dataset("web", 3) is None


def test_a_dataset_of_one_teams_part_is_not_another_teams_even_when_registered(ports: FakePorts) -> None:
    register(ports, uri=f"s3://{BUCKET}/teams/vision/datasets/web")
    assert refused(ports, {"dataset": "web@3"}).code == "path_outside_team"


def test_a_name_and_version_mean_one_dataset_for_good(ports: FakePorts) -> None:
    register(ports, uri="s3://corpora/web/v3")
    register(ports, uri="s3://corpora/web/v3/", requested_by="somebody else")
    with pytest.raises(Rejected, match="dataset_version_taken"):
        register(ports, uri=OWN)


def test_the_sample_of_the_wish_is_read() -> None:
    wish = read_control(json.dumps(b.sample("control-register-dataset.json")))
    assert isinstance(wish, RegisterDataset)
    assert (wish.name, wish.version, wish.digest) == ("web", 3, "1d" * 32)


@pytest.mark.parametrize(
    "uri",
    [
        "file:///etc/passwd",
        "file:///mnt/../etc",
        "file:///mnt//x",
        "file:///mnt/./x",
        "file:///mnt/%2e%2e/etc",
        "file:///mnt/a\\b",
        "file:///mnt/a\nb",
        "file:///mnt",
        "file:///mnt/",
        "file://mnt/x",
        "s3://corpora/../x",
        "s3://corpora/a%2fb",
        "s3://corpora/",
        f"s3://{BUCKET}/teams/research/datasets/../../vision/datasets/web",
        f"s3://{BUCKET}/teams/research/datasets",
        f"s3://{BUCKET}/teams/research/datasets/",
        f"s3://{BUCKET}//teams/research/datasets/x",
        f"s3://{BUCKET}/teams/research-2/datasets/x",
    ],
)
def test_o26_a_dataset_lies_plainly_inside_what_its_team_may_read(uri: str) -> None:
    with pytest.raises(Rejected):
        dataset_place(uri, "training.data.uri", bucket=BUCKET, team="research")


def test_weights_are_pinned_by_the_list_that_their_folder_has_when_the_request_is_accepted(
    ports: FakePorts, stored: list[JobSpec]
) -> None:
    text = body({"corpus": "stdlib"}, init_from=f"s3://{BUCKET}/teams/research/llama/")
    listed = b"0" * 64 + b"  model.safetensors\n"
    ports.request_files.objects[BUCKET, "teams/research/llama/SHA256SUMS"] = listed
    taken = take_in(text, ports, bucket=BUCKET)
    [spec] = stored
    assert spec.spec_id == taken.job.spec_id
    assert spec.training.init_sha256 == hashlib.sha256(listed).hexdigest()
    assert order(ports, {"corpus": "stdlib"}, init_from="file:///mnt/llama").spec.training.init_sha256 is None
    ports.request_files.objects.clear()
    assert take_in(text, ports, bucket=BUCKET).plan is None
    rejected = refused(ports, {"corpus": "stdlib"}, init_from=f"s3://{BUCKET}/teams/research/llama")
    assert rejected.code == "weights_not_found"
    for words in ("training.init_from", f"s3://{BUCKET}/teams/research/llama/SHA256SUMS", "sha256sum"):
        assert words in rejected.reason


SAVE = "step-00000025.a0001.s01"
OF_A_JOB = f"teams/research/jobs/first-0123456789/saves/{SAVE}"


def a_save(ports: FakePorts, job: str = "first-0123456789", **config: Any) -> str | None:
    """A committed save of another job of the team, trained with the sample's model; returns its digest."""
    model = vars(read_request(json.dumps(b.sample("job-request.json"))).training.model.as_spec())
    manifest = Manifest(
        job=job, attempt=1, step=25, save=SAVE, world_size=1, mesh=(1,), config_hash="c", corpus_digest="d",
        versions={}, facts={"config": {"model": {**model, "dropout": 0.5}, **config}}, files=(),
    )  # fmt: skip
    raw, digest = seal(manifest)
    ports.request_files.objects[BUCKET, f"{OF_A_JOB}/manifest.json"] = raw
    return digest


def starting(ports: FakePorts, **training: Any) -> str | None:
    made = order(ports, {"corpus": "stdlib"}, init_from=f"s3://{BUCKET}/{OF_A_JOB}/", **training)
    return made.spec.training.init_sha256


def test_a_save_of_another_job_of_the_team_is_a_start_and_pinned_by_its_manifest(ports: FakePorts) -> None:
    assert starting_is_refused(ports).code == "weights_not_found"
    digest = a_save(ports)
    assert starting(ports) == digest is not None


def starting_is_refused(ports: FakePorts, **training: Any) -> Rejected:
    return refused(ports, {"corpus": "stdlib"}, init_from=f"s3://{BUCKET}/{OF_A_JOB}", **training)


def test_a_save_that_is_no_start_of_the_model_is_refused_with_what_is_wrong_and_the_way_out(ports: FakePorts) -> None:
    a_save(ports)
    wider = starting_is_refused(ports, model={"preset": "small"})
    assert wider.code == "weights_do_not_fit" and "training.model has" in wider.reason
    base = starting_is_refused(ports, trainable="lora")
    assert base.code == "weights_do_not_fit" and "trainer.export" in base.reason
    a_save(ports, lora={"rank": 4, "alpha": 8.0, "targets": ["q_proj"]})
    assert starting_is_refused(ports).code == "weights_do_not_fit"
    a_save(ports, model=None)
    assert "not made by the bundled trainer" in starting_is_refused(ports).reason
    a_save(ports, job="other-0123456789")
    assert starting_is_refused(ports).code == "weights_damaged"
    ports.request_files.objects[BUCKET, f"{OF_A_JOB}/manifest.json"] = b"{}"
    assert starting_is_refused(ports).code == "weights_damaged"


def test_a_plan_counts_the_data_that_a_node_keeps_of_the_training_and_of_the_evaluation(ports: FakePorts) -> None:
    """Two shards of 600 tokens of two bytes; what is on a mount is not brought."""
    register(ports, uri="s3://corpora/web/v3")
    evaluation = {"data": {"uri": OWN}, "every_steps": 5, "batches": 1}
    assert order(ports, {"dataset": "web@3"}).brought_bytes == 2400
    both = order(ports, {"uri": "s3://corpora/web/v3"}, evaluation=evaluation)
    assert both.brought_bytes == 4800
    assert order(ports, {"uri": "file:///mnt/fsx/web", "digest": "d" * 64}).brought_bytes == 0
    assert order(ports, {"corpus": "stdlib"}).brought_bytes == 0
    kind = InstanceType(name="c7i.large", vcpus=2, memory_bytes=4 * 1024**3)
    ports.catalogue.known = Offers(types={kind.name: kind})
    assert plan_for(both, ports.catalogue, now=b.NOW).refusal is None
    refusal = plan_for(replace(both, brought_bytes=141 * 10**9), ports.catalogue, now=b.NOW).refusal
    assert refusal is not None and refusal.code == "checkpoint_over_disk"


def test_data_of_which_less_than_two_blocks_are_read_count_as_one() -> None:
    facts = Facts(block_bytes=40, two_blocks_bytes=80, two_blocks_tokens=1000)
    assert [facts.on_disk_bytes(tokens) for tokens in (999, 1000)] == [40, 80]
