"""Verbs of the person who operates the stack: wishes, explanations, machines, saves, and what failed."""

from __future__ import annotations

import hashlib
import io
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import boto3
import pytest
from botocore.response import StreamingBody
from botocore.stub import Stubber

from holdfast.domain.events import (
    AllReady,
    AttemptClosed,
    AttemptStarted,
    CancelRequested,
    CapacityLooked,
    CapacityRefused,
    CheckpointSaved,
    EarlySaveAdvised,
    Failed,
    FleetBought,
    FleetIntended,
    FleetLost,
    InterruptionNoticed,
    LimitPassed,
    PauseRequested,
    TrainingStarted,
)
from holdfast.domain.ownership import FleetIntent, Node, Ownership, Ready
from holdfast.messages.control_request import read_control
from holdfast_cli import ask, main
from job_contract.checkpoint_layout import (
    Head,
    Manifest,
    Part,
    SavedFile,
    SavePointer,
    file_key,
    head_key,
    job_prefix,
    manifest_key,
    parse_save_name,
    part_key,
    seal,
)
from tests.cli.cloud import AT, BUCKET, FLEET, JOB, NODE, SAVE, Cloud, holdfast

LATER = SavePointer(save="step-00000050.a0001.s02", manifest_sha256="cd" * 32)


def told(*words: str) -> Any:
    """The JSON that a verb prints."""
    ran = holdfast(*words, "--json")
    assert ran.exit_code == 0, ran.stderr
    return json.loads(ran.stdout)


# -- wishes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("pause", JOB), {"action": "pause", "job": JOB}),
        (("checkpoint", JOB), {"action": "checkpoint", "job": JOB}),
        (("cancel", JOB), {"action": "cancel", "job": JOB}),
        (("priority", JOB, "90"), {"action": "priority", "job": JOB, "priority": 90}),
        (
            ("extend", JOB, "--run-s", "9000", "--budget-usd", "7.5"),
            {"action": "extend", "job": JOB, "run_s": 9000, "budget_usd": 7.5},
        ),
        (("hold",), {"action": "hold"}),
        (("hold", "--team", "research"), {"action": "hold", "team": "research"}),
        (("unhold", "--team", "research"), {"action": "unhold", "team": "research"}),
    ],
)
def test_a_wish_is_one_message_that_the_supervisor_can_read(
    cloud: Cloud, words: tuple[str, ...], values: dict[str, Any]
) -> None:
    cloud.accept()
    cloud.run(JOB)
    assert told(*words)["action"] == values["action"]
    [sent] = cloud.sent("ControlQueueUrl")
    assert sent == {"schema": "holdfast.control/1", "requested_by": "ops", "dedup_id": ANY, **values}
    assert read_control(json.dumps(sent)).action == values["action"]


def test_the_same_wish_asked_twice_is_two_wishes(cloud: Cloud) -> None:
    cloud.accept()
    cloud.run(JOB)
    told("priority", JOB, "90")
    told("priority", JOB, "90")
    first, second = cloud.sent("ControlQueueUrl")
    assert first["dedup_id"] != second["dedup_id"]


def test_a_paused_job_goes_on_with_another_number_of_machines(cloud: Cloud) -> None:
    cloud.accept()
    cloud.happens(JOB, PauseRequested(at=AT + 1, request="p"))
    ran = holdfast("resume", JOB, "--nodes", "4")
    assert "4 machines" in ran.stdout
    [sent] = cloud.sent("ControlQueueUrl")
    assert (sent["action"], sent["nodes"]) == ("resume", 4)


def test_an_ended_job_is_tried_again_from_a_save_of_choice(cloud: Cloud) -> None:
    cloud.accept()
    cloud.run(JOB)
    cloud.end(JOB)
    told("retry", JOB, "--from", SAVE.save)
    told("extend", JOB, "--run-s", "9000")
    retry, extend = cloud.sent("ControlQueueUrl")
    assert (retry["action"], retry["save"]) == ("retry", SAVE.save)
    assert (extend["action"], extend["run_s"]) == ("extend", 9000)


