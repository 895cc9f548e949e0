"""What the ranks printed: its end in the bucket, its lines in CloudWatch Logs, no secret in either."""

import json
import sys
from dataclasses import replace

import pytest
from botocore.exceptions import ClientError

from agent import logs
from agent.cloud import Bucket
from agent.journal import Journal
from agent.logs import Follower, TailShipper, curve, log_key, tails
from job_contract.checkpoint_layout import metrics_key


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "events.jsonl")


@pytest.fixture
def shipper(s3, journal, monkeypatch):
    monkeypatch.setattr(logs, "RETRY_S", 0.01)
    shipper = TailShipper(Bucket(s3, "bucket"), journal)
    shipper.loop.start()
    yield shipper
    shipper.loop.close(wait_s=2.0)


def write(folder, rank, text):
    folder.mkdir(exist_ok=True)
    with (folder / f"rank-{rank}.log").open("a") as log:
        log.write(text)


def test_the_end_of_a_log_is_taken_and_no_secret_with_it(tmp_path):
    write(tmp_path / "logs", 0, "first line\n" + "x" * logs.TAIL_BYTES + "\nlogged in with s3cr3t\n")
    write(tmp_path / "logs", 1, "hello\n")
    (tmp_path / "logs/nccl.host.1").write_text("not a rank's")
    found = tails(tmp_path / "logs", {"TOKEN": "s3cr3t"})
    assert list(found) == ["rank-0.log", "rank-1.log"]
    assert len(found["rank-0.log"]) <= logs.TAIL_BYTES + 10
    assert found["rank-0.log"].endswith(b"logged in with [TOKEN]\n")
    assert b"first line" not in found["rank-0.log"]
    assert tails(tmp_path / "nowhere", {}) == {}


def test_a_bucket_that_fails_twice_still_gets_the_logs(shipper, s3):
    s3.fail("put", "rank-0.log", "SlowDown", 503, times=2)
    shipper.ship({log_key("teams/a/jobs/j", 3, "rank-0.log"): b"tail"})
    assert shipper.flush(within_s=5.0)
    assert s3.objects["teams/a/jobs/j/logs/attempt-0003/rank-0.log"] == b"tail"


def test_a_log_that_cannot_be_put_holds_up_no_other(shipper, s3):
    s3.fail("put", "rank-0.log", "AccessDenied", 403, times=9)
    shipper.ship({log_key("p", 1, f"rank-{rank}.log"): b"%d" % rank for rank in (0, 1)})
    assert shipper.flush(within_s=5.0)
    assert [key for key in s3.objects if "/logs/" in key] == [log_key("p", 1, "rank-1.log")]


def test_the_logs_of_each_attempt_are_in_the_bucket_once_it_is_over(start_node, play, s3, shipper):
    node = start_node()
    node.agent.logs = shipper
    node.orders.value = play.seen("run", 3, behaviour="exit:1")
    node.wait_for("failed")
    node.agent.tick()
    assert shipper.flush(within_s=5.0)
    body = s3.objects[log_key(play.prefix, 1, "rank-0.log")]
    assert b"about to fail" in body
    play.head(s3, attempt=2)
    node.orders.value = play.seen("run", 9, attempt=2)
    play.until(lambda: node.agent.attempt.number == 2, node)
    node.agent.attempt.leave()
    node.agent.tick()
    assert shipper.flush(within_s=5.0)
    assert [s3.puts.count(log_key(play.prefix, number, "rank-0.log")) for number in (1, 2)] == [1, 1]


def test_the_curve_reaches_the_bucket_with_each_save_and_at_the_end(start_node, play, s3, shipper):
    node = start_node()
    node.agent.logs = shipper
    node.orders.value = play.seen("run", 3, behaviour="train")
    node.wait_for("started")
    metrics = node.agent.attempt._run_dir / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(a_step(step)) + "\n" for step in (1, 2)))
    node.orders.value = play.seen("checkpoint_stop", 4)
    node.wait_for("checkpoint_saved")
    node.agent.tick()
    assert shipper.flush(within_s=5.0)
    lines = [json.loads(line) for line in s3.objects[metrics_key(play.prefix, 1)].splitlines()]
    assert [line["step"] for line in lines] == [1, 2]


def a_step(step, attempt=1):
    return {"step": step, "attempt": attempt, "loss": float(step), "tokens": 10, "seconds": 0.5, "at": 1000.0 + step}


def test_a_long_curve_is_gathered_and_its_sums_and_ends_stay(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(a_step(step)) + "\n" for step in range(1, 4502)))
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(a_step(500)) + '\n{"step": 501, "lo')
    *lines, evaluation = [json.loads(line) for line in curve(tmp_path).splitlines()]
    assert len(lines) <= logs.MOST_LINES and (lines[0]["step"], lines[-1]["step"]) == (3, 4501)
    assert (sum(line["tokens"] for line in lines), sum(line["steps"] for line in lines)) == (45010, 4501)
    assert lines[0]["loss"] == 2.0 and evaluation == {
        "step": 500,
        "attempt": 1,
        "at": 1500.0,
        "evaluation_loss": 500.0,
    }


