"""The verbs against real table and queue calls (moto): what they print, what they send, and how they fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import boto3
import pytest
from botocore.stub import Stubber

from holdfast.domain.baseline import Watch
from holdfast.domain.events import CancelRequested
from holdfast.domain.ownership import FleetIntent, Node
from holdfast.messages.job_request import read_request
from holdfast_cli import main
from holdfast_cli.stack import outputs
from tests.cli.cloud import AT, FLEET, JOB, NODE, SAMPLE, SAVE, Cloud, holdfast


def at_each_poll(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], Any]) -> None:
    """Let the world move on while `watch` sleeps; a sleep more than there are steps fails the test."""
    left = iter(steps)

    def sleep(seconds: float) -> None:
        assert seconds == main.POLL_S
        next(left)()

    monkeypatch.setattr(main.time, "sleep", sleep)


def test_submit_prints_the_id_and_puts_the_request_on_the_queue(cloud: Cloud) -> None:
    ran = holdfast("submit", str(SAMPLE))
    assert (ran.exit_code, ran.stdout.strip()) == (0, JOB)
    [body] = cloud.sent("RequestQueueUrl")
    assert read_request(json.dumps(body)) == read_request(SAMPLE.read_text())


def test_submit_reads_standard_input_and_takes_a_dedup_id(cloud: Cloud) -> None:
    ran = holdfast("submit", "-", "--dedup-id", "again", "--json", stdin=SAMPLE.read_text())
    answer = json.loads(ran.stdout)
    [body] = cloud.sent("RequestQueueUrl")
    assert body["dedup_id"] == "again"
    assert answer["job"].startswith("tiny-llama-on-the-standard-li-")
    assert answer["job"] != JOB
    assert answer["message_id"]


def test_submitting_what_was_accepted_already_is_the_same_job(cloud: Cloud) -> None:
    cloud.accept()
    assert holdfast("submit", str(SAMPLE)).stdout.strip() == JOB


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"priority": "high"}, 'priority is "high", a string'),
        ({"colour": "red"}, "colour is not a known field"),
        ({"schema": "holdfast.job-request/9"}, "holdfast.job-request/1"),
    ],
)
def test_a_wrong_request_is_refused_before_it_is_sent(cloud: Cloud, change: dict[str, Any], words: str) -> None:
    ran = holdfast("submit", "-", stdin=json.dumps({**json.loads(SAMPLE.read_text()), **change}))
    assert ran.exit_code == 2
    assert words in ran.stderr
    assert (ran.stdout, cloud.sent("RequestQueueUrl")) == ("", [])


def test_another_body_under_a_used_dedup_id_is_refused_with_the_way_out(cloud: Cloud) -> None:
    cloud.accept(priority=51)
    ran = holdfast("submit", str(SAMPLE))
    assert ran.exit_code == 2
    assert "--dedup-id" in ran.stderr
    assert cloud.sent("RequestQueueUrl") == []


def test_another_name_under_a_used_dedup_id_is_refused_with_the_first_name(cloud: Cloud) -> None:
    job = cloud.accept()
    ran = holdfast("submit", "-", stdin=json.dumps({**json.loads(SAMPLE.read_text()), "name": "another"}))
    assert ran.exit_code == 2
    assert job.id in ran.stderr
    assert repr(job.name) in ran.stderr
    assert cloud.sent("RequestQueueUrl") == []


def test_a_file_that_is_not_there_is_named(cloud: Cloud) -> None:
    ran = holdfast("submit", "nowhere.json")
    assert ran.exit_code == 2
    assert "nowhere.json cannot be read" in ran.stderr


def test_submit_and_wait_follows_the_job_from_before_its_acceptance_to_its_end(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_each_poll(monkeypatch, cloud.accept, lambda: cloud.run(JOB), lambda: cloud.end(JOB))
    ran = holdfast("submit", str(SAMPLE), "--wait")
    assert ran.exit_code == 0
    lines = ran.stdout.splitlines()
    assert lines[0] == JOB
    assert [line.split()[2] for line in lines[1:]] == ["queued", "running", "completed"]


def test_waiting_for_a_job_that_is_never_accepted_ends_with_where_to_look(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 60.0, 121.0])
    monkeypatch.setattr(main.time, "monotonic", lambda: next(clock))
    at_each_poll(monkeypatch, lambda: None)
    ran = holdfast("submit", str(SAMPLE), "--wait")
    assert ran.exit_code == 2
    assert "result queue" in ran.stderr


def test_list_shows_live_jobs_then_waiting_ones_by_place_then_ended_ones(cloud: Cloud) -> None:
    names = [
        cloud.accept(name=name, dedup_id=name, priority=priority).id
        for name, priority in (("waits", 10), ("first", 90), ("runs", 10), ("over", 10))
    ]
    cloud.run(names[2])
    cloud.run(names[3])
    cloud.end(names[3])
    other = cloud.accept(name="vision", team="vision", dedup_id="v").id
    listed = json.loads(holdfast("list", "--team", "research", "--json").stdout)
    assert [row["id"] for row in listed] == [names[2], names[1], names[0], names[3]]
    assert [row["phase"] for row in listed] == ["running", "queued", "queued", "completed"]
    everything = holdfast("list").stdout
    assert all(name in everything for name in (*names, other))
    assert names[3] not in holdfast("list", "--ended", "0").stdout


def test_list_reads_more_jobs_than_one_batch_takes(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast_cli.stack.BATCH_KEYS", 2)
    ids = {cloud.accept(dedup_id=str(number)).id for number in range(5)}
    assert {row["id"] for row in json.loads(holdfast("list", "--json").stdout)} == ids


def test_an_empty_list_says_how_to_begin(cloud: Cloud) -> None:
    assert "holdfast submit" in holdfast("list").stdout
    assert json.loads(holdfast("list", "--json").stdout) == []


def test_status_shows_phase_progress_and_the_last_committed_save(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.accept()
    cloud.run(JOB)
    cloud.store.open_intent(
        FleetIntent(fleet=FLEET, job=JOB, attempt=1, candidate=0, nodes=1, opened_at=AT, instances=(NODE,))
    )
    cloud.store.own(
        [Node(instance=NODE, job=JOB, fleet=FLEET, attempt=1, since_at=AT, step=40, loss=2.5, tokens_per_s=9e3)]
    )
    monkeypatch.setattr(main.time, "time", lambda: AT + 30 + 600)
    shown = holdfast("status", JOB).stdout
    for words in (JOB, "running", "step 40 of 120, loss 2.5000, 9,000 tokens/s", f"{SAVE.save}, 10 min ago", NODE):
        assert words in shown
    data = json.loads(holdfast("status", JOB, "--json").stdout)
    assert (data["step"], data["steps"], data["saved_age_s"], data["intent"], data["attempt"]) == (
        40,
        120,
        600,
        "run",
        1,
    )
    assert [machine["instance"] for machine in data["machines"]] == [NODE]


def test_status_shows_the_evaluation_loss_and_why_steps_are_slow(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.accept()
    cloud.run(JOB)
    cloud.store.open_intent(
        FleetIntent(fleet=FLEET, job=JOB, attempt=1, candidate=0, nodes=1, opened_at=AT, instances=(NODE,))
    )
    slow = "waiting for other ranks takes 250 ms where 200 is usual (+25%), measured on rank 0 on i-1"
    node = Node(instance=NODE, job=JOB, fleet=FLEET, attempt=1, since_at=AT, step=40, loss=2.5, evaluation_loss=2.75)
    cloud.store.own([replace(node, watch=Watch(attempt=1, told=slow, signals=1))])
    shown = holdfast("status", JOB).stdout
    assert "loss 2.5000, 0 tokens/s, evaluation loss 2.7500" in shown
    assert f"slow steps  {slow}" in " ".join(shown.split("\n"))
    assert json.loads(holdfast("status", JOB, "--json").stdout)["machines"][0]["watch"]["told"] == slow


def test_status_says_when_a_cancel_is_asked_for(cloud: Cloud) -> None:
    cloud.accept()
    cloud.run(JOB)
    cloud.happens(JOB, CancelRequested(at=AT + 40, request="cancel", cause="ops"))
    assert "running (cancel asked)" in holdfast("status", JOB).stdout


def test_what_a_log_line_carries_does_not_steer_the_terminal(cloud: Cloud) -> None:
    cloud.accept()
    job = cloud.happens(JOB, CancelRequested(at=AT + 1, request="cancel", cause="\x1b]0;owned\x07[red]"))
    shown = holdfast("events", JOB).stdout + holdfast("status", JOB).stdout
    assert job.over
    assert "\x1b" not in shown
    assert "[red]" in shown


def test_events_tells_the_history_oldest_first(cloud: Cloud) -> None:
    cloud.accept()
    cloud.run(JOB)
    items = json.loads(holdfast("events", JOB, "--json").stdout)
    assert [item["kind"] for item in items] == [
        "accepted",
        "attempt_started", "fleet_intended", "fleet_bought", "all_ready", "training_started", "checkpoint_saved"
    ]  # fmt: skip
    assert (items[1]["before"], items[1]["after"], items[1]["attempt"]) == ("queued", "launching", 1)
    shown = holdfast("events", JOB).stdout.splitlines()
    assert "accepted" in shown[1]
    assert "queued -> launching" in shown[2]
    assert len(shown) == 1 + len(items)


def test_watch_prints_one_line_a_change_until_the_job_is_over(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.accept()
    at_each_poll(monkeypatch, lambda: None, lambda: cloud.run(JOB), lambda: None, lambda: cloud.end(JOB))
    ran = holdfast("watch", JOB)
    assert ran.exit_code == 0
    assert [line.split()[2] for line in ran.stdout.splitlines()] == ["queued", "running", "completed"]


def test_watch_of_a_job_that_did_not_complete_exits_1_and_prints_json_lines(cloud: Cloud) -> None:
    cloud.accept()
    cloud.happens(JOB, CancelRequested(at=AT + 1, request="cancel"))
    ran = holdfast("watch", JOB, "--json")
    assert ran.exit_code == 1
    assert [json.loads(line)["phase"] for line in ran.stdout.splitlines()] == ["cancelled"]


def test_cancel_asks_through_the_control_queue(cloud: Cloud) -> None:
    cloud.accept()
    ran = holdfast("cancel", JOB, "--json")
    assert (ran.exit_code, json.loads(ran.stdout)["action"]) == (0, "cancel")
    assert cloud.sent("ControlQueueUrl") == [
        {"schema": "holdfast.control/1", "job": JOB, "action": "cancel", "requested_by": "ops", "dedup_id": ANY}
    ]


def test_cancelling_an_ended_job_is_refused_and_nothing_is_sent(cloud: Cloud) -> None:
    cloud.accept()
    cloud.happens(JOB, CancelRequested(at=AT + 1, request="cancel"))
    ran = holdfast("cancel", JOB)
    assert ran.exit_code == 2
    assert "cancelled already" in ran.stderr
    assert cloud.sent("ControlQueueUrl") == []


@pytest.mark.parametrize("verb", ["status", "watch", "events", "cancel"])
def test_a_job_that_does_not_exist_is_named_with_the_way_out(cloud: Cloud, verb: str) -> None:
    ran = holdfast(verb, "no-such-job")
    assert ran.exit_code == 2
    assert "no-such-job" in ran.stderr
    assert "holdfast list" in ran.stderr


@pytest.fixture
def cloudformation(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stubber]:
    """CloudFormation with recorded answers: each may be asked for once, and all must be."""
    client, real = boto3.client("cloudformation"), boto3.client
    monkeypatch.delenv("HOLDFAST_OUTPUTS")
    monkeypatch.setattr(
        boto3, "client", lambda name, **more: client if name == "cloudformation" else real(name, **more)
    )
    with Stubber(client) as answers:
        yield answers
        answers.assert_no_pending_responses()


def test_names_come_from_the_outputs_of_the_stack_and_are_read_once(cloud: Cloud, cloudformation: Stubber) -> None:
    told = [{"OutputKey": key, "OutputValue": value} for key, value in cloud.outputs.items()]
    stack = {"StackName": "mine", "CreationTime": datetime.now(UTC), "StackStatus": "CREATE_COMPLETE", "Outputs": told}
    cloudformation.add_response("describe_stacks", {"Stacks": [stack]}, {"StackName": "mine"})
    job = cloud.accept().id
    assert job in holdfast("list", "--stack", "mine").stdout
    assert holdfast("status", job, "--stack", "mine").exit_code == 0


def test_a_stack_that_does_not_exist_is_named_with_the_way_out(cloudformation: Stubber) -> None:
    cloudformation.add_client_error("describe_stacks", "ValidationError", "Stack with id elsewhere does not exist")
    ran = holdfast("list", "--stack", "elsewhere")
    assert ran.exit_code == 2
    for words in ("elsewhere", "us-east-1", "--stack"):
        assert words in ran.stderr


def test_a_missing_permission_is_named(cloudformation: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    cloudformation.add_client_error("describe_stacks", "AccessDenied", "no cloudformation:DescribeStacks")
    monkeypatch.setenv("HOLDFAST_STACK", "mine")
    ran = holdfast("list")
    assert ran.exit_code == 2
    assert "DescribeStacks is not allowed" in ran.stderr


def test_a_stack_without_an_output_is_of_another_release(cloud: Cloud) -> None:
    cloud.outputs_file.write_text(json.dumps({"JobsTableName": "jobs"}))
    ran = holdfast("list")
    assert ran.exit_code == 2
    assert "no output OrdersTableName" in ran.stderr


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_unreadable_outputs_file_is_named(cloud: Cloud, content: str | None) -> None:
    cloud.outputs_file.unlink() if content is None else cloud.outputs_file.write_text(content)
    ran = holdfast("list")
    assert ran.exit_code == 2
    assert "HOLDFAST_OUTPUTS names" in ran.stderr


def test_a_table_that_is_gone_is_told_in_the_words_of_aws(cloud: Cloud) -> None:
    boto3.client("dynamodb").delete_table(TableName="jobs")
    ran = holdfast("status", JOB)
    assert ran.exit_code == 2
    assert "ResourceNotFoundException" in ran.stderr


def test_an_endpoint_where_nothing_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("HOLDFAST_OUTPUTS", raising=False)
    monkeypatch.setattr("holdfast_cli.stack.CONFIG", None)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    outputs.cache_clear()
    ran = holdfast("list")
    assert ran.exit_code == 2
    assert "AWS_ENDPOINT_URL is http://127.0.0.1:9: is it up?" in ran.stderr


def test_without_a_region_the_user_learns_how_to_set_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION", "HOLDFAST_OUTPUTS", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    outputs.cache_clear()
    ran = holdfast("list")
    assert ran.exit_code == 2
    assert "AWS_REGION" in ran.stderr