@pytest.mark.parametrize(
    ("words", "state", "sentence"),
    [
        (("pause", JOB), "ended", "holdfast retry"),
        (("pause", JOB), "paused", "holdfast resume"),
        (("resume", JOB), "running", "pause it first"),
        (("checkpoint", JOB), "queued", "only a running job"),
        (("retry", JOB), "running", "only a job that has ended"),
        (("retry", JOB, "--from", "newest"), "ended", "a save's name"),
        (("priority", JOB, "90"), "ended", "completed already"),
        (("extend", JOB), "running", "--budget-usd"),
        (("hold", "--team", "No Such"), "running", "team is"),
        (("priority", "no-such-job", "9"), "queued", "holdfast list"),
    ],
)
def test_a_wish_that_cannot_be_granted_is_refused_before_it_is_sent(
    cloud: Cloud, words: tuple[str, ...], state: str, sentence: str
) -> None:
    cloud.accept()
    if state == "paused":
        cloud.happens(JOB, PauseRequested(at=AT + 1, request="p"))
    if state in ("running", "ended"):
        cloud.run(JOB)
    if state == "ended":
        cloud.end(JOB)
    ran = holdfast(*words)
    assert ran.exit_code == 2
    assert sentence in ran.stderr
    assert cloud.sent("ControlQueueUrl") == []


def at_each_poll(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], Any]) -> None:
    left = iter(steps)
    monkeypatch.setattr(ask.time, "sleep", lambda seconds: next(left)())


