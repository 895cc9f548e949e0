"""One node through an attempt: orders in, control and ranks, reports out."""

import itertools
import json
import os
import signal
from dataclasses import replace

import pytest

from agent.gpus import GpuFigures
from agent.hygiene import marked
from agent.imds import Notice
from agent.orders import Seen
from agent.ranks import worst
from agent.threads import guarded
from job_contract.checkpoint_layout import head_key, manifest_key, open_head, read_manifest
from job_contract.node_files import Control, ControlKind, JobFile, read_message
from job_contract.orders import ResumeFrom
from job_contract.reports import encode_report


def control_of(node):
    return read_message(node.run_dir / "control.json", Control)


def started(node, play, **changes):
    node.orders.value = play.seen("run", 3, **changes)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)


def test_a_waiting_node_repeats_ready_until_its_orders_name_it(start_node, play):
    node = start_node()
    node.orders.value = play.seen("wait", 1)
    play.until(lambda: len(node.heard("ready")) >= 2, node)
    ready = node.heard("ready")[0]
    assert (ready.attempt, ready.ip, ready.interface, ready.port > 0) == (1, "127.0.0.1", "lo", True)
    started(node, play)
    said = len(node.heard("ready"))
    node.wait_for("progress")
    assert len(node.heard("ready")) == said


def test_a_waiting_node_repeats_ready_ever_more_rarely_and_at_once_for_another_attempt(start_node, play):
    node = start_node(pace=replace(play.fast, ready_s=0.05, ready_most_s=0.2))
    node.orders.value = play.seen("wait", 1)
    play.until(lambda: len(node.heard("ready")) >= 5, node)
    times = [ready.at for ready in node.heard("ready")]
    assert times[3] - times[2] >= 0.19 > times[1] - times[0]
    said = len(times)
    node.orders.value = play.seen("wait", 2, attempt=2)
    node.agent.tick()
    assert node.heard("ready")[said].attempt == 2


def test_a_roster_without_this_node_starts_nothing(start_node, play):
    node = start_node(node_rank=7)
    node.orders.value = play.seen("run", 3)
    play.until(lambda: len(node.heard("ready")) >= 2, node)
    assert node.agent.attempt is None


