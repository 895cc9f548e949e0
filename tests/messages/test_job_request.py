"""What a user may ask for, how a wrong request is answered, and what makes two requests the same job."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.domain.errors import REASON_CHARACTERS, Rejected
from holdfast.messages.envelope import BODY_LIMIT_BYTES
from holdfast.messages.job_request import (
    PRESETS,
    JobRequest,
    body_sha256,
    canonical_body,
    job_id,
    json_schema,
    node_spec,
    read_request,
    request_identity,
    spec_id,
)
from job_contract.spec import CheckpointSpec, ImageSpec, JobSpec, LoraSpec, ModelSpec
from job_contract.version import decode, encode

ROOT = Path(__file__).parents[2]
SAMPLE: dict[str, Any] = json.loads((ROOT / "events/job-request.json").read_text())
LEFT_OUT = object()


def sample(**changes: Any) -> dict[str, Any]:
    """Return the sample with fields replaced; `training__steps=5` reaches inside, LEFT_OUT removes."""
    request = copy.deepcopy(SAMPLE)
    for path, value in changes.items():
        *outer, name = path.split("__")
        part = request
        for step in outer:
            part = part.setdefault(step, {})
        if value is LEFT_OUT:
            del part[name]
        else:
            part[name] = value
    return request


def read(**changes: Any) -> JobRequest:
    return read_request(json.dumps(sample(**changes)))


def refusal(body: str | dict[str, Any]) -> Rejected:
    with pytest.raises(Rejected) as caught:
        read_request(body if isinstance(body, str) else json.dumps(body))
    return caught.value


@pytest.mark.parametrize("name", ["job-request", "job-request-sns", "job-request-eventbridge"])
def test_the_sample_is_understood_plain_and_wrapped_and_is_the_same_job(name: str) -> None:
    request = read_request((ROOT / f"events/{name}.json").read_text())
    assert request == read()
    assert job_id(request) == "tiny-llama-on-the-standard-li-fcea9e2ede"


def test_a_request_that_eventbridge_sent_through_sns_is_understood() -> None:
    event = (ROOT / "events/job-request-eventbridge.json").read_text()
    assert read_request(json.dumps({"Type": "Notification", "Message": event})) == read()


def test_what_is_left_out_gets_its_default() -> None:
    request = read(
        priority=LEFT_OUT,
        dedup_id=LEFT_OUT,
        checkpoint=LEFT_OUT,
        limits=LEFT_OUT,
        report_s=LEFT_OUT,
        fleet={"nodes": 2, "instance_types": ["p5.48xlarge"]},
        training={
            key: SAMPLE["training"][key]
            for key in ("model", "data", "steps", "global_batch", "sequence_length", "learning_rate")
        },
    )
    assert (request.priority, request.report_s, request.limits.attempts) == (50, 300.0, 5)
    assert (request.fleet.market, request.fleet.zones, request.fleet.fewest_nodes) == ("spot", "any", 2)
    assert (request.training.parallel, request.training.precision, request.training.seed) == ("auto", "auto", 0)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"training__stps": 5}, "unknown_field", ["training.stps", "did you mean 'steps'"]),
        ({"color": "red"}, "unknown_field", ["color", "known here are schema, name"]),
        ({"training__steps": LEFT_OUT}, "missing_field", ["training.steps", "optimizer steps"]),
        ({"fleet": LEFT_OUT}, "missing_field", ["fleet", "nodes"]),
        ({"training__steps": "120"}, "bad_value", ["training.steps", '"120", a string', "whole number"]),
        ({"training__steps": True}, "bad_value", ["training.steps", "true"]),
        ({"training__steps": 1.5}, "bad_value", ["training.steps", "1.5"]),
        ({"training__steps": 0}, "bad_value", ["training.steps", "from 1"]),
        ({"training__steps": 10**8}, "bad_value", ["training.steps", "99999999"]),
        ({"training__learning_rate": float("nan")}, "bad_value", ["training.learning_rate", "NaN"]),
        ({"training__learning_rate": float("inf")}, "bad_value", ["training.learning_rate", "Infinity"]),
        ({"training__learning_rate": "0.1"}, "bad_value", ["training.learning_rate", "a string"]),
        ({"training__learning_rate": True}, "bad_value", ["training.learning_rate", "true"]),
        ({"training__learning_rate": 0}, "bad_value", ["training.learning_rate", "above 0"]),
        ({"training__seed": 2**63}, "bad_value", ["training.seed", "2**63 - 1"]),
        ({"training__seed": -1}, "bad_value", ["training.seed", "-1"]),
        ({"training__warmup_steps": 121}, "bad_value", ["training.warmup_steps", "121", "lower it"]),
        ({"training__micro_batch": 17}, "bad_value", ["training.micro_batch", "17", "global_batch 16"]),
        ({"training__parallel": "zero"}, "bad_value", ["training.parallel", '"zero"', "ddp, fsdp, hsdp or auto"]),
        (
            {"training__parallel": "tp"},
            "unsupported_parallelism",
            ["training.parallel", "tp", "ddp, fsdp, hsdp or auto"],
        ),
        ({"training__precision": "fp8"}, "bad_value", ["training.precision", '"fp8"']),
        ({"training__model": {"preset": "huge"}}, "bad_value", ["training.model.preset", "tiny"]),
        ({"training__model": {}}, "bad_value", ["training.model", "lacks dim, layers", "preset"]),
        ({"training__model__dim": 64}, "bad_value", ["training.model", "preset and dim"]),
        ({"training__data": {}}, "bad_value", ["training.data", "exactly one"]),
        ({"training__data__uri": "s3://corpora/x"}, "bad_value", ["training.data", "exactly one"]),
        ({"training__data": {"uri": "https://x/y"}}, "bad_value", ["training.data.uri", "s3://bucket/prefix"]),
        ({"training__data": {"corpus": "web"}}, "bad_value", ["training.data.corpus", '"web"', "stdlib"]),
        ({"fleet__min_nodes": 3}, "min_nodes_above_nodes", ["fleet.min_nodes", "3", "lower min_nodes or raise nodes"]),
        ({"fleet__nodes": 17}, "bad_value", ["training.global_batch", "fleet.nodes 17"]),
        ({"fleet__instance_types": []}, "bad_value", ["fleet.instance_types", "p5.48xlarge"]),
        ({"fleet__instance_types": ["p5"]}, "bad_value", ["fleet.instance_types[0]", '"p5"']),
        ({"fleet__instance_types": ["a1.x", "a1.x"]}, "named_twice", ["fleet.instance_types", "each once"]),
        ({"fleet__zones": "all"}, "bad_value", ["fleet.zones", '"all"', '"any"']),
        ({"fleet__zones": ["us-east-1a", "EU!"]}, "bad_value", ["fleet.zones[1]", "EU!"]),
        ({"fleet__market": "block"}, "bad_value", ["fleet.market", "spot, on_demand or mixed"]),
        ({"checkpoint__interval_s": 60}, "two_intervals", ["interval_steps and interval_s", "keep one"]),
        ({"checkpoint__interval_steps": "often"}, "bad_value", ["checkpoint.interval_steps", '"auto"']),
        ({"checkpoint__keep": 0}, "bad_value", ["checkpoint.keep", "from 1"]),
        ({"limits__budget_usd": -5}, "bad_value", ["limits.budget_usd", "above 0"]),
        ({"limits__run_s": 1.5}, "bad_value", ["limits.run_s", "whole number"]),
        ({"priority": 101}, "bad_value", ["priority", "100 (first)"]),
        ({"name": ""}, "bad_value", ["name", "1 to 80"]),
        ({"name": "a" * 81}, "bad_value", ["name", "1 to 80"]),
        ({"name": "tab\there"}, "bad_value", ["name", "printable"]),
        ({"name": "   "}, "bad_value", ["name", "printable"]),
        ({"name": None}, "bad_value", ["name", "null"]),
        ({"team": "Big Team"}, "bad_value", ["team", "Big Team", "a-z"]),
        ({"team": "a/b"}, "bad_value", ["team", "a/b"]),
        ({"team": "-a"}, "bad_value", ["team", "no dash"]),
        ({"team": "research\n"}, "bad_value", ["team"]),
        ({"image": {"uri": "a b"}}, "bad_value", ["image.uri", "registry/name:tag"]),
        ({"image": {"uri": "a/b:c", "command": ["x", 5]}}, "bad_value", ["image.command[1]", "5"]),
        ({"training": None}, "bad_value", ["training", "null"]),
        ({"training": [1]}, "bad_value", ["training", "[1]"]),
        ({"schema": "holdfast.job-request/2"}, "unknown_schema", ["holdfast.job-request/2", "holdfast.job-request/1"]),
        ({"schema": LEFT_OUT}, "unknown_schema", ["None", "holdfast.job-request/1"]),
    ],
)
def test_a_refusal_names_the_field_the_value_and_the_way_out(changes: Any, code: str, words: list[str]) -> None:
    rejected = refusal(sample(**changes))
    assert rejected.code == code
    assert [word for word in words if word not in rejected.reason] == []


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dim": 64, "heads": 4, "kv_heads": 3}, "no multiple of kv_heads"),
        ({"dim": 66, "heads": 4, "kv_heads": 2}, "no multiple of heads"),
        ({"dim": 60, "heads": 4, "kv_heads": 2}, "make it even"),
    ],
)
def test_sizes_that_attention_cannot_be_built_from_are_refused(sizes: dict[str, int], words: str) -> None:
    assert words in refusal(sample(training__model={"layers": 2, "ffn_dim": 128, **sizes})).reason


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("", "not_json", "is not JSON"),
        ("{", "not_json", "is not JSON"),
        ("[]", "not_json", "not list"),
        ("null", "not_json", "not NoneType"),
        ("[" * 100_000, "not_json", "nested too deeply"),
        ('{"schema": ' + "9" * 5_000 + "}", "not_json", "is not JSON"),
        ('{"team": "a", "team": "b"}', "doubled_key", "'team'"),
        ('{"training": {"steps": 1, "steps": 2}}', "doubled_key", "'steps'"),
        ('{"name": "\\ud800"}', "not_json", "surrogate"),
        ('{"Type": "Notification", "Message": 5}', "not_json", "not int"),
        ('{"Type": "Notification", "Message": "hello"}', "not_json", "is not JSON"),
        ('{"detail-type": "x", "detail": []}', "not_json", "not list"),
        (json.dumps({"pad": "x" * BODY_LIMIT_BYTES}), "too_large", "262144"),
        ('{"pad": "' + "é" * (BODY_LIMIT_BYTES // 2) + '"}', "too_large", "262144"),
    ],
)
def test_a_body_that_is_no_request_at_all_is_refused_with_the_reason(body: str, code: str, words: str) -> None:
    rejected = refusal(body)
    assert rejected.code == code
    assert words in rejected.reason


def test_a_body_of_exactly_the_limit_is_read() -> None:
    body = json.dumps(SAMPLE)
    assert read_request(body + " " * (BODY_LIMIT_BYTES - len(body))) == read()
    assert refusal(body + " " * (BODY_LIMIT_BYTES - len(body) + 1)).code == "too_large"


def test_a_reason_stays_short_whatever_was_sent() -> None:
    for request in (
        sample(schema="x" * 100_000),
        sample(**{"x" * 100_000: 1}),
        sample(team="x" * 100_000),
        sample(fleet__instance_types=["x" * 100_000] * 2),
    ):
        assert len(refusal(request).reason) <= REASON_CHARACTERS + 3


def test_numbers_too_large_for_a_double_are_refused() -> None:
    body = json.dumps(SAMPLE).replace("0.001", "1e999")
    assert "training.learning_rate is Infinity" in refusal(body).reason


def test_the_same_dedup_id_of_one_team_is_the_same_job_whatever_else_changes() -> None:
    assert request_identity(read()) == request_identity(read(training__steps=60, name="other"))
    assert body_sha256(read()) != body_sha256(read(training__steps=60))
    assert request_identity(read()) != request_identity(read(team="vision"))
    assert request_identity(read()) != request_identity(read(dedup_id="demo-2"))


def test_without_a_dedup_id_the_same_body_is_the_same_job_however_it_is_spelled() -> None:
    request = read(dedup_id=LEFT_OUT)
    spelled = dict(reversed(sample(dedup_id=LEFT_OUT, report_s=2.0, limits__budget_usd=5.0).items()))
    assert request_identity(read_request(json.dumps(spelled, indent=4))) == request_identity(request)
    assert request_identity(read(dedup_id=None)) == request_identity(request)
    assert request_identity(read(dedup_id=LEFT_OUT, training__seed=1)) != request_identity(request)


def test_a_request_survives_being_stored_as_its_canonical_body() -> None:
    request = read(checkpoint={"interval_s": "auto"})
    again = read_request(canonical_body(request).decode())
    assert again == request
    assert canonical_body(again) == canonical_body(request)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("tiny llama on the standard library", "tiny-llama-on-the-standard-li"),
        ("Größe 7B / run #3", "groe-7b-run-3"),
        ("電子", "job"),
        ("...", "job"),
        ("a" * 80, "a" * 29),
        ("aaaa bbbb cccc dddd eeee ffff gggg", "aaaa-bbbb-cccc-dddd-eeee-ffff"),
    ],
)
def test_a_job_id_is_a_slug_of_the_name_and_ten_digits_of_the_identity(name: str, slug: str) -> None:
    request = read(name=name)
    assert job_id(request) == f"{slug}-{request_identity(request)[:10]}"
    assert re.fullmatch(r"[a-z0-9-]{1,40}", job_id(request))


@pytest.mark.parametrize(
    ("market", "checkpoint", "spec"),
    [
        ("spot", {"interval_steps": 25}, CheckpointSpec(interval_steps=25)),
        ("spot", {"interval_s": 60, "keep": 5}, CheckpointSpec(interval_s=60.0, keep=5)),
        ("spot", {}, CheckpointSpec(interval_s=900.0)),
        ("spot", {"interval_s": "auto"}, CheckpointSpec(interval_s=900.0)),
        ("on_demand", {"interval_steps": "auto"}, CheckpointSpec(interval_s=1800.0)),
    ],
)
def test_an_automatic_interval_is_shorter_on_spot(market: str, checkpoint: Any, spec: CheckpointSpec) -> None:
    request = read(fleet__market=market, checkpoint=checkpoint)
    assert node_spec(request, job_id(request), ranks_per_node=1).checkpoint == spec


def test_the_nodes_get_a_spec_named_by_its_own_digest() -> None:
    request = read()
    spec = node_spec(request, job_id(request), ranks_per_node=8)
    assert spec.prefix == f"teams/research/jobs/{job_id(request)}"
    assert (spec.ranks_per_node, spec.report_s, spec.training.steps, spec.training.warmup_steps) == (8, 2.0, 120, 10)
    assert spec.training.model == ModelSpec(dim=128, layers=4, heads=4, kv_heads=2, ffn_dim=384)
    assert spec.spec_id == spec_id(spec)
    assert re.fullmatch(r"[0-9a-f]{16}", spec.spec_id)
    assert node_spec(request, job_id(request), ranks_per_node=1).spec_id != spec.spec_id
    assert decode(JobSpec, encode(spec)) == spec


def test_sizes_vocabulary_and_own_image_reach_the_nodes() -> None:
    request = read(
        training__model={"dim": 96, "layers": 1, "heads": 4, "kv_heads": 1, "ffn_dim": 200, "vocab": 1000},
        image={"uri": "registry.example/train:1", "command": ["python", "-m", "mine"]},
        training__parallel="auto",
    )
    spec = node_spec(request, "job", ranks_per_node=1)
    assert spec.training.model == ModelSpec(dim=96, layers=1, heads=4, kv_heads=1, ffn_dim=200, vocab=1000)
    assert spec.image == ImageSpec(uri="registry.example/train:1", command=("python", "-m", "mine"))
    assert spec.training.parallel == "fsdp"


def test_how_the_model_is_run_reaches_the_nodes_and_is_left_out_where_nothing_is_asked() -> None:
    options = {
        "parallel": "hsdp", "activation_checkpointing": "selective", "compile": False, "prefetch": 2,
        "reshard_after_forward": False,
    }  # fmt: skip
    asked = {f"training__{name}": value for name, value in options.items()}
    spec = node_spec(read(**asked, training__model={"preset": "1b", "dropout": 0.1}), "job-1", ranks_per_node=8)
    assert {name: getattr(spec.training, name) for name in options} == options
    assert (spec.training.model.dim, spec.training.model.dropout) == (2048, 0.1)
    plain = encode(node_spec(read(), "job-1", ranks_per_node=8))["training"]
    assert not plain.keys() & (options.keys() - {"parallel"})


def test_adapters_are_asked_for_by_lora_and_have_defaults() -> None:
    def lora_of(**asked: Any) -> LoraSpec | None:
        changes = {f"training__{name}": value for name, value in asked.items()}
        return node_spec(read(**changes), "job-1", ranks_per_node=1).training.lora

    assert lora_of() is lora_of(trainable="all") is None
    assert lora_of(trainable="lora") == LoraSpec(rank=8, alpha=16.0, targets=("q_proj", "v_proj"))
    asked = {"rank": 4, "alpha": 2, "targets": ["down_proj"]}
    assert lora_of(trainable="lora", lora=asked) == LoraSpec(rank=4, alpha=2.0, targets=("down_proj",))


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"training__lora": {"rank": 4}}, "bad_value", ["training.lora", 'trainable to "lora"']),
        ({"training__trainable": "some"}, "bad_value", ["training.trainable", "all, or lora"]),
        (
            {"training__trainable": "lora", "training__lora": {"targets": ["qkv"]}},
            "bad_value",
            ["training.lora.targets", "qkv"],
        ),
        ({"training__activation_checkpointing": "some"}, "bad_value", ["none, full or selective"]),
        ({"training__prefetch": 9}, "bad_value", ["training.prefetch", "0 to 8"]),
        ({"training__init_from": "file:///mnt/../etc"}, "bad_value", ["training.init_from", "file:///mnt/folder"]),
        ({"training__init_from": "file:///etc/llama"}, "bad_value", ["training.init_from", "file:///mnt/folder"]),
    ],
)
def test_a_way_to_train_that_makes_no_sense_is_refused(changes: dict[str, Any], code: str, words: list[str]) -> None:
    rejected = refusal(sample(**changes))
    assert rejected.code == code
    assert [word for word in words if word not in rejected.reason] == []


@pytest.mark.parametrize("name", ["spec", "spec-own-image", "spec-environment", "spec-options"])
def test_the_frozen_specs_bear_their_own_names(name: str) -> None:
    spec = decode(JobSpec, json.loads((ROOT / f"events/contract/v1/{name}.json").read_text()))
    assert spec_id(spec) == spec.spec_id


def parameters(model: ModelSpec) -> int:
    """Weights of the decoder: untied embeddings, two norms a layer and one at the end, no biases."""
    kv_dim = model.dim // model.heads * model.kv_heads
    attention = 2 * model.dim * model.dim + 2 * model.dim * kv_dim
    layer = attention + 3 * model.dim * model.ffn_dim + 2 * model.dim
    return model.layers * layer + 2 * model.vocab * model.dim + model.dim


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("tiny", 854_144),
        ("small", 3_281_152),
        ("125m", 124_668_672),
        # As published for TinyLlama 1.1B and Llama 2 7B.
        ("1b", 1_100_048_384),
        ("7b", 6_738_415_616),
        ("13b", 13_015_864_320),
        ("70b", 68_976_648_192),
    ],
)
def test_a_preset_has_as_many_parameters_as_its_name_says(preset: str, count: int) -> None:
    assert parameters(PRESETS[preset]) == count


def test_every_preset_can_be_asked_for_and_fits_the_rules_for_sizes() -> None:
    for name, spec in PRESETS.items():
        sizes = {key: getattr(spec, key) for key in ("dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab")}
        by_name = read(training__model={"preset": name})
        assert by_name.training.model.as_spec() == spec == read(training__model=sizes).training.model.as_spec()


def test_the_schema_in_the_docs_is_the_one_that_is_read() -> None:
    stored = json.loads((ROOT / "docs/job-request.schema.json").read_text())
    assert stored == json_schema(), "run `python -m holdfast.messages.job_request > docs/job-request.schema.json`"


def test_the_schema_knows_the_fields_of_the_sample() -> None:
    schema = json_schema()
    parts = {"training": "Training", "fleet": "Fleet", "checkpoint": "Checkpoint", "limits": "Limits"}
    assert set(SAMPLE) <= set(schema["properties"])
    for field, part in parts.items():
        assert set(SAMPLE[field]) <= set(schema["$defs"][part]["properties"])
    assert not schema["additionalProperties"]


def test_reading_requests_loads_neither_boto3_nor_powertools() -> None:
    code = (
        "import sys, holdfast.messages.job_request, holdfast.messages.node_report, holdfast.messages.spot_interruption;"
        "print([name for name in ('boto3', 'botocore', 'aws_lambda_powertools', 'jmespath') if name in sys.modules])"
    )
    path = str(ROOT / "layers/holdfast")
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path}, check=True
    )
    assert ran.stdout.strip() == "[]"