def test_what_steady_steps_took_is_a_line_beside_the_curve(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(a_step(1)) + "\n")
    told = {"step": 40, "attempt": 1, "at": 9.0, "steady": {"steps": 20, "step_ms": 5.0}}
    assert [json.loads(line) for line in curve(tmp_path, told).splitlines()][1:] == [told]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1]",
        '{"epoch": 1}',
        '{"step": "1", "attempt": 1, "loss": 2, "at": 3}',
        '{"step": 1, "attempt": 1, "loss": 2, "at": 3, "tokens": "8"}',
    ],
)
def test_a_line_that_a_program_of_the_users_own_wrote_otherwise_is_left_out(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n{json.dumps(a_step(7))}\n")
    assert [json.loads(one)["step"] for one in curve(tmp_path).splitlines()] == [7]


def test_before_the_first_step_there_is_an_empty_curve(tmp_path):
    assert curve(tmp_path) == b""


def test_a_secret_that_a_rank_prints_stays_on_the_node(start_node, play, s3, shipper):
    node = start_node()
    node.agent.logs = shipper
    node.stores.values["secretsmanager:arn"] = node.stores.values["arn"] = "s3cr3t"
    spec = play.spec(secrets={"TOKEN": "secretsmanager:arn"})
    command = (sys.executable, "-c", "import os, sys; print('token', os.environ['TOKEN'], flush=True); sys.exit(1)")
    node.orders.value = play.seen("run", 3, spec=replace(spec, image=replace(spec.image, command=command)))
    node.wait_for("failed")
    node.agent.tick()
    assert shipper.flush(within_s=5.0)
    assert s3.objects[log_key(play.prefix, 1, "rank-0.log")] == b"token [TOKEN]\n"


class CloudWatch:
    """CreateLogStream and PutLogEvents; refuses a stream that exists, or is not made yet, as AWS does."""

    def __init__(self):
        self.streams, self.faults = {}, []

    def create_log_stream(self, *, logGroupName, logStreamName):
        if logStreamName in self.streams:
            raise ClientError({"Error": {"Code": "ResourceAlreadyExistsException"}}, "CreateLogStream")
        self.streams[logStreamName] = []

    def put_log_events(self, *, logGroupName, logStreamName, logEvents):
        if self.faults:
            raise ClientError({"Error": {"Code": self.faults.pop()}}, "PutLogEvents")
        assert logGroupName == "group"
        assert 0 < len(logEvents) <= 10_000
        assert sum(len(event["message"].encode()) + 26 for event in logEvents) < 1_048_576
        assert all(event["message"] for event in logEvents)
        self.streams[logStreamName] += [event["message"] for event in logEvents]


@pytest.fixture
def cloud():
    return CloudWatch()


@pytest.fixture
def follow(cloud, journal, tmp_path):
    follower = Follower(cloud, "group", journal)
    return lambda: follower.look("job", 1, tmp_path / "logs", {"TOKEN": "s3cr3t"})


def test_whole_lines_are_sent_once_each_as_they_come(cloud, follow, tmp_path):
    write(tmp_path / "logs", 0, "one\n\ntwo s3cr3t\nhal")
    follow()
    follow()
    write(tmp_path / "logs", 0, "f\n")
    write(tmp_path / "logs", 1, "other\n")
    follow()
    assert cloud.streams == {"job/0001/rank-0": ["one", " ", "two [TOKEN]", "half"], "job/0001/rank-1": ["other"]}


def test_the_last_lines_of_an_attempt_are_sent_when_it_is_over_and_not_ten_seconds_later(
    start_node, play, shipper, cloud, journal
):
    node = start_node()
    node.agent.logs, node.agent._follower = shipper, Follower(cloud, "group", journal)
    node.agent._following.start()
    play.until(lambda: node.agent.attempt is None, node)
    node.orders.value = play.seen("run", 3, behaviour="exit:1")
    node.wait_for("failed")
    sent = play.until(lambda: cloud.streams.get(f"{play.job}/0001/rank-0"), node, within_s=3.0)
    node.agent._following.close(wait_s=2.0)
    assert sent == ["started exit:1", "about to fail"]


def test_what_was_refused_is_sent_with_the_next_look_and_a_stream_that_exists_is_used(cloud, follow, tmp_path):
    cloud.streams["job/0001/rank-0"] = []
    cloud.faults = ["ThrottlingException"]
    write(tmp_path / "logs", 0, "one\n")
    follow()
    assert cloud.streams["job/0001/rank-0"] == []
    follow()
    assert cloud.streams["job/0001/rank-0"] == ["one"]


def test_a_rank_that_prints_without_end_costs_a_bounded_batch_a_look(cloud, follow, tmp_path):
    write(tmp_path / "logs", 0, "".join(f"line {number}\n" for number in range(100_000)))
    follow()
    sent = cloud.streams["job/0001/rank-0"]
    assert len(sent) == logs.BATCH_LINES + 1
    assert sent[0].endswith("lines left out")
    assert sent[-1] == "line 99999"
    follow()
    assert len(sent) == logs.BATCH_LINES + 1
