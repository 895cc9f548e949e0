"""O-20 and O-21: storage that is slow, throttles or refuses, and what the job knows of it."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import boto3
import pytest
from boto3.exceptions import S3UploadFailedError
from botocore.exceptions import ConnectionClosedError
from botocore.stub import Stubber

from agent.cloud import error_code, permanent
from agent.saves import gives_way
from holdfast.domain.retention import expired
from job_contract.checkpoint_layout import head_key, manifest_key, open_head, read_manifest
from tests import builders as b

SHARD = "__1_0.distcp"


def both_training(start_node, play, **changes):
    nodes = [start_node(rank, pace=replace(play.fast, **changes)) for rank in (0, 1)]
    for node in nodes:
        node.orders.value = play.seen("run", 3, nodes=2)
    play.until(lambda: all((node.run_dir / "outcome").exists() or node.agent.attempt for node in nodes), *nodes)
    return nodes


def save_on_the_way(nodes):
    for node in nodes:
        (node.run_dir / "save").touch()


def noted(node, event):
    lines = (json.loads(line) for line in (node.root / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def head_of(s3, play):
    return open_head(s3.objects[head_key(play.prefix)], job=play.job)


def test_o20_files_then_parts_then_manifest_then_head(start_node, play, s3):
    nodes = both_training(start_node, play)
    save_on_the_way(nodes)
    play.until(lambda: nodes[0].heard("checkpoint_saved"), *nodes)
    save = nodes[0].heard("checkpoint_saved")[0].save
    puts = [key.removeprefix(f"{play.prefix}/").removeprefix(f"saves/{save}/") for key in s3.puts[1:]]
    parts = [puts.index(f"parts/node-{rank}.json") for rank in (0, 1)]
    assert puts.index(SHARD) < parts[1] and max(puts.index("__0_0.distcp"), puts.index(".metadata")) < parts[0]
    assert max(parts) < puts.index("manifest.json") < puts.index("head.json")
    assert puts.count("manifest.json") == puts.count("head.json") == 1


def test_o20_a_save_that_dies_on_its_way_leaves_the_head_at_the_save_before_and_nothing_is_deleted_for_it(
    start_node, play, s3
):
    node = start_node()
    node.orders.value = play.seen("run", 3)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    save_on_the_way([node])
    first = node.wait_for("checkpoint_saved")

    slow, upload = threading.Event(), s3.upload_file

    def slow_upload(path, bucket, key, Config):
        if "a0001.s02" in key:
            slow.set()
            node.agent.attempt.saves.loop.closed.wait(10)
            raise ConnectionClosedError(endpoint_url="s3")
        upload(path, bucket, key, Config)

    s3.upload_file = slow_upload
    node.orders.value = play.seen("checkpoint_stop", 4)
    play.until(slow.is_set, node)
    node.agent.attempt.leave()

    assert head_of(s3, play).save == first.save
    manifest = read_manifest(s3.objects[manifest_key(play.prefix, first.save)])
    assert {key.rsplit("/", 1)[1] for key in s3.objects if first.save in key} >= {file.path for file in manifest.files}
    # The supervisor with keep = 1: the next attempt has no save of its own, so nothing goes, the leftover included.
    row = replace(b.after(b.a_running_job(), b.saved(10)), keep=1, attempt=2)
    assert expired(row, [first.save, "step-00000020.a0001.s02"], [manifest]) == []


def test_o21_a_throttled_upload_is_tried_again_and_the_save_is_committed(start_node, play, s3):
    nodes = both_training(start_node, play)
    s3.fail("put", f"a0001.s01/{SHARD}", "SlowDown", 503, times=3)
    save_on_the_way(nodes)
    play.until(lambda: nodes[0].heard("checkpoint_saved"), *nodes)
    tried = noted(nodes[1], "upload_retry") + noted(nodes[1], "upload_deferred")
    assert len(tried) == 3
    assert head_of(s3, play).save == nodes[0].heard("checkpoint_saved")[0].save
    assert not any(node.heard("save_lost") for node in nodes)


@pytest.mark.parametrize(("code", "status"), [("SlowDown", 503), ("PermanentRedirect", 301)])
def test_o21_storage_that_fails_for_good_on_one_node_ends_the_save_on_all_and_the_training_goes_on(
    start_node, play, s3, code, status
):
    nodes = both_training(start_node, play, upload_retry_s=0.5, save_grace_s=600.0)
    before = head_of(s3, play)
    s3.fail("put", f"a0001.s01/{SHARD}", code, status, times=1000)
    save_on_the_way(nodes)
    # Within the ten seconds of `until`; a collective of the loop would wait for ninety.
    play.until(lambda: all(node.heard("save_lost") for node in nodes), *nodes)
    lost = {(report.save, report.reason) for node in nodes for report in node.heard("save_lost")}
    assert lost == {("step-00000010.a0001.s01", f"part of node 1 failed: {code} at {SHARD}")}
    assert head_of(s3, play) == before
    assert len(noted(nodes[1], "upload_retry")) == (0 if code == "PermanentRedirect" else pytest.approx(6, abs=5))
    assert [node.agent.attempt.state for node in nodes] == ["running", "running"]
    for node in nodes:
        node.orders.value = play.seen("checkpoint_stop", 4, nodes=2)
    play.until(lambda: all(node.heard("checkpoint_saved") for node in nodes), *nodes)
    assert head_of(s3, play).save == "step-00000020.a0001.s02"


def test_o21_a_forced_save_that_is_refused_fails_the_attempt_with_the_error_code(start_node, play, s3):
    node = start_node()
    node.orders.value = play.seen("run", 3)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    s3.fail("put", ".metadata", "PermanentRedirect", 301, times=1000)
    node.orders.value = play.seen("checkpoint_stop", 4)
    failed = node.wait_for("failed")
    assert (failed.failure, "PermanentRedirect at .metadata" in failed.reason) == ("save_failed", True)


def test_o24_the_time_from_an_order_to_the_commit_of_its_save_is_reported(start_node, play):
    node = start_node()
    node.orders.value = play.seen("run", 3)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    save_on_the_way([node])
    assert node.wait_for("checkpoint_saved").answered_after_s is None
    node.orders.value = play.seen("checkpoint_stop", 4)
    play.until(lambda: len(node.heard("checkpoint_saved")) == 2, node)
    assert 0 < node.heard("checkpoint_saved")[1].answered_after_s < 10


@pytest.mark.parametrize(("code", "lasting"), [("SlowDown", False), ("PermanentRedirect", True)])
def test_the_error_code_is_found_in_what_boto3_makes_of_a_refused_upload(tmp_path, code, lasting):
    client = boto3.client("s3", region_name="us-east-1", aws_access_key_id="t", aws_secret_access_key="t")
    (tmp_path / "shard").write_bytes(b"x")
    with Stubber(client) as stub:
        stub.add_client_error("put_object", code, http_status_code=301 if lasting else 503)
        with pytest.raises(S3UploadFailedError) as refused:
            client.upload_file(str(tmp_path / "shard"), "bucket", "key")
    assert (error_code(refused.value), permanent(refused.value)) == (code, lasting)


@pytest.mark.parametrize(
    ("finish_s", "newer_s", "left_s", "drops"),
    [(5, 40, 60, False), (30, 40, 60, True), (30, 70, 60, False), (0, 60, 60, False)],
    ids=["both fit", "only one fits", "the newer one does not fit", "nothing is left to finish"],
)
def test_a_doomed_node_drops_the_older_save_only_for_one_that_it_can_still_upload(finish_s, newer_s, left_s, drops):
    assert gives_way(finish_s, newer_s, left_s) is drops
