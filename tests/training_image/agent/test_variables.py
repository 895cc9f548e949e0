"""Variables of a job reach its ranks as data; secrets are resolved on the node and stand in no report and no file."""

import sys
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from agent.cloud import SecretStores
from agent.hygiene import marked
from agent.ranks import Seats, rank_environment
from agent.secrets import SecretUnavailable, resolve, without
from job_contract.spec import ImageSpec

ARN = "arn:aws:secretsmanager:us-east-1:123456789012:secret:key-AbCdEf"
SECRETS = {"API_KEY": f"secretsmanager:{ARN}", "TOKEN": "ssm:/research/token"}
VALUES = {ARN: "hunter2; touch PWNED", "/research/token": "swordfish"}
SEATS = Seats(
    job="j", attempt=1, node_rank=0, nodes=1, ranks_per_node=1, leader_ip="127.0.0.1", leader_port=1, interface="lo"
)
ATTACKS = ["x; touch PWNED #", "$(touch PWNED)", "`touch PWNED`", "x' ; touch PWNED ; '", "x\ntouch PWNED", "${IFS}"]
PRINT = "import os, sys; print(ascii(os.environ['A']), sys.argv[1:-1]); sys.exit(1)"


def environment_of_a_rank(node):
    [pid] = node.agent.attempt.ranks.pids().values()
    raw = Path(f"/proc/{pid}/environ").read_bytes()
    return dict(part.partition("=")[::2] for part in raw.decode().split("\0") if part)


def started(node, play, **changes):
    node.orders.value = play.seen("run", 3, spec=play.spec(**changes))
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)


def test_environment_and_secrets_reach_every_rank_and_no_file(start_node, play):
    node = start_node()
    node.stores.values = VALUES
    started(node, play, environment={"GREETING": "hello"}, secrets=SECRETS)
    environment = environment_of_a_rank(node)
    assert (environment["GREETING"], environment["TOKEN"]) == ("hello", "swordfish")
    assert environment["API_KEY"] == "hunter2; touch PWNED"
    files = [path.read_bytes() for path in node.root.rglob("*") if path.is_file()]
    assert not [raw for raw in files if b"swordfish" in raw or b"hunter2" in raw]


def test_what_the_agent_sets_wins_over_the_jobs_variables():
    given = rank_environment({"LANG": "C"}, SEATS, 0, Path("/x"), {"RANK": "7", "LANG": "de", "OMP_NUM_THREADS": "4"})
    assert (given["RANK"], given["LANG"], given["OMP_NUM_THREADS"]) == ("0", "de", "4")


@pytest.mark.parametrize("text", ATTACKS)
def test_o25_an_argument_and_a_variable_reach_the_rank_as_one_text(start_node, play, text):
    node = start_node()
    image = ImageSpec(uri="x", command=(sys.executable, "-c", PRINT, text))
    node.orders.value = play.seen("run", 3, spec=play.spec(environment={"A": text}, image=image))
    tail = node.wait_for("failed").log_tail
    assert f"{text!a} {[text]!r}" in tail
    assert not list(node.root.rglob("PWNED"))


@pytest.mark.parametrize(
    ("code", "failure"),
    [("ResourceNotFoundException", "user_error"), ("AccessDeniedException", "user_error"), ("Throttling", "crash")],
)
def test_a_reference_that_cannot_be_resolved_fails_the_attempt_by_name(start_node, play, code, failure):
    node = start_node()
    node.stores.code = code
    node.orders.value = play.seen("run", 3, spec=play.spec(secrets={"TOKEN": "ssm:/research/token"}))
    failed = node.wait_for("failed")
    assert failed.failure == failure
    assert "TOKEN (ssm:/research/token)" in failed.reason
    assert code in failed.reason
    assert marked(node.root) == []


def test_a_secret_that_a_rank_prints_is_not_in_the_report(start_node, play):
    node = start_node()
    node.stores.values = {"/a": "swordfish"}
    image = ImageSpec(uri="x", command=(sys.executable, "-c", PRINT))
    node.orders.value = play.seen("run", 3, spec=play.spec(secrets={"A": "ssm:/a"}, image=image))
    tail = node.wait_for("failed").log_tail
    assert "swordfish" not in tail
    assert "[A]" in tail


def test_the_longest_of_two_secrets_is_taken_out_whole():
    assert without("x swordfish2 y", {"A": "swordfish", "B": "swordfish2"}) == "x [B] y"
    assert without("x y", {"A": " ", "B": ""}) == "x y"


@pytest.fixture
def aws(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    with mock_aws():
        yield boto3.session.Session(region_name="us-east-1")


def test_both_stores_of_aws_are_read(aws):
    arn = aws.client("secretsmanager").create_secret(Name="key", SecretString="hunter2")["ARN"]
    aws.client("ssm").put_parameter(Name="/a/b", Value="swordfish", Type="SecureString")
    found = resolve({"KEY": f"secretsmanager:{arn}", "TOKEN": "ssm:/a/b"}, SecretStores("us-east-1"))
    assert found == {"KEY": "hunter2", "TOKEN": "swordfish"}


@pytest.mark.parametrize("reference", [f"secretsmanager:{ARN}", "ssm:/none", "vault:x"])
def test_a_reference_to_nothing_is_final_and_named(aws, reference):
    with pytest.raises(SecretUnavailable, match="KEY") as caught:
        resolve({"KEY": reference}, SecretStores("us-east-1"))
    assert caught.value.final
    assert reference in str(caught.value)
    assert caught.value.__cause__ is None
    assert not isinstance(caught.value.__context__, ClientError) or caught.value.__suppress_context__