def test_checkpoint_wait_returns_when_a_newer_save_is_committed(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.accept()
    cloud.run(JOB)
    saved = CheckpointSaved(at=AT + 99, attempt=1, pointer=LATER)
    at_each_poll(monkeypatch, lambda: None, lambda: cloud.happens(JOB, saved))
    assert LATER.save in holdfast("checkpoint", JOB, "--wait").stdout


def test_checkpoint_wait_ends_with_1_when_the_job_ends_without_a_newer_save(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.accept()
    cloud.run(JOB)
    at_each_poll(monkeypatch, lambda: cloud.end(JOB))
    ran = holdfast("checkpoint", JOB, "--wait")
    assert ran.exit_code == 1
    assert "holdfast explain" in ran.stderr


# -- why ---------------------------------------------------------------------------------------------------------------


def test_explain_tells_a_waiting_job_its_place_and_what_helps(cloud: Cloud) -> None:
    cloud.accept(dedup_id="first", priority=90)
    job = cloud.accept(dedup_id="second", priority=10).id
    why = told("explain", job)
    assert (why["code"], why["phase"]) == ("in_line", "queued")
    assert "number 2 of 2" in why["why"]
    assert f"holdfast priority {job}" in why["unblock"]


def test_explain_tells_what_capacity_is_missing_and_until_when_nobody_asks(cloud: Cloud) -> None:
    cloud.accept()
    refused = CapacityRefused(
        at=AT + 5, attempt=1, reason="0 of 2 c7i.large (spot): InsufficientInstanceCapacity", not_before=AT + 9e8
    )
    cloud.happens(JOB, AttemptStarted(at=AT + 1, attempt=1), refused, AttemptClosed(at=AT + 6, attempt=1))
    why = told("explain", JOB)
    assert why["code"] == "not_before"
    assert "InsufficientInstanceCapacity" in why["why"]
    assert "instance types" in why["unblock"]
    assert "capacity_refused" in why["restarts"][0]


def test_explain_tells_what_ended_each_attempt_and_who_asked(cloud: Cloud) -> None:
    cloud.accept()
    cloud.run(JOB)
    cloud.happens(
        JOB,
        InterruptionNoticed(at=AT + 40, attempt=1, instance=NODE, deadline_at=AT + 160, cause="spot warning"),
        FleetLost(at=AT + 50, attempt=1, instances=(NODE, "i-0a1b2c3d4e5f60002")),
        AttemptClosed(at=AT + 60, attempt=1),
        AttemptStarted(at=AT + 61, attempt=2),
        CancelRequested(at=AT + 70, request="cancel", cause="ada"),
    )
    why = told("explain", JOB)
    assert why["code"] == "cancel_asked"
    assert "by ada" in why["why"]
    assert why["restarts"] == [why["restarts"][0]]
    assert "attempt 1: " in why["restarts"][0]
    shown = holdfast("explain", JOB).stdout
    assert "cancel_requested" in shown
    assert "what helps" in shown


def test_explain_shows_the_log_of_the_rank_that_died_and_the_advice_of_its_class(cloud: Cloud) -> None:
    cloud.accept()
    cloud.run(JOB)
    died = Failed(
        at=AT + 50,
        attempt=1,
        failure="out_of_memory",
        reason="exit 72",
        log_tail="step 9\ntorch.OutOfMemoryError: CUDA out of memory \x1b[31m",
    )
    cloud.happens(JOB, died, AttemptClosed(at=AT + 60, attempt=1))
    shown = holdfast("explain", JOB).stdout
    assert "torch.OutOfMemoryError: CUDA out of memory" in shown
    assert "bigger type" in shown
    assert "\x1b" not in shown
    assert told("explain", JOB)["code"] == "out_of_memory"


@pytest.mark.parametrize("state", ["queued", "running", "paused", "interrupted", "resuming", "limit", "over"])
def test_explain_has_a_code_and_a_sentence_for_every_state(cloud: Cloud, state: str) -> None:
    cloud.accept()
    if state != "queued":
        cloud.run(JOB)
    notice = InterruptionNoticed(at=AT + 40, attempt=1, instance=NODE, deadline_at=AT + 160, cause="spot warning")
    after = {
        "interrupted": (notice,),
        "resuming": (notice, FleetLost(at=AT + 50, attempt=1, instances=(NODE, "i-0a1b2c3d4e5f60002"))),
        "paused": (PauseRequested(at=AT + 40, request="p", cause="ada"), AttemptClosed(at=AT + 60, attempt=1)),
        "limit": (LimitPassed(at=AT + 40, attempt=1, reason="limits.run_s = 1 passed"),),
    }
    cloud.happens(JOB, *after.get(state, ()))
    if state == "over":
        cloud.end(JOB)
    why = told("explain", JOB)
    assert all(why[name] for name in ("code", "why", "unblock", "phase", "decisions"))


def test_the_history_begins_with_the_acceptance_and_tells_saves_deadlines_and_askers_apart(cloud: Cloud) -> None:
    cloud.accept()
    cloud.run(JOB)
    cloud.happens(
        JOB,
        CheckpointSaved(at=AT + 60, attempt=1, pointer=LATER, parent=SAVE),
        InterruptionNoticed(at=AT + 70, attempt=1, instance=NODE, deadline_at=AT + 190, cause="spot warning"),
        CancelRequested(at=AT + 80, request="cancel", cause="ada"),
    )
    lines = holdfast("events", JOB).stdout.splitlines()
    assert "accepted" in lines[1]
    assert f"new save {LATER.save}, its parent {SAVE.save}" in lines[-3]
    assert "deadline 2026-11-30" in lines[-2]
    assert "by ada" in lines[-1]
    assert told("events", JOB)[0]["kind"] == "accepted"


def test_status_and_explain_tell_where_a_job_would_go_while_advice_holds(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.accept()
    cloud.run(JOB)
    where = "2 c7i.large (spot) in us-east-1b; its own pool, c7i.large in us-east-1a (spot), is asked last"
    cloud.happens(
        JOB,
        EarlySaveAdvised(at=AT + 40, attempt=1, until_at=AT + 3640),
        CapacityLooked(at=AT + 60, attempt=1, asked_at=AT + 40, outcome=where),
    )
    monkeypatch.setattr(main.time, "time", lambda: AT + 120)
    assert f"if taken   {where} (looked 1 min ago)" in holdfast("status", JOB).stdout
    assert told("explain", JOB)["if_taken"] == f"{where} (looked 1 min ago)"
    assert where in holdfast("events", JOB).stdout
    monkeypatch.setattr(main.time, "time", lambda: AT + 3640)
    assert "if taken" not in holdfast("status", JOB).stdout
    assert told("explain", JOB)["if_taken"] == ""


def test_status_leaves_out_what_is_empty_and_counts_in_good_english(cloud: Cloud) -> None:
    cloud.accept()
    cloud.run(JOB)
    notice = InterruptionNoticed(at=AT + 40, attempt=1, instance=NODE, deadline_at=AT + 160)
    cloud.happens(JOB, notice)
    assert re.search(r"^attempt +1, 1 interruption *$", holdfast("status", JOB).stdout, re.MULTILINE)
    cloud.end(JOB)
    assert "stage" not in holdfast("status", JOB).stdout


def test_list_tells_how_old_a_job_is_and_how_long_it_took(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.accept()
    cloud.run(JOB)
    cloud.end(JOB)
    monkeypatch.setattr(main.time, "time", lambda: AT + 7200)
    heads, row = holdfast("list").stdout.splitlines()
    assert row[heads.index("AGE") :].startswith("2 h")
    assert row[heads.index("TOOK") :].startswith("1 min")


def test_queue_shows_the_order_of_each_team_with_reasons(cloud: Cloud) -> None:
    ids = [cloud.accept(dedup_id=str(priority), priority=priority).id for priority in (10, 90)]
    other = cloud.accept(team="vision", dedup_id="v").id
    places = told("queue")
    assert [(place["team"], place["place"], place["job"]) for place in places] == [
        ("research", 1, ids[1]),
        ("research", 2, ids[0]),
        ("vision", 1, other),
    ]
    assert all(place["code"] and place["why"] for place in places)
    assert other not in holdfast("queue", "--team", "research").stdout


def test_an_empty_queue_is_said_to_be_empty(cloud: Cloud) -> None:
    assert holdfast("queue").stdout == "nobody waits\n"


# -- saves -------------------------------------------------------------------------------------------------------------


def put_save(name: str, *, damage: str = "") -> SavePointer:
    """A save of one file in the bucket, damaged as told."""
    s3, prefix = boto3.client("s3"), job_prefix("research", JOB)
    content, numbers = b"tensors", parse_save_name(name)
    file = SavedFile(path="rank-0.bin", size_bytes=7, sha256=hashlib.sha256(content).hexdigest(), node_rank=0)
    manifest = Manifest(
        job=JOB, attempt=numbers.attempt, step=numbers.step, save=name, world_size=1, mesh=(1,), config_hash="c",
        corpus_digest="d", versions={}, facts={}, files=(file,),
    )  # fmt: skip
    part = Part(job=JOB, attempt=numbers.attempt, save=name, node_rank=0, roster_id="r", files=manifest.files)
    s3.put_object(Bucket=BUCKET, Key=part_key(prefix, name, 0), Body=seal(part)[0])
    raw, digest = seal(manifest)
    if damage != "file gone":
        s3.put_object(Bucket=BUCKET, Key=file_key(prefix, name, "rank-0.bin"), Body=content[: 7 - (damage == "short")])
    if damage == "flipped":
        raw = raw.replace(b'"world_size":1', b'"world_size":2')
    if damage != "not committed":
        s3.put_object(Bucket=BUCKET, Key=manifest_key(prefix, name), Body=raw)
    return SavePointer(save=name, manifest_sha256=digest)


def test_report_brings_the_page_of_a_run_that_has_ended(cloud: Cloud, tmp_path: Path) -> None:
    cloud.run(cloud.accept().id)
    running = holdfast("report", JOB)
    assert running.exit_code == 2 and "its report is written when it is over" in running.output
    cloud.end(JOB)
    early = holdfast("report", JOB, "--out", str(tmp_path / "run.html"))
    assert early.exit_code == 2 and "not there yet" in early.output
    key = f"{job_prefix('research', JOB)}/report.html"
    boto3.client("s3").put_object(Bucket=BUCKET, Key=key, Body=b"<html>")
    assert holdfast("report", JOB, "--out", str(tmp_path / "run.html")).exit_code == 0
    assert (tmp_path / "run.html").read_bytes() == b"<html>"
    boto3.client("s3").put_object(Bucket=BUCKET, Key=key.replace("html", "json"), Body=b'{"step": 3}')
    assert told("report", JOB) == {"step": 3}
    nowhere = holdfast("report", JOB, "--out", str(tmp_path / "no" / "run.html"))
    assert nowhere.exit_code == 2 and "name another file with --out" in nowhere.output


def test_checkpoints_lists_saves_with_what_is_committed_and_what_can_be_trusted(cloud: Cloud) -> None:
    cloud.accept()
    good = put_save("step-00000025.a0001.s01")
    newest = put_save("step-00000050.a0002.s01")
    put_save("step-00000060.a0002.s02", damage="flipped")
    put_save("step-00000070.a0002.s03", damage="short")
    put_save("step-00000080.a0002.s04", damage="file gone")
    put_save("step-00000090.a0002.s05", damage="not committed")
    head = Head(job=JOB, attempt=2, step=50, save=newest.save, manifest_sha256=newest.manifest_sha256, parent=good)
    boto3.client("s3").put_object(Bucket=BUCKET, Key=head_key(job_prefix("research", JOB)), Body=seal(head)[0])
    saves = {save["save"]: save for save in told("checkpoints", JOB)}
    assert [(save["committed"], save["manifest"] == "ok", save["head"]) for save in saves.values()] == [
        (True, True, "parent"),
        (True, True, "newest"),
        (True, False, ""),
        (True, False, ""),
        (True, False, ""),
        (False, False, ""),
    ]
    assert "digest" in saves["step-00000060.a0002.s02"]["manifest"]
    assert "6 bytes, committed were 7" in saves["step-00000070.a0002.s03"]["manifest"]
    assert "missing" in saves["step-00000080.a0002.s04"]["manifest"]
    assert saves[good.save]["size_bytes"] > 7
    assert "newest" in holdfast("checkpoints", JOB).stdout


def test_verify_reads_the_newest_save_whole_and_names_the_damaged_file(cloud: Cloud, tmp_path: Path) -> None:
    cloud.accept()
    prefix, name = job_prefix("research", JOB), "step-00000050.a0001.s02"
    assert "no committed save yet" in holdfast("verify", JOB).stderr
    newest = put_save(name)
    head = Head(job=JOB, attempt=1, step=50, save=name, manifest_sha256=newest.manifest_sha256)
    boto3.client("s3").put_object(Bucket=BUCKET, Key=head_key(prefix), Body=seal(head)[0])
    ran = holdfast("verify", JOB)
    assert (ran.exit_code, ran.stdout) == (0, f"{name}: ok\n")

    boto3.client("s3").put_object(Bucket=BUCKET, Key=file_key(prefix, name, "rank-0.bin"), Body=b"tensorz")
    ran = holdfast("verify", JOB, name)
    assert ran.exit_code == 1
    assert ran.stdout.startswith(f"{name}: rank-0.bin: sha256 ")
    boto3.client("s3").put_object(Bucket=BUCKET, Key=head_key(prefix), Body=b"torn")
    damaged = json.loads(holdfast("verify", JOB, name, "--json").stdout)
    assert [file["file"] for file in damaged["damaged"]] == ["head.json", "rank-0.bin"]

    for path in ("rank-0.bin", "manifest.json", "parts/node-0.json"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        boto3.client("s3").download_file(BUCKET, file_key(prefix, name, path), str(tmp_path / path))
    assert "rank-0.bin" in holdfast("verify", "--folder", str(tmp_path)).stdout
    (tmp_path / "rank-0.bin").write_bytes(b"tensors")
    assert holdfast("verify", "--folder", str(tmp_path)).exit_code == 0
    (tmp_path / "manifest.json").unlink()
    for words in (("verify",), ("verify", JOB, "../x"), ("verify", "--folder", str(tmp_path))):
        assert holdfast(*words).exit_code == 2


def test_a_job_without_saves_says_so(cloud: Cloud) -> None:
    cloud.accept()
    assert "no saves yet" in holdfast("checkpoints", JOB).stdout
    assert told("checkpoints", JOB) == []


# -- machines ----------------------------------------------------------------------------------------------------------


def test_nodes_shows_every_machine_of_every_attempt(cloud: Cloud) -> None:
    cloud.accept()
    cloud.run(JOB)
    second = f"{JOB}-2-0"
    facts = Ready(ip="10.0.0.1", port=4, instance_type="p5.48xlarge", zone="us-east-1b")
    for fleet, attempt, instance in ((FLEET, 1, NODE), (second, 2, "i-0a1b2c3d4e5f60009")):
        cloud.store.open_intent(
            FleetIntent(
                fleet=fleet, job=JOB, attempt=attempt, candidate=0, nodes=1, opened_at=AT, instances=(instance,)
            )
        )
        cloud.store.own([Node(instance=instance, job=JOB, fleet=fleet, attempt=attempt, since_at=AT)])
    cloud.store.update_node(replace(cloud.store.nodes(["i-0a1b2c3d4e5f60009"])[0], ready=facts))
    cloud.store.mark_ending([NODE], JOB, AT + 50)
    cloud.happens(
        JOB,
        FleetLost(at=AT + 50, attempt=1, instances=(NODE, "i-0a1b2c3d4e5f60002")),
        AttemptClosed(at=AT + 60, attempt=1),
        AttemptStarted(at=AT + 61, attempt=2),
        FleetIntended(at=AT + 62, attempt=2, fleet=second),
    )
    first, other = told("nodes", JOB)
    assert (first["instance"], first["attempt"], first["instance_type"], first["zone"], first["market"]) == (
        NODE,
        1,
        "c7i.large",
        "us-east-1a",
        "spot",
    )
    assert (first["state"], first["account"]) == (Ownership.ENDING.value, "111122223333")
    assert (other["instance_type"], other["zone"], other["state"]) == ("p5.48xlarge", "us-east-1b", "member")
    assert "p5.48xlarge" in holdfast("nodes", JOB).stdout


def aside() -> list[tuple[str, str]]:
    return sorted((one["pk"]["S"], one["sk"]["S"]) for one in boto3.client("dynamodb").scan(TableName="jobs")["Items"])


def test_a_machine_that_is_set_aside_is_listed_until_it_is_released(cloud: Cloud) -> None:
    assert holdfast("quarantine", NODE, "--hours", "2", "--why", "XID 79").exit_code == 0
    assert aside() == [("QUARANTINE", NODE)]
    [listed] = told("capacity")
    assert (listed["what"], listed["state"], listed["why"]) == (NODE, "set aside", "XID 79 (ops)")
    assert 0 < listed["until"] - time.time() <= 7200
    assert holdfast("release", NODE).exit_code == 0
    assert told("capacity") == []
    assert "holdfast capacity" in holdfast("release", NODE).stderr


def test_a_machine_is_set_aside_by_the_hardware_under_it_where_that_is_known(cloud: Cloud) -> None:
    ready = {"ip": {"S": "10.0.0.1"}, "host": {"S": "nn-1"}}
    item = {"pk": {"S": f"NODE#{NODE}"}, "sk": {"S": "NODE"}, "ready": {"M": ready}}
    boto3.client("dynamodb").put_item(TableName="jobs", Item=item)
    assert holdfast("quarantine", NODE).exit_code == 0
    assert ("QUARANTINE", "nn-1") in aside()
    assert told("capacity")[0]["what"] == NODE


def test_a_type_in_a_zone_is_set_aside_in_every_market(cloud: Cloud) -> None:
    assert holdfast("quarantine", "us-east-1a/p5.48xlarge").exit_code == 0
    assert [pk for pk, _ in aside()] == [
        f"POOL#p5.48xlarge#us-east-1a#{market}#{group}"
        for market in ("on_demand", "spot")
        for group in ("-", "cluster")
    ]
    assert {one["state"] for one in told("capacity")} == {"set aside"}
    assert holdfast("release", "us-east-1a/p5.48xlarge").exit_code == 0
    assert aside() == []
    assert holdfast("quarantine", "us-east-1a/").exit_code == 2


def test_a_machine_that_is_none_is_not_set_aside(cloud: Cloud) -> None:
    ran = holdfast("quarantine", "p5.48xlarge")
    assert ran.exit_code == 2
    assert "no instance id" in ran.stderr


def test_capacity_shows_cold_pools_and_leaves_out_thawed_ones(cloud: Cloud) -> None:
    now = time.time()
    for number, until in enumerate((now + 600, now - 600)):
        item = {
            "pk": {"S": f"POOL#c7i.large/us-east-1{number}/spot"},
            "sk": {"S": "COLD"},
            "until": {"N": str(until)},
            "misses": {"N": "3"},
            "code": {"S": "InsufficientInstanceCapacity"},
        }
        boto3.client("dynamodb").put_item(TableName="jobs", Item=item)
    [pool] = told("capacity")
    assert (pool["what"], pool["refusals"], pool["why"]) == (
        "c7i.large/us-east-10/spot",
        3,
        "InsufficientInstanceCapacity",
    )
    assert len(told("capacity", "--all")) == 2


@pytest.fixture
def stubbed(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Stubber]]:
    """Lambda and EC2 with recorded answers."""
    clients = {name: boto3.client(name) for name in ("lambda", "ec2")}
    stubs, real = {name: Stubber(client) for name, client in clients.items()}, boto3.client
    monkeypatch.setattr(boto3, "client", lambda name, **more: clients.get(name) or real(name, **more))
    for stub in stubs.values():
        stub.activate()
    yield stubs
    for stub in stubs.values():
        stub.assert_no_pending_responses()


def answers(stubs: dict[str, Stubber], event: dict[str, Any], findings: list[dict[str, Any]], **more: Any) -> None:
    answer = {"findings": len(findings), "dry_run": event["dry_run"], "listed": findings}
    body = more.pop("body", json.dumps(answer).encode())
    stubs["lambda"].add_response(
        "invoke",
        {"StatusCode": 200, "Payload": StreamingBody(io.BytesIO(body), len(body)), **more},
        {"FunctionName": "mine-Sweep", "Payload": json.dumps(event).encode()},
    )


ORPHAN = {
    "what": "orphan instance: no owner", "who": NODE, "done": "terminated", "age_s": 7200,
    "instance_type": "p5.48xlarge", "zone": "us-east-1a",
}  # fmt: skip


def test_sweep_orphans_is_dry_unless_told_and_shows_age_and_cost(cloud: Cloud, stubbed: dict[str, Stubber]) -> None:
    answers(stubbed, {"dry_run": True}, [{"what": "execution failed", "who": JOB, "done": "closed"}, ORPHAN])
    stubbed["ec2"].add_response("describe_spot_price_history", {"SpotPriceHistory": [{"SpotPrice": "20.0"}]})
    found = told("sweep-orphans")
    assert found["applied"] is False
    assert [one["who"] for one in found["listed"]] == [NODE, JOB]
    assert found["listed"][0]["usd_a_month_spot"] == 14_600


def test_sweep_orphans_says_when_no_price_is_known_and_acts_when_told(
    cloud: Cloud, stubbed: dict[str, Stubber]
) -> None:
    answers(stubbed, {"dry_run": False}, [ORPHAN])
    stubbed["ec2"].add_client_error("describe_spot_price_history", "UnauthorizedOperation")
    shown = holdfast("sweep-orphans", "--apply").stdout
    for words in (NODE, "2 h", "not known", "terminated"):
        assert words in shown


def test_a_sweep_that_fails_is_told_as_a_failure(cloud: Cloud, stubbed: dict[str, Stubber]) -> None:
    body = b'{"errorMessage": "throttled"}'
    answers(stubbed, {"dry_run": True}, [], FunctionError="Unhandled", body=body)
    ran = holdfast("sweep-orphans")
    assert ran.exit_code == 2
    assert "throttled" in ran.stderr


# -- what failed -------------------------------------------------------------------------------------------------------


def test_dlq_list_counts_the_messages_of_every_queue_of_failures(cloud: Cloud) -> None:
    cloud.sqs.send_message(QueueUrl=cloud.outputs["RequestDeadLettersUrl"], MessageBody="{}")
    assert told("dlq", "list") == {"requests": 1, "control": 0, "reports": 0, "calls": 0, "rules": 0}
    assert "could not be taken in" in holdfast("dlq", "list").stdout


def test_dlq_show_prints_what_failed_and_why_and_leaves_it(cloud: Cloud) -> None:
    call = {
        "requestContext": {
            "functionArn": "arn:aws:lambda:us-east-1:1:function:mine-Sweep",
            "condition": "RetriesExhausted",
        },
        "requestPayload": {},
        "responsePayload": {"errorMessage": "boom\x1b[31m"},
    }
    cloud.sqs.send_message(QueueUrl=cloud.outputs["FailedCallsUrl"], MessageBody=json.dumps(call))
    shown = holdfast("dlq", "show", "calls").stdout
    assert "mine-Sweep RetriesExhausted boom" in shown
    assert "\x1b" not in shown
    assert told("dlq", "list")["calls"] == 1


def test_dlq_replay_moves_messages_back_to_the_queue_they_came_from(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = cloud.outputs["RequestDeadLettersUrl"]
    client, real = boto3.client("sqs"), boto3.client
    monkeypatch.setattr(boto3, "client", lambda name, **more: client if name == "sqs" else real(name, **more))
    with Stubber(client) as stub:
        arn = "arn:aws:sqs:us-east-1:123456789012:RequestDeadLetters"
        asked = {"QueueUrl": url, "AttributeNames": ["QueueArn"]}
        stub.add_response("get_queue_attributes", {"Attributes": {"QueueArn": arn}}, asked)
        moved = {"SourceArn": arn, "MaxNumberOfMessagesPerSecond": 10}
        stub.add_response("start_message_move_task", {"TaskHandle": "t"}, moved)
        assert told("dlq", "replay", "requests") == {"queue": "requests", "task": "t"}
        stub.assert_no_pending_responses()


def test_dlq_replay_calls_a_function_again_with_its_event_and_keeps_what_carries_none(
    cloud: Cloud, stubbed: dict[str, Stubber]
) -> None:
    arn = "arn:aws:lambda:us-east-1:111122223333:function:mine-OnSpotInterruption"
    call = {"requestContext": {"functionArn": arn}, "requestPayload": {"a": 1}}
    batch = {"requestContext": {"functionArn": arn}, "DDBStreamBatchInfo": {"shardId": "s"}}
    for body in (call, batch):
        cloud.sqs.send_message(QueueUrl=cloud.outputs["FailedCallsUrl"], MessageBody=json.dumps(body))
    stubbed["lambda"].add_response(
        "invoke", {"StatusCode": 202}, {"FunctionName": arn, "InvocationType": "Event", "Payload": b'{"a": 1}'}
    )
    assert told("dlq", "replay", "calls") == {"queue": "calls", "sent": 1, "kept": 1}
    assert told("dlq", "list")["calls"] == 1


def test_dlq_replay_sends_an_event_of_a_rule_to_its_target(cloud: Cloud) -> None:
    cloud.sqs.send_message(
        QueueUrl=cloud.outputs["RuleDeadLettersUrl"],
        MessageBody='{"detail-type": "Training Job Requested"}',
        MessageAttributes={
            "TARGET_ARN": {"DataType": "String", "StringValue": "arn:aws:sqs:us-east-1:123456789012:requests"},
            "ERROR_CODE": {"DataType": "String", "StringValue": "NO_PERMISSIONS"},
        },
    )
    assert told("dlq", "replay", "rules") == {"queue": "rules", "sent": 1, "kept": 0}
    assert cloud.sent("RequestQueueUrl") == [{"detail-type": "Training Job Requested"}]


def test_dlq_drop_deletes_one_message_or_all(cloud: Cloud) -> None:
    url = cloud.outputs["ControlDeadLettersUrl"]
    ids = [cloud.sqs.send_message(QueueUrl=url, MessageBody="{}")["MessageId"] for _ in range(3)]
    assert told("dlq", "drop", "control", "--id", ids[1]) == {"queue": "control", "dropped": 1}
    assert told("dlq", "list")["control"] == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("dlq", "show", "letters"), "requests, control, reports, calls, rules"),
        (("dlq", "drop", "control"), "--all"),
        (("dlq", "drop", "control", "--id", "x", "--all"), "--all"),
        (("dlq", "drop", "control", "--id", "x"), "no message x"),
    ],
)
def test_a_wrong_word_for_a_queue_or_message_is_told_with_the_right_ones(
    cloud: Cloud, words: tuple[str, ...], sentence: str
) -> None:
    ran = holdfast(*words)
    assert ran.exit_code == 2
    assert sentence in ran.stderr


JOB_VERBS = ("explain", "nodes", "checkpoints", "verify", "pause", "resume", "checkpoint", "retry", "extend")


@pytest.mark.parametrize("verb", JOB_VERBS)
def test_a_job_that_does_not_exist_is_named_by_every_verb(cloud: Cloud, verb: str) -> None:
    ran = holdfast(verb, "no-such-job", *(("--run-s", "9") if verb == "extend" else ()))
    assert ran.exit_code == 2
    assert "no-such-job" in ran.stderr


def test_the_verbs_know_events_that_only_a_fleet_makes(cloud: Cloud) -> None:
    cloud.accept()
    cloud.happens(
        JOB,
        AttemptStarted(at=AT + 1, attempt=1),
        FleetIntended(at=AT + 2, attempt=1, fleet=FLEET),
        FleetBought(
            at=AT + 3, attempt=1, fleet=FLEET, instance_type="c7i.large", zone="us-east-1a", market="spot", nodes=2
        ),
        AllReady(at=AT + 4, attempt=1, roster_id="r"),
        TrainingStarted(at=AT + 5, attempt=1, step=1, restored=SAVE.save, fell_back=("step-00000050.a0001.s02",)),
    )
    assert "fell_back step-00000050.a0001.s02" in holdfast("events", JOB).stdout


def test_status_and_explain_tell_what_a_job_has_cost_and_why_a_spent_budget_ended_it(cloud: Cloud) -> None:
    cloud.accept()
    cloud.run(JOB)
    assert told("status", JOB)["cost_usd"] > 0
    assert "of 5 USD" in holdfast("status", JOB).stdout
    reason = "about 5.01 USD of limits.budget_usd = 5 are spent"
    cloud.happens(JOB, LimitPassed(at=AT + 40, attempt=1, reason=reason, failure="budget_spent"))
    why = told("explain", JOB)
    assert (why["code"], reason in why["why"]) == ("budget_spent", True)
    assert "goes on after its save" in holdfast("extend", JOB, "--budget-usd", "50").stdout
    assert why["cost"].startswith("about ")
