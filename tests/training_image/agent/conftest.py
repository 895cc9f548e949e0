"""An in-memory bucket that refuses as S3 does, and a node whose cloud is played by the test."""

import hashlib
import io
import os
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from agent.agent import Agent
from agent.attempt import Tools
from agent.cloud import Bucket
from agent.identity import Identity
from agent.journal import Journal
from agent.orders import Seen
from agent.settings import Pace, Settings
from job_contract.checkpoint_layout import Head, head_key, seal
from job_contract.orders import Action, Leader, Orders, Roster, RosterNode
from job_contract.spec import CheckpointSpec, DataSpec, ImageSpec, JobSpec, ModelSpec, TrainingSpec

REPOSITORY = Path(__file__).parents[3]
RANK = str(Path(__file__).with_name("scripted_rank.py"))
JOB, PREFIX = "tiny-1", "teams/research/jobs/tiny-1"
FAST = Pace(
    tick_s=0.01,
    progress_look_s=0.02,
    parts_s=0.02,
    rank_end_s=0.3,
    exits_settle_s=0.05,
    last_exit_s=0.2,
    ready_s=0.05,
    orders_idle_s=0.0,
    hang_grace_s=0.2,
    stacks_s=0.1,
)


class FakeStores:
    """Secrets Manager and Parameter Store; what is not in them is refused as AWS does."""

    def __init__(self, **values):
        self.values, self.code = values, "ResourceNotFoundException"

    def secret(self, reference):
        if reference not in self.values:
            raise ClientError({"Error": {"Code": self.code}}, "GetSecretValue")
        return self.values[reference]

    parameter = secret


class FakeS3:
    """The calls of boto3's S3 client that the agent makes; `fail` lets the next ones on a key be refused."""

    def __init__(self):
        self.objects = {}
        self.faults = []
        self.puts = []
        self._lock = threading.Lock()

    def fail(self, operation, key_end, code, status, times=1):
        self.faults += [(operation, key_end, code, status)] * times

    def get_object(self, *, Bucket, Key):
        with self._lock:
            self._fault("get", Key)
            if Key not in self.objects:
                raise _error("NoSuchKey", 404)
            body = self.objects[Key]
            return {"Body": io.BytesIO(body), "ETag": _etag(body)}

    def put_object(self, *, Bucket, Key, Body, IfNoneMatch=None, IfMatch=None):
        with self._lock:
            self._fault("put", Key)
            if IfNoneMatch == "*" and Key in self.objects:
                raise _error("PreconditionFailed", 412)
            if IfMatch and (Key not in self.objects or _etag(self.objects[Key]) != IfMatch):
                raise _error("PreconditionFailed", 412)
            self.objects[Key] = Body
            self.puts.append(Key)

    def upload_file(self, path, bucket, key, Config):
        self.put_object(Bucket=bucket, Key=key, Body=Path(path).read_bytes())

    def get_paginator(self, operation):
        return self

    def paginate(self, *, Bucket, Prefix):
        with self._lock:
            return [{"Contents": [{"Key": key} for key in sorted(self.objects) if key.startswith(Prefix)]}]

    def _fault(self, operation, key):
        for fault in self.faults:
            if fault[0] == operation and key.endswith(fault[1]):
                self.faults.remove(fault)
                raise _error(fault[2], fault[3])


def _etag(body):
    return f'"{hashlib.md5(body).hexdigest()}"'


def _error(code, status):
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Any")


class Quiet:
    """A loop that never runs."""

    def start(self):
        pass

    def poke(self):
        pass

    def close(self, *, wait_s=0.0):
        pass


class Latest:
    """A poller whose newest answer is set by the test."""

    def __init__(self):
        self.value, self.loop = None, Quiet()

    def latest(self):
        return self.value


class Pulse(Quiet):
    def __init__(self):
        self.attempt, self.loop = None, self

    def begin(self, attempt):
        self.attempt = attempt

    def end(self):
        self.attempt = None


class Node:
    """A real agent with real ranks; the test gives orders and notices, and reads reports."""

    def __init__(self, root, s3, node_rank=0, pace=FAST):
        self.instance, self.root, self.said = f"i-{node_rank}", root, []
        self.run_dir = root / "run"
        identity = Identity(
            instance=self.instance,
            instance_type="c7i.large",
            zone="eu-west-1a",
            region="eu-west-1",
            ip="127.0.0.1",
            interface="lo",
            job=JOB,
        )
        self.stores = FakeStores()
        settings = Settings(
            orders_table="orders", report_queue_url="queue", bucket="bucket", root=root, corpus_dir=root / "corpus"
        )
        tools = Tools(
            settings=settings,
            pace=pace,
            interface="lo",
            instance_type="c7i.large",
            gpus=0,
            efas=0,
            bucket=Bucket(s3, "bucket"),
            journal=Journal(root / "events.jsonl"),
            say=self._say,
            secrets=self.stores,
        )
        self.orders, self.notices, self.heartbeat = Latest(), Latest(), Pulse()
        self.agent = Agent(
            identity, tools, orders=self.orders, notices=self.notices, heartbeat=self.heartbeat, reporter=None
        )

    def _say(self, kind, **fields):
        self.said.append(kind(job=JOB, instance=self.instance, at=time.time(), **fields))

    def heard(self, kind):
        return [report for report in self.said if report.kind == kind]

    def wait_for(self, kind, *others):
        return wait_for(lambda: self.heard(kind), self, *others)[-1]


