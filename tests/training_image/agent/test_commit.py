"""The commit of a save: one manifest, one head, whoever comes first and whatever S3 refuses."""

import json
import time
from dataclasses import replace

import pytest

from agent.cloud import Bucket
from agent.commit import Committer, Fenced, HeadUnreadable
from agent.journal import Journal
from job_contract.checkpoint_layout import (
    Part,
    SavedFile,
    SavePointer,
    head_key,
    manifest_key,
    open_head,
    part_key,
    read_manifest,
)
from job_contract.node_files import RankSave
from job_contract.version import canonical_json, encode

SAVE = RankSave(
    rank=0,
    save="step-00000010.a0001.s01",
    step=10,
    world_size=2,
    mesh=(2,),
    config_hash="c",
    corpus_digest="d",
    versions={"torch": "none"},
    facts={"step": 10},
    files=("__0_0.distcp",),
    restored=SavePointer(save="step-00000005.a0000.s01", manifest_sha256="0" * 64),
)
PARTS = tuple(
    Part(
        job="tiny-1",
        attempt=1,
        save=SAVE.save,
        node_rank=rank,
        roster_id="roster-1",
        files=(SavedFile(path=f"__{rank}_0.distcp", size_bytes=1, sha256="0" * 64, node_rank=rank),),
    )
    for rank in (0, 1)
)


@pytest.fixture
def make_committer(s3, play, tmp_path):
    def make(attempt=1):
        journal = Journal(tmp_path / "events.jsonl")
        return Committer(
            Bucket(s3, "bucket"),
            prefix=play.prefix,
            job=play.job,
            attempt=attempt,
            journal=journal,
            pause=lambda seconds: None,
        )

    return make


def head_of(s3, play):
    return open_head(s3.objects[head_key(play.prefix)], job=play.job)


def puts(s3, key):
    return s3.puts.count(key)


def test_the_second_committer_takes_the_manifest_of_the_first(make_committer, s3, play):
    first = make_committer().commit(SAVE, PARTS)
    second = make_committer().commit(SAVE, reversed(PARTS))
    assert first.pointer == second.pointer
    make_committer().move_head(first)
    make_committer().move_head(second)
    assert puts(s3, manifest_key(play.prefix, SAVE.save)) == 1
    assert puts(s3, head_key(play.prefix)) == 2  # the supervisor's and ours
    assert head_of(s3, play).pointer == first.pointer


def test_the_first_save_of_an_attempt_has_the_restored_one_as_its_parent_and_the_next_one_the_first(make_committer):
    committer = make_committer()
    first = committer.commit(SAVE, PARTS)
    assert first.manifest.parent == SAVE.restored
    committer.move_head(first)
    later = committer.commit(replace(SAVE, save="step-00000020.a0001.s02", step=20), PARTS)
    assert later.manifest.parent == first.pointer


def test_a_conflict_is_tried_again(make_committer, s3, play):
    s3.fail("put", "manifest.json", "ConditionalRequestConflict", 409, times=3)
    s3.fail("put", "head.json", "ConditionalRequestConflict", 409, times=3)
    committer = make_committer()
    committer.move_head(committer.commit(SAVE, PARTS))
    assert head_of(s3, play).save == SAVE.save


def test_a_head_that_changed_meanwhile_is_read_again(make_committer, s3, play):
    s3.fail("put", "head.json", "PreconditionFailed", 412, times=2)
    committer = make_committer()
    committer.move_head(committer.commit(SAVE, PARTS))
    assert head_of(s3, play).save == SAVE.save


def test_a_head_past_the_save_stays(make_committer, s3, play):
    committer = make_committer()
    first = committer.commit(SAVE, PARTS)
    committer.move_head(first)
    later = committer.commit(replace(SAVE, save="step-00000020.a0001.s02", step=20), PARTS)
    committer.move_head(later)
    committer.move_head(first)
    assert head_of(s3, play).save == later.manifest.save


def test_a_later_attempt_in_the_head_fences_before_the_manifest_is_put(make_committer, s3, play):
    play.head(s3, attempt=2)
    with pytest.raises(Fenced):
        make_committer().commit(SAVE, PARTS)
    assert manifest_key(play.prefix, SAVE.save) not in s3.objects


def test_a_later_attempt_in_the_head_fences_between_manifest_and_head(make_committer, s3, play):
    committed = make_committer().commit(SAVE, PARTS)
    play.head(s3, attempt=2)
    with pytest.raises(Fenced):
        make_committer().move_head(committed)
    assert manifest_key(play.prefix, SAVE.save) in s3.objects
    assert head_of(s3, play).attempt == 2


@pytest.mark.parametrize("body", [None, b"{}", b"not json"])
def test_a_head_that_cannot_be_read_is_left_to_the_supervisor(make_committer, s3, play, body):
    s3.objects.pop(head_key(play.prefix))
    if body is not None:
        s3.objects[head_key(play.prefix)] = body
    with pytest.raises(HeadUnreadable):
        make_committer().commit(SAVE, PARTS)


def both_running(start_node, play, **changes):
    nodes = [start_node(rank, **changes) for rank in (0, 1)]
    for node in nodes:
        node.orders.value = play.seen("run", 3, nodes=2)
    play.until(lambda: all(node.agent.attempt for node in nodes), *nodes)
    return nodes


