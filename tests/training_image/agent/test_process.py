"""The agent as the process it is: `python -m agent` with a small cloud on loopback, and scripted ranks."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from boto3.dynamodb.types import TypeSerializer
from botocore.exceptions import ClientError

from agent.hygiene import ATTEMPT_MARKER
from job_contract.checkpoint_layout import manifest_key
from job_contract.orders import orders_key, roster_key, spec_key
from job_contract.version import encode

REGION = "us-east-1"
CONDITIONS = {"IfNoneMatch": "If-None-Match", "IfMatch": "If-Match"}
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "i-0", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": REGION}


class Cloud:
    """DynamoDB, SQS, Step Functions and S3 over HTTP, as much of them as one agent calls."""

    def __init__(self, s3):
        self.s3, self.items, self.messages, self.beats = s3, {}, [], []
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                operation = self.headers["X-Amz-Target"].partition(".")[2]
                self.answer(200, json.dumps(cloud.call(operation, json.loads(self.body()))).encode())

            def do_PUT(self):
                condition = {name: self.headers[header] for name, header in CONDITIONS.items() if self.headers[header]}
                self.store(lambda key: s3.put_object(Bucket="bucket", Key=key, Body=self.body(), **condition) or b"")

            def do_GET(self):
                prefix = parse_qs(urlsplit(self.path).query).get("prefix")
                read = (lambda key: listing(s3, prefix[0])) if prefix else (lambda key: body_of(s3, key))
                self.store(read)

            def store(self, act):
                try:
                    body = act(unquote(urlsplit(self.path).path).partition("/bucket/")[2])
                except ClientError as error:
                    code = error.response["Error"]["Code"]
                    status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                    return self.answer(status, f"<Error><Code>{code}</Code></Error>".encode())
                return self.answer(200, body)

            def body(self):
                return self.rfile.read(int(self.headers["Content-Length"]))

            def answer(self, status, body):
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", f'"{hashlib.md5(body).hexdigest()}"')
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def call(self, operation, request):
        if operation == "GetItem":
            item = self.items.get(request["Key"]["key"]["S"])
            return {"Item": item} if item else {}
        if operation == "SendMessage":
            self.messages.append(json.loads(request["MessageBody"]))
            return {"MessageId": str(len(self.messages)), "MD5OfMessageBody": md5(request["MessageBody"])}
        assert operation == "SendTaskHeartbeat"
        self.beats.append(request["taskToken"])
        return {}

    def put(self, key, message):
        plain = json.loads(json.dumps({"key": key, **encode(message)}), parse_float=Decimal)
        self.items[key] = {name: TypeSerializer().serialize(value) for name, value in plain.items()}

    def order(self, seen):
        self.put(spec_key(seen.orders.job, seen.orders.spec_id), seen.spec)
        self.put(roster_key(seen.orders.job, seen.roster.roster_id), seen.roster)
        self.put(orders_key(seen.orders.job), seen.orders)

    def report(self, kind):
        return until(lambda: next((body for body in self.messages if body["kind"] == kind), None))


def body_of(s3, key):
    return s3.get_object(Bucket="bucket", Key=key)["Body"].read()


def listing(s3, prefix):
    keys = "".join(f"<Contents><Key>{key}</Key></Contents>" for key in sorted(s3.objects) if key.startswith(prefix))
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{keys}</ListBucketResult>".encode()


def md5(text):
    return hashlib.md5(text.encode()).hexdigest()


def until(look, within_s=15.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {within_s} s")


def processes_of(root):
    """Every process whose start environment names this node: agent, guard, ranks and what these started."""
    mark = f"HOLDFAST_NODE_ROOT={root}".encode()
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                variables = file.read().split(b"\0")
        except OSError:
            continue
        if mark in variables:
            found[int(entry)] = any(line.startswith(ATTEMPT_MARKER.encode()) for line in variables)
    return found


@pytest.fixture
def cloud(s3):
    cloud = Cloud(s3)
    yield cloud
    cloud.close()


@pytest.fixture
def start_agent(cloud, metadata, play, tmp_path):
    metadata.documents |= {
        "instance-id": "i-0",
        "instance-type": "c7i.large",
        "local-ipv4": "127.0.0.1",
        "placement/availability-zone": f"{REGION}a",
        "placement/region": REGION,
        "tags/instance/holdfast:job": play.job,
    }
    environment = {
        **os.environ,
        **CREDENTIALS,
        "AWS_ENDPOINT_URL": cloud.endpoint,
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.endpoint,
        "HOLDFAST_ORDERS_TABLE": "orders",
        "HOLDFAST_REPORT_QUEUE_URL": f"{cloud.endpoint}/123456789012/reports",
        "HOLDFAST_BUCKET": "bucket",
        "HOLDFAST_NODE_ROOT": str(tmp_path),
    }
    with (tmp_path / "agent.log").open("wb") as log:
        agent = subprocess.Popen([sys.executable, "-m", "agent"], env=environment, stdout=log, stderr=log)
    yield agent
    agent.kill()
    agent.wait()
    until(lambda: not processes_of(tmp_path))


def training(cloud, play, tmp_path, behaviour="train", **changes):
    cloud.order(play.seen("run", 3, behaviour=behaviour, **changes))
    until(lambda: (tmp_path / "run" / "progress.json").exists())


def test_a_notice_alone_ends_in_a_committed_checkpoint_and_release_ends_the_agent(
    start_agent, cloud, metadata, play, tmp_path
):
    ready = cloud.report("ready")
    assert (ready["instance"], ready["interface"]) == ("i-0", "lo")
    assert min(ready["disk_free_bytes"], ready["memory_free_bytes"]) > 1 << 20
    assert abs(ready["clock_offset_s"]) < 2
    training(cloud, play, tmp_path)
    ends_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 60))
    metadata.documents["spot/instance-action"] = json.dumps({"action": "terminate", "time": ends_at})
    saved = cloud.report("checkpoint_saved")
    assert saved["final"]
    assert manifest_key(play.prefix, saved["save"]) in cloud.s3.objects
    cloud.put(orders_key(play.job), play.seen("release", 9).orders)
    assert start_agent.wait(timeout=10) == 0
    assert processes_of(tmp_path) == {}


@pytest.mark.parametrize("behaviour", ["train", "litter"])
def test_nothing_of_the_node_is_left_two_seconds_after_sigkill_of_the_agent(
    start_agent, cloud, play, tmp_path, behaviour
):
    training(cloud, play, tmp_path, behaviour, spec=play.spec(behaviour, ranks_per_node=2))
    expected = 4 if behaviour == "litter" else 2
    until(lambda: sum(processes_of(tmp_path).values()) == expected)
    start_agent.send_signal(signal.SIGKILL)
    start_agent.wait()
    until(lambda: not processes_of(tmp_path), within_s=2.0)


def test_sigterm_ends_ranks_and_agent_with_exit_code_0(start_agent, cloud, play, tmp_path):
    training(cloud, play, tmp_path)
    start_agent.send_signal(signal.SIGTERM)
    assert start_agent.wait(timeout=5) == 0
    assert processes_of(tmp_path) == {}


def test_sigterm_before_the_metadata_answers_ends_the_agent(start_agent, metadata):
    metadata.status = 500
    start_agent.send_signal(signal.SIGTERM)
    assert start_agent.wait(timeout=5) in (0, -signal.SIGTERM)