def wait_for(condition, *nodes, within_s=10.0):
    """Tick the nodes until the condition holds; return what it returned."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for node in nodes:
            node.agent.tick()
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {within_s} s; reports: {[[r.kind for r in node.said] for node in nodes]}")


def make_spec(behaviour="train", **changes):
    model = ModelSpec(dim=8, layers=1, heads=1, kv_heads=1, ffn_dim=8)
    training = TrainingSpec(
        model=model, data=DataSpec(corpus="stdlib"), steps=10, global_batch=1, sequence_length=8, learning_rate=0.1
    )
    image = ImageSpec(uri="scripted", command=(sys.executable, RANK, behaviour))
    spec = JobSpec(
        job=JOB,
        team="research",
        spec_id="spec-1",
        prefix=PREFIX,
        training=training,
        checkpoint=CheckpointSpec(interval_steps=5),
        report_s=0.05,
        image=image,
    )
    return replace(spec, **changes)


def make_roster(nodes=1, attempt=1, port=29555):
    members = tuple(RosterNode(node_rank=rank, instance=f"i-{rank}", ip="127.0.0.1") for rank in range(nodes))
    leader = Leader(ip="127.0.0.1", port=port)
    return Roster(job=JOB, attempt=attempt, roster_id=f"roster-{attempt}", nodes=members, leader=leader)


def make_seen(action, generation, *, attempt=1, nodes=1, behaviour="train", spec=None, **changes):
    roster = make_roster(nodes, attempt)
    orders = Orders(
        job=JOB,
        attempt=attempt,
        generation=generation,
        action=Action(action),
        spec_id="spec-1",
        issued_at=0.0,
        roster_id=roster.roster_id,
        **changes,
    )
    return Seen(orders, spec or make_spec(behaviour), roster)


def put_head(s3, attempt=1, pointer=None):
    head = Head(
        job=JOB,
        attempt=attempt,
        step=pointer.step if pointer else 0,
        save=pointer and pointer.save,
        manifest_sha256=pointer and pointer.manifest_sha256,
    )
    s3.put_object(Bucket="bucket", Key=head_key(PREFIX), Body=seal(head)[0])


@pytest.fixture(autouse=True)
def _rank_environment(monkeypatch):
    roots = [REPOSITORY / "layers" / "holdfast", REPOSITORY / "training_image"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, roots)))


@pytest.fixture
def s3():
    fake = FakeS3()
    put_head(fake)
    return fake


@pytest.fixture
def start_node(tmp_path, s3):
    """Start nodes that are ended with the test, ranks included."""
    nodes = []

    def start(node_rank=0, *, pace=FAST, bucket=None):
        nodes.append(Node(tmp_path / f"node-{node_rank}", bucket or s3, node_rank, pace))
        return nodes[-1]

    yield start
    for node in nodes:
        if node.agent.attempt:
            node.agent.attempt.leave()


@pytest.fixture
def play():
    """The builders of this file, for tests that cannot import it."""

    class Play:
        seen = staticmethod(make_seen)
        spec = staticmethod(make_spec)
        roster = staticmethod(make_roster)
        head = staticmethod(put_head)
        until = staticmethod(wait_for)
        fast, job, prefix = FAST, JOB, PREFIX
        rank = RANK

    return Play


class MetadataService:
    """An instance metadata service: session tokens, and 404 for every document that is not in `documents`."""

    def __init__(self):
        self.documents, self.tokens, self.status = {}, [], None
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self):
                service.tokens.append(f"token-{len(service.tokens)}")
                asked = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                self.answer(200 if asked else 400, service.tokens[-1])

            def do_GET(self):
                if self.headers["X-aws-ec2-metadata-token"] not in service.tokens[-1:]:
                    return self.answer(401, "")
                text = service.documents.get(self.path.removeprefix("/latest/meta-data/"))
                return self.answer(service.status or (404 if text is None else 200), text or "")

            def answer(self, status, text):
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def metadata():
    service = MetadataService()
    yield service
    service.close()
