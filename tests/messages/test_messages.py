"""Control requests, AWS events, node reports, step payloads in; results and refusals out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.domain.errors import Rejected
from holdfast.domain.job import Job, Saved
from holdfast.domain.ledger import Quota
from holdfast.domain.phase import Phase
from holdfast.messages.aws_event import instance_id
from holdfast.messages.control_request import SetQuota, control_identity, read_control
from holdfast.messages.execution_status_change import read_execution_status_change
from holdfast.messages.instance_state_change import read_instance_state_change
from holdfast.messages.node_report import read_report
from holdfast.messages.result_message import refusal_id, refusal_message, result_id, result_message
from holdfast.messages.spot_interruption import read_spot_interruption
from holdfast.messages.step_input import LeaveTokenInput, StepInput, read_step
from job_contract import reports
from job_contract.orders import Wait
from tests import builders as b

EVENTS = Path(__file__).parents[2] / "events"
JOB = "tiny-llama-on-the-standard-li-fcea9e2ede"
NODE = "i-0a1b2c3d4e5f60001"


def sample(name: str) -> dict[str, Any]:
    return json.loads((EVENTS / f"{name}.json").read_text())


def control(**changes: Any) -> str:
    return json.dumps({**sample("control-cancel"), **changes})


def test_a_cancel_is_understood_plain_and_wrapped() -> None:
    plain = read_control(control())
    assert (plain.job, plain.action, plain.requested_by) == (JOB, "cancel", "ops")
    assert read_control(json.dumps({"Type": "Notification", "Message": control()})) == plain
    assert read_control(json.dumps({"detail-type": "Cancel", "detail": json.loads(control())})) == plain


def test_two_cancels_of_a_job_are_one_wish_unless_dedup_ids_tell_them_apart() -> None:
    assert control_identity(read_control(control())) == control_identity(read_control(control(requested_by="me")))
    assert control_identity(read_control(control(dedup_id="a"))) != control_identity(read_control(control()))


def quota(**changes: Any) -> str:
    return json.dumps({**sample("control-quota"), **changes})


def test_the_sample_of_a_quota_is_read_and_changes_what_it_names() -> None:
    asked = read_control(quota())
    assert isinstance(asked, SetQuota)
    assert asked.scope == ("team", "research")
    known = Quota(nodes=4, preempt_from=50, version=3)
    assert asked.applied(known) == Quota(nodes=4, gpus=64, weight=2.0, preempt_from=90, preemptible=True)
    assert asked.applied(known).version == 3


def test_none_takes_a_limit_away_and_clear_all_of_them() -> None:
    known = Quota(nodes=4, gpus=8, weight=2.0, preempt_from=50, preemptible=False)
    body = {"schema": "holdfast.control/1", "action": "quota", "team": "research"}
    lifted = read_control(json.dumps({**body, "gpus": "none", "preempt_from": "none"}))
    cleared = read_control(json.dumps({**body, "clear": True}))
    assert isinstance(lifted, SetQuota)
    assert isinstance(cleared, SetQuota)
    assert lifted.applied(known) == Quota(nodes=4, weight=2.0, preemptible=False)
    assert cleared.applied(known) == Quota()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"market": "spot"}, "bad_quota", "one team or of one market"),
        ({"team": None}, "bad_quota", "one team or of one market"),
        ({"team": None, "market": "spot"}, "bad_quota", "weight, preempt_from, preemptible is of teams only"),
        ({"clear": True}, "bad_quota", "clear takes the whole quota away"),
        ({"team": "Research"}, "bad_value", "team is"),
        ({"market": "sopt"}, "bad_value", "spot, on_demand or mixed"),
        ({"gpus": -1}, "bad_value", "gpus is -1"),
        ({"gpus": True}, "bad_value", "gpus is true"),
        ({"gpus": 1.5}, "bad_value", "gpus is 1.5"),
        ({"gpus": "64"}, "bad_value", "a whole number from 0 to 1000000"),
        ({"nodes": 1_000_001}, "bad_value", "nodes is 1000001"),
        ({"weight": 0}, "bad_value", "weight is 0"),
        ({"weight": 1e7}, "bad_value", "weight is"),
        ({"preempt_from": 101}, "bad_value", "preempt_from is 101"),
        ({"preemptible": "yes"}, "bad_value", "preemptible is"),
        ({"clear": False}, "bad_value", "clear is false"),
        ({"gpu": 8}, "unknown_field", "gpus"),
        ({"job": "demo"}, "unknown_field", "job is not a known field"),
    ],
)
def test_a_quota_that_makes_no_sense_is_refused_with_the_way_out(changes: Any, code: str, words: str) -> None:
    with pytest.raises(Rejected) as caught:
        read_control(quota(**changes))
    assert caught.value.code == code
    assert words in caught.value.reason


def test_a_quota_wish_without_anything_to_set_is_refused() -> None:
    body = {"schema": "holdfast.control/1", "action": "quota", "team": "research"}
    with pytest.raises(Rejected, match="nothing is to be set"):
        read_control(json.dumps(body))


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"schema": "holdfast.control/2"}, "unknown_schema", "holdfast.control/1"),
        ({"schema": "holdfast.job-request/1"}, "unknown_schema", "this queue takes"),
        ({"action": "dance"}, "unknown_action", "known are cancel, pause"),
        ({"job": "JOB#1"}, "bad_value", "as submit printed it"),
        ({"jobs": "x"}, "unknown_field", "did you mean 'job'"),
        ({"requested_by": "\x1b[31m"}, "bad_value", "printable"),
    ],
)
def test_a_wrong_control_request_is_refused_with_the_way_out(changes: Any, code: str, words: str) -> None:
    with pytest.raises(Rejected) as caught:
        read_control(control(**changes))
    assert caught.value.code == code
    assert words in caught.value.reason


@pytest.mark.parametrize("name", ["ec2-spot-interruption-warning", "ec2-spot-interruption-warning-zone-arn"])
def test_a_spot_warning_gives_the_instance_two_minutes(name: str) -> None:
    notice = read_spot_interruption(sample(name))
    assert (notice.instance_id, notice.at, notice.deadline_at) == (NODE, 1796059205.0, 1796059325.0)


def test_a_hibernation_gives_no_time_at_all() -> None:
    notice = read_spot_interruption(sample("ec2-spot-interruption-warning-hibernate"))
    assert notice.deadline_at == notice.at


@pytest.mark.parametrize(
    ("name", "going"),
    [
        ("ec2-instance-state-change-running", False),
        ("ec2-instance-state-change-shutting-down", True),
        ("ec2-instance-state-change-terminated", True),
    ],
)
def test_a_state_change_says_whether_the_instance_is_going(name: str, going: bool) -> None:
    change = read_instance_state_change(sample(name))
    assert (change.instance_id, change.is_going) == (NODE, going)


@pytest.mark.parametrize(
    "text",
    [
        NODE,
        NODE.upper(),
        f" {NODE}\n",
        f"arn:aws:ec2:us-east-1:123456789012:instance/{NODE}",
        f"arn:aws:ec2:us-east-1b:instance/{NODE}",
        f"arn:aws-cn:ec2:cn-north-1:123456789012:instance/{NODE.upper()}",
    ],
)
def test_an_instance_has_one_spelling(text: str) -> None:
    assert instance_id(text) == NODE


@pytest.mark.parametrize("text", ["", "i-", "i-xyz", "i-0a1b2c3d4", "vol-0a1b2c3d4e5f60001", f"{NODE}0", "i/0a1b2c3d"])
def test_what_is_no_instance_id_is_refused(text: str) -> None:
    with pytest.raises(Rejected, match="bad_instance_id"):
        instance_id(text)


def test_the_eight_digits_of_old_instance_ids_are_known() -> None:
    assert instance_id("i-1234abcd") == "i-1234abcd"


def test_new_fields_of_an_aws_event_are_ignored() -> None:
    event = sample("ec2-spot-interruption-warning")
    event["detail"]["instance-lifecycle"] = "spot"
    event["replay-name"] = "x"
    assert read_spot_interruption(event).instance_id == NODE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"time": "yesterday"}, "time"),
        ({"time": "2026-11-30T17:20:05"}, "time"),
        ({"detail": {}}, "detail.instance-id"),
        ({"detail": None}, "detail"),
    ],
)
def test_an_event_of_another_form_is_refused_by_the_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(Rejected, match=words):
        read_spot_interruption({**sample("ec2-spot-interruption-warning"), **change})


def test_an_instance_id_that_is_none_is_refused_within_its_event() -> None:
    with pytest.raises(Rejected, match="bad_instance_id"):
        read_instance_state_change(
            {**sample("ec2-instance-state-change-terminated"), "detail": {"instance-id": "mine", "state": "terminated"}}
        )


@pytest.mark.parametrize(
    ("name", "status"),
    [("failed", "FAILED"), ("timed-out", "TIMED_OUT"), ("aborted", "ABORTED"), ("succeeded", "SUCCEEDED")],
)
def test_an_ended_execution_names_its_job_and_attempt(name: str, status: str) -> None:
    change = read_execution_status_change(sample(f"sfn-execution-{name}"))
    assert (change.job, change.attempt, change.status) == (JOB, 1, status)
    assert change.ended_at == 1796061605.123


@pytest.mark.parametrize("left", [None, "", "not json", "{}", '{"job_id": "x"}', "[]", '{"job": "x", "attempt": 0}'])
def test_without_a_readable_input_the_executions_name_tells_job_and_attempt(left: str | None) -> None:
    event = sample("sfn-execution-failed")
    event["detail"] |= {"input": left, "name": "a-job-with-12-dashes-0123456789-12", "stopDate": None}
    change = read_execution_status_change(event)
    assert (change.job, change.attempt) == ("a-job-with-12-dashes-0123456789", 12)
    assert change.ended_at == change.at


@pytest.mark.parametrize("name", ["nightly", "-1", "job-", "job-x", "job-²", "job-0"])
def test_an_execution_that_is_none_of_ours_is_refused(name: str) -> None:
    event = sample("sfn-execution-failed")
    event["detail"] |= {"input": None, "name": name}
    with pytest.raises(Rejected, match="bad_event"):
        read_execution_status_change(event)


def node_record(body: Any, sender: str = f"AROAEXAMPLEEXAMPLE123:{NODE}") -> dict[str, Any]:
    text = body if isinstance(body, str) else json.dumps(body)
    return {"body": text, "attributes": {"SenderId": sender}}


def test_every_kind_of_report_is_read_with_its_sender() -> None:
    read = [read_report(record) for record in sample("sqs-node-reports")["Records"]]
    assert {report.kind for report, _ in read} == set(reports.KINDS)
    assert {sender for _, sender in read} == {NODE}
    assert {report.job for report, _ in read} == {JOB}


@pytest.mark.parametrize(
    "sender", ["", NODE, f"AROA:{NODE[:-1]}2", f"AROA:x{NODE}", f"AROA:{NODE}:other", "AIDAJXNJGGKNS7OSV23OI"]
)
def test_a_node_cannot_speak_for_another(sender: str) -> None:
    body = sample("contract/v1/report-heard")
    with pytest.raises(Rejected, match="wrong_sender"):
        read_report(node_record(body, sender))
    with pytest.raises(Rejected, match="wrong_sender"):
        read_report({"body": json.dumps(body)})


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("{", "not_json"),
        ("[]", "not_json"),
        ("[" * 100_000, "not_json"),
        ({"contract": 1, "kind": "sung"}, "bad_report"),
        ({"contract": 1}, "bad_report"),
        ({"contract": 2, "kind": "heard"}, "bad_report"),
        ({"contract": 1, "kind": "heard", "job": JOB}, "bad_report"),
        ({"contract": 1, "kind": "heard", "job": JOB, "attempt": {}, "instance": NODE}, "bad_report"),
    ],
)
def test_what_is_no_report_is_refused(body: Any, code: str) -> None:
    with pytest.raises(Rejected) as caught:
        read_report(node_record(body))
    assert caught.value.code == code


def test_payloads_of_steps_are_read() -> None:
    assert read_step(StepInput, sample("step-launch-fleet")) == StepInput(job=JOB, attempt=1)
    left = read_step(LeaveTokenInput, sample("step-leave-token"))
    assert (left.wait, left.again) == (Wait.TRAINING, False)


def test_a_payload_of_another_release_may_carry_more_but_not_less() -> None:
    payload = sample("step-leave-token")
    assert read_step(LeaveTokenInput, {**payload, "heartbeat_s": 30}).attempt == 1
    for wrong in ({"attempt": "1"}, {"attempt": True}, {"attempt": 0}, {"wait": "nap"}, {"token": ""}, {"job": None}):
        with pytest.raises(Rejected, match="bad_step_input"):
            read_step(LeaveTokenInput, {**payload, **wrong})


def ended_job(**changes: Any) -> Job:
    facts: dict[str, Any] = {
        "id": JOB,
        "team": "research",
        "name": "tiny llama",
        "priority": 50,
        "submitted_at": 1.0,
        "spec_id": "s",
        "nodes": 2,
        "market": "spot",
        "attempts_limit": 5,
        "run_s": 100,
        "wait_s": 100,
        "phase": Phase.COMPLETED,
        "phase_at": 9.0,
        "attempt": 2,
        "step": 120,
        "interruptions": 1,
        "reason": "all steps are trained",
        "saved": Saved(save="step-00000120.a0002.s03", manifest_sha256="ab" * 32, at=8.0),
        "lost_steps": 3,
        "node_seconds": 1500.5,
        "counted_usd": 1.5,
        "ended_at": 10.0,
    }
    return Job(**{**facts, **changes})


def test_a_result_says_how_the_job_ended_and_where_its_checkpoint_is() -> None:
    assert result_message(ended_job(), bucket="checkpoints") == {
        "schema": "holdfast.result/1",
        "job": JOB,
        "name": "tiny llama",
        "team": "research",
        "phase": "completed",
        "exit_class": "completed",
        "reason": "all steps are trained",
        "attempts": 2,
        "step": 120,
        "lost_steps": 3,
        "interruptions": 1,
        "node_seconds": 1500.5,
        "submitted_at": 1.0,
        "ended_at": 10.0,
        "artifacts": {
            "report": f"s3://checkpoints/teams/research/jobs/{JOB}/report.html",
            "checkpoint": f"s3://checkpoints/teams/research/jobs/{JOB}/saves/step-00000120.a0002.s03/",
        },
        "cost_usd": 1.5,
    }


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "completed"),
        ({"phase": Phase.CANCELLED}, "cancelled"),
        ({"phase": Phase.FAILED, "failure": "out_of_memory"}, "out_of_memory"),
        ({"phase": Phase.FAILED, "failure": None}, "gave_up"),
    ],
)
def test_a_result_has_one_word_for_how_the_job_ended(changes: dict[str, Any], told: str) -> None:
    assert result_message(ended_job(**changes), bucket="checkpoints")["exit_class"] == told


def test_a_job_that_failed_before_its_first_save_has_a_class_and_no_checkpoint() -> None:
    message = result_message(ended_job(phase=Phase.FAILED, failure="user_error", saved=None), bucket="checkpoints")
    assert (message["phase"], message["failure"]) == ("failed", "user_error")
    assert list(message["artifacts"]) == ["report"]


def test_a_refusal_echoes_what_identifies_the_request() -> None:
    body = json.dumps({"detail-type": "x", "detail": {"name": "n", "dedup_id": "d", "team": 5, "steps": 1}})
    assert refusal_message(Rejected("bad_value", "why"), body) == {
        "schema": "holdfast.result/1",
        "refused": True,
        "code": "bad_value",
        "reason": "why",
        "name": "n",
        "dedup_id": "d",
    }


@pytest.mark.parametrize("body", ["{", "[]", "x" * 300_000, '{"name": "\\ud800"}'])
def test_a_refusal_of_an_unreadable_body_still_says_why(body: str) -> None:
    assert refusal_message(Rejected("not_json", "why"), body)["reason"] == "why"


def test_results_and_refusals_keep_their_ids_when_told_again() -> None:
    assert result_id(b.a_job(id=JOB)) == f"{JOB}#result"
    assert result_id(b.a_job(id=JOB, branch=2)) == f"{JOB}#result#2"
    assert refusal_id("x") == refusal_id("x") != refusal_id("y")
    # SQS takes ids of up to 128 characters.
    assert len(refusal_id("x")) <= 128