def test_two_agents_that_race_make_one_manifest_and_one_head_and_both_report_it(start_node, play, s3):
    nodes = both_running(start_node, play)
    for node in nodes:
        node.orders.value = play.seen("checkpoint_stop", 4, nodes=2)
    play.until(lambda: all(node.heard("checkpoint_saved") for node in nodes), *nodes)
    reports = [node.heard("checkpoint_saved")[0] for node in nodes]
    assert reports[0].manifest_sha256 == reports[1].manifest_sha256
    assert all(report.final for report in reports)
    assert puts(s3, manifest_key(play.prefix, reports[0].save)) == 1
    assert puts(s3, head_key(play.prefix)) == 2
    manifest = read_manifest(s3.objects[manifest_key(play.prefix, reports[0].save)])
    assert {file.path: file.node_rank for file in manifest.files} == {
        ".metadata": 0,
        "__0_0.distcp": 0,
        "__1_0.distcp": 1,
    }


def test_a_failed_part_ends_the_save_for_everybody(start_node, play, s3):
    nodes = both_running(start_node, play)
    s3.fail("put", "__1_0.distcp", "AccessDenied", 403, times=50)
    for node in nodes:
        node.orders.value = play.seen("checkpoint_stop", 4, nodes=2)
    play.until(lambda: all(node.heard("failed") for node in nodes), *nodes)
    assert {node.heard("failed")[0].failure for node in nodes} == {"save_failed"}
    assert "AccessDenied at __1_0.distcp" in nodes[0].heard("failed")[0].reason
    assert not any(key.endswith("manifest.json") for key in s3.objects)


def test_a_failed_part_of_a_save_on_the_way_does_not_stop_the_training(start_node, play, s3):
    node = start_node()
    node.orders.value = play.seen("run", 3)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    s3.fail("put", "step-00000010.a0001.s01/__0_0.distcp", "AccessDenied", 403, times=50)
    (node.run_dir / "save").touch()
    play.until(lambda: any(key.endswith("parts/node-0.json") for key in s3.objects), node)
    node.orders.value = play.seen("checkpoint_stop", 4)
    saved = node.wait_for("checkpoint_saved")
    assert (saved.save, saved.final, node.heard("failed")) == ("step-00000020.a0001.s02", True, [])
    lost = [(report.save, report.reason) for report in node.heard("save_lost")]
    assert lost == [("step-00000010.a0001.s01", "part of node 0 failed: AccessDenied at __0_0.distcp")]


def test_a_save_without_the_other_nodes_part_ends_at_the_deadline(start_node, play):
    node = start_node(pace=replace(play.fast, save_grace_s=0.2))
    node.orders.value = play.seen("run", 3, nodes=2)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    node.orders.value = play.seen("checkpoint_stop", 4, nodes=2)
    failed = node.wait_for("failed")
    assert failed.failure == "save_failed"


def test_the_part_of_a_node_that_was_taken_away_is_not_waited_for(start_node, play):
    """The grace is for nodes that live on: without it the survivors would be held up for ten minutes."""
    node = start_node(pace=replace(play.fast, save_grace_s=600.0, doomed_slack_s=0.0))
    node.orders.value = play.seen("run", 3, nodes=2)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    gone = time.time() + 0.2
    node.orders.value = play.seen("checkpoint_stop", 4, nodes=2, deadline_at=gone, doomed=("i-1",))
    failed = node.wait_for("failed")
    assert (failed.failure, "node 1 was taken away" in failed.reason) == ("save_failed", True)


def test_a_part_of_another_roster_does_not_count(start_node, play, s3):
    node = start_node(pace=replace(play.fast, save_grace_s=0.2))
    foreign = replace(PARTS[1], roster_id="roster-0")
    s3.objects[part_key(play.prefix, SAVE.save, 1)] = canonical_json(encode(foreign))
    node.orders.value = play.seen("run", 3, nodes=2)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    node.orders.value = play.seen("checkpoint_stop", 4, nodes=2)
    assert node.wait_for("failed").failure == "save_failed"


def test_a_fenced_agent_stops_its_ranks_says_so_and_deletes_nothing(start_node, play, s3):
    node = start_node()
    node.orders.value = play.seen("run", 3)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    play.head(s3, attempt=2)
    before = set(s3.objects)
    (node.run_dir / "save").touch()
    assert node.wait_for("failed").failure == "fenced"
    assert before <= set(s3.objects)
    assert node.agent.state == "waiting"
    assert node.heard("checkpoint_saved") == []


def test_only_the_newest_committed_save_stays_on_local_disk(start_node, play):
    node = start_node()
    node.orders.value = play.seen("run", 3)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    (node.run_dir / "save").touch()
    node.wait_for("checkpoint_saved")
    node.orders.value = play.seen("checkpoint_stop", 4)
    play.until(lambda: node.agent.state == "waiting", node)
    assert [folder.name for folder in (node.run_dir / "saves").iterdir()] == ["step-00000020.a0001.s02"]


def test_an_agent_that_finds_the_manifest_but_an_old_head_moves_the_head(start_node, play, s3, make_committer):
    node = start_node()
    node.orders.value = play.seen("run", 3, nodes=2)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    committed = make_committer().commit(SAVE, PARTS)
    node.orders.value = play.seen("checkpoint_stop", 4, nodes=2)
    assert node.wait_for("checkpoint_saved").manifest_sha256 == committed.sha256
    assert head_of(s3, play).pointer == committed.pointer


def test_a_manifest_is_the_same_bytes_from_every_committer(make_committer, s3, play):
    make_committer().commit(SAVE, PARTS)
    first = s3.objects.pop(manifest_key(play.prefix, SAVE.save))
    make_committer().commit(replace(SAVE, rank=1, files=("__1_0.distcp",)), reversed(PARTS))
    assert s3.objects[manifest_key(play.prefix, SAVE.save)] == first
    assert json.loads(first)["sha256"]
