"""What is refused before any plan is made, templates and references, and the cases O-08, O-11, O-19, O-25, O-26."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from typing import Any

import pytest

from holdfast.adapters.items import from_item, to_item
from holdfast.application.requests import read_order
from holdfast.domain.errors import REASON_CHARACTERS, Rejected
from holdfast.domain.locations import split_uri, team_key
from holdfast.domain.refusals import REFUSALS
from holdfast.messages.acceptance import Acceptance, read_acceptance
from holdfast.messages.job_request import read_request
from holdfast.messages.job_template import read_template, template_data
from holdfast.messages.plan_page import page
from holdfast.messages.request_reference import LIMIT_BYTES
from holdfast.messages.variables import ENVIRONMENT_LIMIT_BYTES
from job_contract.version import encode
from tests import builders as b
from tests.application.fakes import FakeRequestFiles, FakeStore
from tests.domain.test_plan import FAULTS

SAMPLE = b.sample("job-request.json")
BUCKET = "ckpt-bucket"
ARN = "secretsmanager:arn:aws:secretsmanager:us-east-1:111122223333:secret:wandb-AbCdEf"


def sample(**changes: Any) -> dict[str, Any]:
    """The sample with fields replaced; `training__steps=5` reaches inside."""
    request = copy.deepcopy(SAMPLE)
    for path, value in changes.items():
        *outer, name = path.split("__")
        part = request
        for step in outer:
            part = part.setdefault(step, {})
        part[name] = value
    return request


def order(message: Any, *, store: FakeStore | None = None, files: FakeRequestFiles | None = None) -> Acceptance:
    body = message if isinstance(message, str) else json.dumps(message)
    return read_order(body, templates=store or FakeStore(), files=files or FakeRequestFiles(), now=b.NOW, bucket=BUCKET)


def refused(message: Any, **world: Any) -> Rejected:
    with pytest.raises(Rejected) as caught:
        order(message, **world)
    return caught.value


def template(version: int = 1, **request: Any) -> str:
    return json.dumps({"schema": "holdfast.job-template/1", "name": "tiny", "version": version, "request": request})


def storing(*templates: str) -> FakeStore:
    store = FakeStore()
    for text in templates:
        store.put_template(template_data(read_template(text)))
    return store


FROM_TEMPLATE = {"schema": "holdfast.job-request/1", "name": "mine", "team": "research", "template": {"name": "tiny"}}
WHOLE = {key: SAMPLE[key] for key in ("training", "fleet", "checkpoint", "limits", "report_s")}

MESSAGE_FAULTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unsupported_parallelism": (sample(training__tensor_parallel=4), ("training.tensor_parallel", "fsdp")),
    "on_premises_refused": (sample(fleet__market="hybrid"), ("fleet.market", "hybrid")),
    "shell_like_name": (sample(name="$(touch PWNED)"), ("$(touch PWNED)", "leave out")),
    "blank_edges": (sample(name=" run "), ("' run '", "blanks")),
    "named_twice": (sample(fleet__instance_types=["c7i.large", "c7i.large"]), ("each once",)),
    "min_nodes_above_nodes": (sample(fleet__min_nodes=3), ("min_nodes is 3",)),
    "two_intervals": (sample(checkpoint__interval_s=60), ("keep one",)),
    "bad_environment_name": (sample(environment={"A-B": "x"}), ("'A-B'", "[A-Za-z_]")),
    "reserved_variable": (sample(environment={"LD_PRELOAD": "/x.so"}), ("LD_PRELOAD", "another name")),
    "environment_too_large": (sample(environment={"A": "x" * ENVIRONMENT_LIMIT_BYTES}), ("32768",)),
    "bad_environment_value": (sample(environment={"A": "x\0y"}), ("environment.A", "NUL")),
    "bad_secret_reference": (sample(secrets={"KEY": "hunter2"}), ("secrets.KEY", "secretsmanager:arn", "ssm:/name")),
    "variable_named_twice": (sample(environment={"A": "x"}, secrets={"A": "ssm:/a"}), ("both name A",)),
    "bad_location": (
        {"schema": "holdfast.job-request-ref/1", "uri": "https://x/y"}, ("https://x/y", "s3://bucket/key"),
    ),
    "path_outside_team": (
        sample(training__init_from=f"s3://{BUCKET}/teams/vision/jobs/x/saves/y"), ("teams/research/", "team research"),
    ),
    "bucket_not_ours": (
        sample(checkpoint__resume_from="s3://other-bucket/teams/research/jobs/x"), ("other-bucket", BUCKET),
    ),
    "unknown_template": ({**FROM_TEMPLATE, "template": {"name": "huge"}}, ("'huge'",)),
    "unknown_template_version": (
        {**FROM_TEMPLATE, "template": {"name": "tiny", "version": 9}}, ("no version 9", "newest is 1"),
    ),
    "reference_digest_differs": (
        {"schema": "holdfast.job-request-ref/1", "uri": "s3://data/r.json", "sha256": "0" * 64}, ("sha256",),
    ),
    "reference_nested": ({"schema": "holdfast.job-request-ref/1", "uri": "s3://data/nested.json"}, ("itself",)),
    "reference_not_found": ({"schema": "holdfast.job-request-ref/1", "uri": "s3://data/none.json"}, ("none.json",)),
    "not_in_this_release": (
        sample(checkpoint__resume_from=f"s3://{BUCKET}/teams/research/jobs/x/saves/y"), ("checkpoint.resume_from",),
    ),
}  # fmt: skip
ELSEWHERE = {
    "identity_conflict",
    "bad_template",
    "template_version_taken",
    "reference_not_readable",
    "reference_too_large",
    "unknown_dataset",
    "dataset_not_found",
    "dataset_not_readable",
    "dataset_damaged",
    "dataset_digest_needed",
    "data_does_not_fit",
    "dataset_version_taken",
    "weights_not_found",
    "weights_damaged",
    "weights_do_not_fit",
}
"""Tested where a table, a bucket or a template is at hand."""


def the_world() -> dict[str, Any]:
    objects = {
        ("data", "r.json"): json.dumps(SAMPLE).encode(),
        ("data", "nested.json"): json.dumps(
            {"schema": "holdfast.job-request-ref/1", "uri": "s3://data/r.json"}
        ).encode(),
    }
    return {"store": storing(template(**WHOLE)), "files": FakeRequestFiles(objects)}


@pytest.mark.parametrize("code", MESSAGE_FAULTS)
def test_a_fault_of_the_message_has_its_own_code_and_names_the_thing(code: str) -> None:
    message, words = MESSAGE_FAULTS[code]
    rejected = refused(message, **the_world())
    assert rejected.code == code
    assert [word for word in words if word not in rejected.reason] == []


def test_every_refusal_of_the_table_is_tested() -> None:
    assert set(REFUSALS) == set(FAULTS) | set(MESSAGE_FAULTS) | ELSEWHERE


def test_the_page_of_the_docs_is_the_one_that_the_code_makes() -> None:
    stored = (b.ROOT / "docs" / "plan.md").read_text()
    assert stored == page() + "\n", "run `python -m holdfast.messages.plan_page > docs/plan.md`"


@pytest.mark.parametrize(
    "changes",
    [
        {"training__parallel": "fsdp+tp"},
        {"training__parallel": "tensor parallel"},
        {"training__parallel": "3d-pipeline"},
        {"training__context_parallel": 2},
        {"training__pp": 2},
        {"training__expert_parallel_size": 8},
    ],
)
def test_every_other_parallelism_is_refused_by_name(changes: dict[str, Any]) -> None:
    assert refused(sample(**changes)).code == "unsupported_parallelism"


@pytest.mark.parametrize(
    "changes",
    [
        {"fleet__hosts": ["10.0.0.1"]},
        {"fleet__on_prem": 2},
        {"hybrid": True},
        {"fleet__zones": ["us-east-1a", "on-prem"]},
        {"fleet__market": "On-Premises"},
    ],
)
def test_gangs_with_machines_of_ones_own_are_refused_by_name(changes: dict[str, Any]) -> None:
    assert refused(sample(**changes)).code == "on_premises_refused"


# -- what reaches the row and the nodes -------------------------------------------------------------------------------


def test_the_row_carries_the_fewest_nodes_the_budget_and_the_deadline() -> None:
    job = order(sample(limits__finish_by="2027-01-31T18:00:00+01:00")).job
    assert (job.min_nodes, job.budget_usd, job.finish_by_at) == (1, 5.0, 1_801_414_800.0)
    assert order({**SAMPLE, "fleet": {"nodes": 2, "instance_types": ["c7i.large"]}}).job.min_nodes == 2


@pytest.mark.parametrize("text", ["tomorrow", "2027-01-31", "2027-01-31T18:00:00"])
def test_a_deadline_without_a_zone_is_no_time(text: str) -> None:
    assert "limits.finish_by" in refused(sample(limits__finish_by=text)).reason


def test_variables_reach_the_spec_and_secrets_as_references_only() -> None:
    spec = order(sample(environment={"GREETING": "hello; é"}, secrets={"KEY": ARN, "TOKEN": "ssm:/research/t"})).spec
    assert spec.environment == {"GREETING": "hello; é"}
    assert spec.secrets == {"KEY": ARN, "TOKEN": "ssm:/research/t"}
    assert "environment" not in encode(order(SAMPLE).spec)


@pytest.mark.parametrize(
    "name",
    ["LD_LIBRARY_PATH", "PYTHONPATH", "AWS_SECRET_ACCESS_KEY", "HOLDFAST_BUCKET", "PATH", "path", "RANK", "MASTER_ADDR",
     "BASH_ENV", "IFS", "http_proxy", "GLIBC_TUNABLES"],
)  # fmt: skip
def test_o25_variables_that_steer_loader_ranks_or_credentials_are_refused(name: str) -> None:
    for field, value in (("environment", "x"), ("secrets", "ssm:/x")):
        assert refused(sample(**{field: {name: value}})).code == "reserved_variable"


@pytest.mark.parametrize(
    "message",
    [
        sample(secrets={"KEY": "hunter2"}),
        sample(secrets={"KEY": "ssm:hunter2"}),
        sample(secrets={"KEY": "secretsmanager:hunter2"}),
        sample(secrets={"KEY": ARN, "OTHER": 5, "MORE": "hunter2"}),
        sample(environment={"KEY": "hunter2\0"}),
        sample(environment={"KEY": "hunter2", "OTHER": 5}),
        sample(environment="KEY=hunter2"),
        sample(secrets=["hunter2"]),
    ],
)
def test_no_reason_quotes_what_may_be_a_secret(message: dict[str, Any]) -> None:
    assert "hunter2" not in refused(message).reason


# -- templates --------------------------------------------------------------------------------------------------------


def test_a_request_that_names_a_template_alone_is_a_whole_versioned_spec() -> None:
    made = order(FROM_TEMPLATE, store=storing(template(**WHOLE)))
    body = json.loads(made.request["body"])
    assert body["template"] == {"name": "tiny", "version": 1}
    assert {key: body[key] for key in WHOLE} == WHOLE
    assert read_acceptance(made.request["body"], now=b.NOW).spec == made.spec
    assert made.spec.training.steps == 120


def test_the_requests_own_fields_win_part_by_part_and_lists_are_replaced() -> None:
    message = {
        **FROM_TEMPLATE,
        "training": {"steps": 70},
        "fleet": {"instance_types": ["c7i.xlarge"], "min_nodes": None},
    }
    asked = order(message, store=storing(template(**WHOLE))).asked
    assert (asked.training.steps, asked.training.global_batch) == (70, 16)
    assert (asked.fleet.instance_types, asked.fleet.fewest_nodes) == (("c7i.xlarge",), 2)


def test_the_newest_version_is_taken_unless_one_is_named() -> None:
    store = storing(template(10, **{**WHOLE, "report_s": 10}), template(9, **{**WHOLE, "report_s": 9}))
    assert order(FROM_TEMPLATE, store=store).asked.report_s == 10
    named = {**FROM_TEMPLATE, "template": {"name": "tiny", "version": 9}}
    assert order(named, store=store).asked.report_s == 9


def test_a_newer_version_does_not_make_a_second_job_of_a_second_delivery() -> None:
    store = storing(template(**WHOLE))
    first = order(FROM_TEMPLATE, store=store)
    store.put_template(template_data(read_template(template(2, **{**WHOLE, "report_s": 9}))))
    again = order(FROM_TEMPLATE, store=store)
    assert (again.job.id, again.request["body_sha256"]) == (first.job.id, first.request["body_sha256"])
    assert order({**FROM_TEMPLATE, "name": "other"}, store=store).job.id != first.job.id


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (template(colour="red"), "colour"),
        (template(dedup_id="x"), "dedup_id"),
        (template(template={"name": "x"}), "template"),
        (json.dumps(SAMPLE), "holdfast.job-template/1"),
    ],
)
def test_a_template_with_what_no_request_has_is_refused(text: str, words: str) -> None:
    with pytest.raises(Rejected) as caught:
        read_template(text)
    assert caught.value.code == "bad_template"
    assert words in caught.value.reason


def test_a_template_cannot_bring_in_what_a_request_may_not() -> None:
    store = storing(template(**WHOLE, environment={"LD_PRELOAD": "x"}))
    assert refused(FROM_TEMPLATE, store=store).code == "reserved_variable"


# -- references -------------------------------------------------------------------------------------------------------


def reference(**fields: Any) -> dict[str, Any]:
    return {"schema": "holdfast.job-request-ref/1", "uri": "s3://data/r.json", **fields}


def test_a_request_by_reference_is_the_same_job_as_the_request_itself() -> None:
    raw = json.dumps(SAMPLE).encode()
    files = FakeRequestFiles({("data", "r.json"): raw})
    by_reference = order(reference(sha256=hashlib.sha256(raw).hexdigest()), files=files)
    assert by_reference.job.id == order(SAMPLE).job.id
    assert by_reference.request == order(SAMPLE).request


def test_a_reference_arrives_wrapped_as_any_message_does() -> None:
    files = FakeRequestFiles({("data", "r.json"): json.dumps(SAMPLE).encode()})
    event = {"detail-type": "Training Job Requested", "detail": reference()}
    assert order(event, files=files).job.id == order(SAMPLE).job.id


def test_an_object_may_name_a_template() -> None:
    files = FakeRequestFiles({("data", "r.json"): json.dumps(FROM_TEMPLATE).encode()})
    assert order(reference(), files=files, store=storing(template(**WHOLE))).asked.training.steps == 120


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"", b"[]", b'{"schema": "holdfast.control/1"}'])
def test_an_object_that_is_no_request_is_refused(raw: bytes) -> None:
    assert refused(reference(), files=FakeRequestFiles({("data", "r.json"): raw})).code in (
        "not_json",
        "unknown_schema",
    )


# -- O-08 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("hello", "not_json"),
        ("", "not_json"),
        ("null", "not_json"),
        ('"a string"', "not_json"),
        ("42", "not_json"),
        ("[]", "not_json"),
        ('{"job_name":"a"', "not_json"),
        ("[" * 200_000, "not_json"),
        ("\ufeff", "not_json"),
        (json.dumps(SAMPLE).replace("0.001", "NaN"), "bad_value"),
        (json.dumps(SAMPLE).replace('"team"', '"name": "again", "team"'), "doubled_key"),
        (json.dumps(SAMPLE) + " " * (1_048_576 - len(json.dumps(SAMPLE))), "too_large"),
    ],
)
def test_o08_every_byte_string_is_accepted_or_refused_with_a_short_reason(body: str, code: str) -> None:
    rejected = refused(body)
    assert rejected.code == code
    assert len(rejected.reason) <= REASON_CHARACTERS + 3


def test_o08_a_byte_order_mark_is_as_if_it_were_not_there() -> None:
    assert order("\ufeff" + json.dumps(SAMPLE)) == order(SAMPLE)


# -- O-11 -------------------------------------------------------------------------------------------------------------

NUMBERS = {
    "training__learning_rate": 0.0003,
    "training__weight_decay": 1e-8,
    "limits__budget_usd": 30.40,
    "training__seed": 9_007_199_254_740_993,
    "training__clip_norm": 0.1,
}


def test_o11_ordinary_decimals_reach_table_and_trainer_with_the_same_value() -> None:
    made = order(sample(**NUMBERS))
    spec, row = from_item(to_item(encode(made.spec))), from_item(to_item({"budget_usd": made.job.budget_usd}))
    training = spec["training"]
    assert (training["learning_rate"], training["weight_decay"], training["clip_norm"]) == (0.0003, 1e-8, 0.1)
    assert training["seed"] == 9_007_199_254_740_993
    assert row["budget_usd"] == 30.40
    assert read_request(made.request["body"]).training.learning_rate == 0.0003


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("training__seed", 12_345_678_901_234_567_890_123),
        ("training__learning_rate", float("inf")),
        ("training__learning_rate", float("nan")),
        ("training__learning_rate", True),
        ("training__learning_rate", "3e-4"),
        ("limits__budget_usd", -0.0),
    ],
)
def test_o11_numbers_that_cannot_be_kept_exactly_are_refused_by_name(path: str, value: Any) -> None:
    assert path.replace("__", ".") in refused(sample(**{path: value})).reason


@pytest.mark.parametrize("value", [1e-200, 5e-324, 1e-131])
def test_o11_a_number_that_the_table_cannot_hold_is_refused_by_name(value: float) -> None:
    rejected = refused(sample(training__weight_decay=value))
    assert rejected.code == "bad_value"
    assert f"training.weight_decay is {value}" in rejected.reason
    assert "1e-130" in rejected.reason


def test_o11_a_number_beyond_a_double_is_refused_by_name() -> None:
    body = json.dumps(SAMPLE).replace("0.001", "1e400")
    assert "training.learning_rate" in refused(body).reason


# -- O-19 -------------------------------------------------------------------------------------------------------------

NAMES = ["train 🚀 v2", "团队/实验:1", "aws:prod", "../x", "é", "e\u0301", "a" * 80, "tiny! llama", "tiny llama"]
EXECUTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")


@pytest.mark.parametrize("name", NAMES)
def test_o19_an_accepted_name_is_shown_as_it_is_and_every_derived_name_is_legal(name: str) -> None:
    made = order(sample(name=name))
    assert made.job.name == name
    assert EXECUTION_NAME.fullmatch(f"{made.job.id}-999999")
    assert re.fullmatch(r"[a-z0-9/-]+", made.spec.prefix)
    assert re.fullmatch(r"[a-z0-9-]{1,128}", f"{made.job.id}-999999-19")


@pytest.mark.parametrize("name", ["a" * 300, "a^b|c;d", " x", "x ", "a\u202eb", "a\nb", "a\0b", ""])
def test_o19_any_other_name_is_refused_at_submit_with_the_rule(name: str) -> None:
    assert "name" in refused(sample(name=name)).reason


def test_o19_different_jobs_never_share_a_derived_name() -> None:
    ids = [
        order({key: value for key, value in sample(name=name).items() if key != "dedup_id"}).job.id for name in NAMES
    ]
    assert len(set(ids)) == len(NAMES)


# -- O-25 -------------------------------------------------------------------------------------------------------------

ATTACKS = [
    "x; touch PWNED #",
    "$(touch PWNED)",
    "`touch PWNED`",
    "x' ; touch PWNED ; '",
    'x" ; touch PWNED',
    "x\ntouch PWNED",
    "${IFS}",
    "--rdzv-endpoint=evil:1",
]


@pytest.mark.parametrize("text", ATTACKS)
def test_o25_a_name_team_type_zone_image_or_variable_name_like_a_command_is_refused(text: str) -> None:
    for changes in (
        {"name": text},
        {"team": text},
        {"fleet__instance_types": [text]},
        {"fleet__zones": [text]},
        {"image": {"uri": text}},
        {"environment": {text: "x"}},
        {"secrets": {text: "ssm:/x"}},
        {"secrets": {"A": f"ssm:/{text}"}},
        {"secrets": {"A": text}},
        {"template": {"name": text}},
    ):
        assert refused(sample(**changes), store=storing(template(**WHOLE))).reason


@pytest.mark.parametrize("text", ATTACKS)
def test_o25_an_argument_or_a_variable_stays_one_text_to_the_letter(text: str) -> None:
    spec = order(sample(image={"uri": "a/b:c", "command": ["train", text]}, environment={"A": text})).spec
    assert spec.image is not None
    assert spec.image.command == ("train", text)
    assert spec.environment == {"A": text}


# -- O-26 -------------------------------------------------------------------------------------------------------------

ROOT = f"s3://{BUCKET}/teams/research/"
ESCAPES = [
    f"{ROOT}../vision/run1",
    f"{ROOT}run1/../../vision",
    f"{ROOT}..%2fvision",
    f"{ROOT}%2e%2e/vision",
    f"{ROOT}run1//../..//vision",
    f"{ROOT}run\\..\\vision",
    f"{ROOT}./x",
    f"{ROOT}x/.",
    f"s3://{BUCKET}/teams/research",
    f"s3://{BUCKET}/teams/research-2/x",
    f"s3://{BUCKET}/teams/vision/x",
    f"s3://{BUCKET}//teams/research/x",
    f"s3://{BUCKET}/Teams/research/x",
    "s3://other-bucket/teams/research/x",
    "../vision/run1",
    "/vision",
    "",
    ".",
    f"{ROOT}x\0y",
]


@pytest.mark.parametrize("field", ["training__init_from", "checkpoint__resume_from"])
@pytest.mark.parametrize("uri", ESCAPES)
def test_o26_an_address_that_leaves_the_teams_part_is_refused_at_submit(field: str, uri: str) -> None:
    rejected = refused(sample(**{field: uri}))
    assert rejected.code in ("path_outside_team", "bucket_not_ours", "bad_location", "bad_value")


@pytest.mark.parametrize("uri", ESCAPES)
def test_o26_the_one_shared_check_refuses_it_too(uri: str) -> None:
    with pytest.raises(Rejected):
        team_key(uri, "checkpoint.resume_from", bucket=BUCKET, team="research")


def test_o26_an_address_inside_the_teams_part_is_its_own_key() -> None:
    uri = f"{ROOT}jobs/x-0123456789/saves/step-00000025.a0001.s01/"
    assert team_key(uri, "checkpoint.resume_from", bucket=BUCKET, team="research") == uri.removeprefix(
        f"s3://{BUCKET}/"
    )
    assert refused(sample(checkpoint__resume_from=uri)).code == "not_in_this_release"


@pytest.mark.parametrize("uri", ["s3://data/../x", "s3://data/a%2fb", "s3://DATA/x", "s3://data/", "s3:///x"])
def test_o26_a_reference_is_written_plainly(uri: str) -> None:
    with pytest.raises(Rejected):
        split_uri(uri, "uri")


def test_the_limit_of_an_object_is_that_of_a_message() -> None:
    assert LIMIT_BYTES == 262_144