def test_the_ranks_get_their_job_and_no_credentials(start_node, play, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    node = start_node()
    started(node, play)
    job = read_message(node.run_dir / "job.json", JobFile)
    assert (job.job, job.attempt, job.node_rank, job.agent_pid) == (play.job, 1, 0, os.getpid())
    environment = next(iter(rank_environments(node)))
    assert "AWS_SECRET_ACCESS_KEY" not in environment
    assert environment["MASTER_PORT"] == "29555"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"


def rank_environments(node):
    for pid in node.agent.attempt.ranks.pids().values():
        with open(f"/proc/{pid}/environ") as file:
            yield dict(line.partition("=")[::2] for line in file.read().split("\0") if line)


def test_started_and_progress_come_from_node_rank_0(start_node, play):
    node = start_node()
    started(node, play)
    node.wait_for("progress")
    assert [(report.step, report.restored) for report in node.heard("started")] == [(0, None)]


def test_progress_carries_what_the_ranks_measured_and_what_the_node_has_left(start_node, play):
    node = start_node()
    figure = GpuFigures(
        address="00000000:53:00.0",
        utilization_percent=97,
        memory_used_bytes=10**10,
        memory_bytes=8 * 10**10,
        power_w=640.0,
        temperature_c=55,
    )
    node.agent.tools = replace(node.agent.tools, gpu_figures=lambda: (figure,) * 8)
    started(node, play)
    told = node.wait_for("progress")
    assert (told.step_ms, told.data_wait_ms, told.comm_ms, told.node_ms, told.mfu) == (20.0, 1.0, 2.0, (18.0,), None)
    assert told.gpus[0] == "00000000:53:00.0 97 % 10.0 of 80.0 GB 640 W 55 C"
    assert min(told.disk_free_bytes, told.memory_free_bytes) > 0


def test_steady_steps_are_told_with_the_reports_and_go_beside_the_curve(start_node, play):
    node = start_node()
    started(node, play)
    play.until(lambda: node.agent.attempt._steady.line(1, 0.0) is not None, node)
    play.until(lambda: any(one.steady for one in node.heard("progress")), node)
    told = next(one.steady for one in node.heard("progress") if one.steady)
    assert (told.step_ms, told.comm_ms, told.world_size) == (20.0, 2.0, 1)
    [body] = node.agent.attempt.curve().values()
    [line] = [json.loads(line) for line in body.splitlines()]
    assert (line["attempt"], line["steady"]["steps"] >= 10) == (1, True)


def test_progress_of_a_gang_of_256_nodes_stays_under_four_kilobytes(start_node, play):
    node = start_node()
    started(node, play)
    told = node.wait_for("progress")
    large = replace(told, node_ms=(1234.567,) * 256, gpus=("00000000:53:00.0 97 % 170.0 of 192.0 GB 1000 W 55 C",) * 8)
    assert len(json.dumps(encode_report(large))) < 4096


def test_an_ordered_checkpoint_stop_ends_in_a_final_save_and_the_node_waits(start_node, play, s3):
    node = start_node()
    started(node, play)
    node.orders.value = play.seen("checkpoint_stop", 4, deadline_at=9e9)
    saved = node.wait_for("checkpoint_saved")
    assert [(report.generation, report.action) for report in node.heard("heard")] == [(4, "checkpoint_stop")]
    assert (saved.final, saved.answers_generation, saved.size_bytes > 0) == (True, 4, True)
    head = open_head(s3.objects[head_key(play.prefix)], job=play.job)
    assert head.pointer.manifest_sha256 == saved.manifest_sha256
    play.until(lambda: node.agent.state == "waiting", node)
    assert len(node.heard("checkpoint_saved")) == 1
    assert marked(node.root) == []


def test_a_save_during_training_is_not_final(start_node, play):
    node = start_node()
    started(node, play)
    (node.run_dir / "save").touch()
    saved = node.wait_for("checkpoint_saved")
    assert (saved.final, saved.answers_generation) == (False, 0)
    assert node.agent.state == "running"


class Warnings:
    def __init__(self, *standing):
        self.standing = standing

    def latest(self):
        return self.standing


def test_a_warning_is_told_once_and_stops_nothing(start_node, play):
    node = start_node()
    started(node, play)
    advice = Notice(action="rebalance", deadline_at=1.0)
    node.agent.warnings = Warnings(advice)
    node.agent.tick()
    node.agent.warnings = Warnings(advice, Notice(action="system-reboot", deadline_at=9e9))
    for _ in range(3):
        node.agent.tick()
    told = [(report.action, report.deadline_at, report.attempt) for report in node.heard("notice_seen")]
    assert told == [("rebalance", 1.0, 1), ("system-reboot", 9e9, 1)]
    assert control_of(node).kind is ControlKind.NONE
    assert node.agent.state == "running"


def test_only_the_first_nodes_tell_of_a_save_that_answers_no_order(start_node, play):
    pace = replace(play.fast, heartbeat_nodes=1)
    nodes = [start_node(rank, pace=pace) for rank in range(2)]
    for node in nodes:
        node.orders.value = play.seen("run", 3, nodes=2)
    nodes[0].wait_for("started", nodes[1])
    for node in nodes:
        (node.run_dir / "save").touch()
    nodes[0].wait_for("checkpoint_saved", nodes[1])
    play.until(lambda: nodes[1].agent.attempt.saves.newest and nodes[1].agent.attempt.saves.results.empty(), *nodes)
    assert nodes[1].heard("checkpoint_saved") == []


def test_the_second_node_tells_of_such_a_save_when_the_attempt_ends_without_a_later_one(start_node, play):
    nodes = [start_node(rank) for rank in range(2)]
    for node in nodes:
        node.orders.value = play.seen("run", 3, nodes=2)
    nodes[0].wait_for("started", nodes[1])
    for node in nodes:
        (node.run_dir / "save").touch()
    first = nodes[0].wait_for("checkpoint_saved", nodes[1])
    play.until(lambda: nodes[1].agent.attempt.saves.newest and nodes[1].agent.attempt.saves.results.empty(), *nodes)
    assert nodes[1].heard("checkpoint_saved") == []
    nodes[1].agent.attempt.leave()
    [second] = nodes[1].heard("checkpoint_saved")
    assert (second.save, second.final, second.tokens_per_s) == (first.save, False, None)
    assert first.tokens_per_s is not None


def test_a_notice_starts_the_checkpoint_alone_and_the_order_only_raises_its_generation(start_node, play):
    node = start_node()
    started(node, play)
    node.orders.value = play.seen("run", 5)
    node.agent.tick()
    node.notices.value = Notice(action="terminate", deadline_at=9e9)
    node.agent.tick()
    control = control_of(node)
    assert (control.kind, control.generation, control.doomed) == (ControlKind.CHECKPOINT_STOP, 5, (0,))
    assert control.deadline_at == 9e9
    node.orders.value = play.seen("checkpoint_stop", 6, deadline_at=9e9, doomed=("i-0",))
    node.agent.tick()
    assert control_of(node) == replace(control, generation=6)
    assert [report.generation for report in node.heard("heard")] == [6]
    assert node.wait_for("checkpoint_saved").final
    assert len(node.heard("notice_seen")) == 1


def test_an_early_save_that_meets_a_stop_of_its_own_generation_is_not_taken_for_the_final_one(start_node, play, s3):
    """A notice seen by the node itself stops the ranks under the generation of the order before it."""
    node = start_node()
    started(node, play)
    for _ in range(3):
        s3.fail("put", "manifest.json", "InternalError", 500)
    node.orders.value = play.seen("checkpoint", 4)
    play.until(lambda: list(node.run_dir.glob("saves/*/rank-0.json")), node)
    node.notices.value = Notice(action="terminate", deadline_at=9e9)
    play.until(lambda: node.agent.state == "waiting", node)
    told = node.heard("checkpoint_saved")
    early, last = sorted({report.save for report in told})
    assert [report.save for report in told if report.final] == [last]
    assert early in [report.save for report in told]


def test_orders_of_an_older_attempt_and_repeated_ones_change_nothing(start_node, play):
    node = start_node()
    node.orders.value = play.seen("run", 9, attempt=2)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    before = control_of(node)
    for old in (play.seen("checkpoint_stop", 30, attempt=1), play.seen("release", 31, attempt=1), node.orders.value):
        node.orders.value = old
        node.agent.tick()
    assert control_of(node) == before
    assert node.agent.state == "running"
    assert node.heard("heard") == []


def test_a_later_attempt_ends_the_ranks_of_the_older_one_and_restores_from_local_disk(start_node, play, s3):
    node = start_node()
    started(node, play)
    old = set(marked(node.root))
    (node.run_dir / "save").touch()
    saved = node.wait_for("checkpoint_saved")
    play.head(s3, attempt=2)
    for key in [key for key in s3.objects if key.endswith(("distcp", ".metadata"))]:
        del s3.objects[key]
    resume = ResumeFrom(save=saved.save, manifest_sha256=saved.manifest_sha256)
    node.said.clear()
    node.orders.value = play.seen("run", 9, attempt=2, resume_from=resume)
    report = node.wait_for("started")
    assert (report.attempt, report.restored, report.step) == (2, saved.save, 10)
    assert not old & set(marked(node.root))


def test_what_the_ranks_of_older_attempts_wrote_of_themselves_is_kept_for_the_newest_five(start_node, play, s3):
    node = start_node()
    started(node, play)
    for attempt in range(2, 9):
        play.head(s3, attempt=attempt)
        node.orders.value = play.seen("run", 9 * attempt, attempt=attempt)
        play.until(lambda number=attempt: node.agent.attempt.number == number, node)
    past = sorted(path.name for path in (node.root / "past").iterdir())
    assert past == [f"attempt-{number:04d}" for number in range(3, 8)]


def test_metrics_and_logs_of_a_past_attempt_outlive_its_run_directory(start_node, play, s3):
    node = start_node()
    started(node, play)
    wrote = (node.run_dir / "logs" / "rank-0.log").read_text()
    (node.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    play.head(s3, attempt=2)
    node.orders.value = play.seen("run", 9, attempt=2)
    play.until(lambda: node.agent.attempt.number == 2, node)
    past = node.root / "past" / "attempt-0001"
    assert (past / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert (past / "logs" / "rank-0.log").read_text() == wrote


def test_the_save_of_an_older_attempt_is_forgotten_once_a_newer_one_is_committed(start_node, play, s3):
    """Local disk has room for the last committed save and the one in flight, not for a third."""
    node = start_node()
    started(node, play)
    (node.run_dir / "save").touch()
    saved = node.wait_for("checkpoint_saved")
    play.head(s3, attempt=2)
    resume = ResumeFrom(save=saved.save, manifest_sha256=saved.manifest_sha256)
    node.orders.value = play.seen("run", 9, attempt=2, resume_from=resume)
    play.until(lambda: [one for one in node.heard("started") if one.attempt == 2], node)
    assert (node.root / "kept" / saved.save).is_dir()
    (node.run_dir / "save").touch()
    play.until(lambda: [one for one in node.heard("checkpoint_saved") if one.attempt == 2], node)
    assert not (node.root / "kept").exists()


def test_finished_is_reported_once_the_last_save_is_committed(start_node, play, s3):
    node = start_node()
    started(node, play)
    assert node.heartbeat.attempt == 1
    (node.run_dir / "finish").touch()
    finished = node.wait_for("finished")
    assert manifest_key(play.prefix, finished.save) in s3.objects
    kinds = [report.kind for report in node.said if report.kind != "progress"]
    assert kinds[-2:] == ["checkpoint_saved", "finished"]
    assert node.heartbeat.attempt is None


@pytest.mark.parametrize("behaviour", ["abort", "linger"])
def test_how_a_process_ends_after_its_outcome_is_no_failure_of_the_job(start_node, play, s3, behaviour):
    node = start_node()
    node.orders.value = play.seen("run", 3, behaviour=behaviour)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    (node.run_dir / "finish").touch()
    finished = node.wait_for("finished")
    assert manifest_key(play.prefix, finished.save) in s3.objects
    assert not node.heard("failed")
    events = [json.loads(line) for line in (node.root / "events.jsonl").read_text().splitlines()]
    [note] = [line for line in events if line["event"] == "bad_exit_after_outcome"]
    assert note["reason"] == {"abort": "rank 0 was ended by SIGABRT", "linger": "rank 0 never ended"}[behaviour]


def test_an_order_to_stop_that_overtakes_the_order_to_run_is_answered_by_the_save_to_restore(start_node, play):
    node = start_node()
    resume = ResumeFrom(save="step-00000010.a0001.s01", manifest_sha256="0" * 64)
    node.orders.value = play.seen("checkpoint_stop", 9, attempt=2, resume_from=resume)
    saved = node.wait_for("checkpoint_saved")
    assert (saved.attempt, saved.save, saved.step) == (2, resume.save, 10)
    assert (saved.final, saved.existing, saved.answers_generation) == (True, True, 9)
    assert node.agent.attempt is None


def test_a_stop_with_nothing_to_save_is_told_at_once(start_node, play):
    """Otherwise the run would wait for a save until its deadline."""
    node = start_node()
    node.orders.value = play.seen("checkpoint_stop", 9)
    failed = node.wait_for("failed")
    assert (failed.failure, failed.attempt) == ("preemption", 1)
    assert "nothing to save" in failed.reason


def test_an_agent_that_fails_without_end_says_so_and_gives_the_node_up(start_node, play, monkeypatch):
    node = start_node()
    started(node, play)

    def broken():
        raise IndexError("injected")

    monkeypatch.setattr(node.agent.attempt, "tick", broken)
    for _ in range(51):
        guarded(node.agent._round, node.agent.tools.journal, "agent", 0.0)
    assert node.agent.stopping
    failed = node.heard("failed")[0]
    assert (failed.failure, "50 times in a row" in failed.reason) == ("crash", True)


def test_stop_ends_the_ranks_without_a_save_and_the_node_is_done(start_node, play, s3):
    node = start_node()
    started(node, play)
    node.orders.value = play.seen("stop", 4)
    play.until(lambda: node.agent.stopping, node)
    assert not [key for key in s3.objects if "/saves/" in key]


def test_release_stops_the_agent(start_node, play):
    node = start_node()
    started(node, play)
    node.orders.value = play.seen("release", 4)
    node.agent.tick()
    assert node.agent.stopping


@pytest.mark.parametrize(
    ("behaviour", "failure"),
    [
        ("exit:70", "bad_checkpoint"),
        ("exit:71", "diverged"),
        ("exit:72", "out_of_memory"),
        ("exit:73", "peer_lost"),
        ("exit:74", "user_error"),
        ("exit:1", "crash"),
        (f"signal:{int(signal.SIGKILL)}", "crash"),
        ("mute", "crash"),
    ],
)
def test_the_end_of_a_rank_is_reported_by_its_class(start_node, play, behaviour, failure):
    node = start_node()
    node.orders.value = play.seen("run", 3, behaviour=behaviour)
    failed = node.wait_for("failed")
    assert (failed.failure, failed.rank) == (failure, 0)
    assert "started" in failed.log_tail
    assert node.agent.state == "waiting"


def test_another_class_is_preferred_to_a_lost_peer():
    assert worst({0: 73, 1: 72, 2: None}).failure == "out_of_memory"
    assert worst({0: 73, 1: 0}).failure == "peer_lost"
    assert worst({0: 0, 1: None}) is None


def test_a_command_that_does_not_exist_is_a_crash(start_node, play):
    node = start_node()
    seen = play.seen("run", 3)
    image = replace(seen.spec.image, command=("/nowhere/trainer",))
    node.orders.value = Seen(seen.orders, replace(seen.spec, image=image), seen.roster)
    assert node.wait_for("failed").failure == "crash"


def test_ranks_of_a_node_are_ended_together(start_node, play):
    node = start_node()
    node.orders.value = play.seen("run", 3, spec=play.spec(ranks_per_node=2))
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    os.kill(node.agent.attempt.ranks.pids()[1], signal.SIGKILL)
    assert node.wait_for("failed").rank == 1
    assert marked(node.root) == []


def test_an_existing_save_is_found_in_the_bucket_and_reported_as_existing(start_node, play, s3):
    first = start_node()
    started(first, play)
    (first.run_dir / "save").touch()
    saved = first.wait_for("checkpoint_saved")
    first.orders.value = play.seen("run", 9, attempt=2, spec=play.spec(f"existing:{saved.save}"))
    answer = play.until(lambda: [r for r in first.heard("checkpoint_saved") if r.attempt == 2], first)[0]
    assert (answer.existing, answer.final, answer.save) == (True, True, saved.save)
    assert answer.manifest_sha256 == read_manifest(s3.objects[manifest_key(play.prefix, saved.save)]).sha256


def test_what_the_agent_did_is_in_its_events_file(start_node, play):
    node = start_node()
    started(node, play)
    node.orders.value = play.seen("checkpoint_stop", 4)
    play.until(lambda: node.agent.state == "waiting", node)
    events = [json.loads(line) for line in (node.root / "events.jsonl").read_text().splitlines()]
    names = [event["event"] for event in events]
    saved = ["save_uploaded", "manifest_put", "head_put", "committed"]
    assert [name for name in names if name in saved] == saved
    assert {"order_seen", "ranks_started", "control_written", "outcome"} <= set(names)
    assert all(earlier["at"] <= later["at"] for earlier, later in itertools.pairwise(events))
