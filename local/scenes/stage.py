"""A stage: one job on the shared cloud, watched, disturbed, and judged by the record it leaves."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy
from safetensors.numpy import save

from holdfast.domain.job import Job
from holdfast.messages.acceptance import read_acceptance
from holdfast_cli.prepare import ByteTokenizer, prepare
from job_contract.checkpoint_layout import job_prefix, manifest_key, read_manifest
from job_contract.version import plain
from local.cloud import Cloud
from local.node_records import Line, agent_lines, rank_lines, write_lines
from local.processes import NODE_MARKER, marked
from local.stack import Stack
from local.story import in_words

T = TypeVar("T")

LOOK_S = 0.2
END_S = 150.0
TEAM = "scenarios"
SHARD_TOKENS = 4096
MODEL = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 128}
VOCAB = 260
"""A block is a few seconds of training, so that a job of two minutes reads several."""

INTERVAL_STEPS = 20
"""A save each second or so, so that a loss without notice costs few steps."""


class Missed(Exception):
    """What was waited for did not come, or was not so."""


class Skipped(Exception):
    """The product does not have what the scenario is about; the message says what."""


@dataclass(frozen=True)
class Check:
    """One claim, and what was found."""

    claim: str
    ok: bool
    found: str


class Results:
    """Takes what lies on the result queue for whoever waits for it; several jobs share the queue."""

    def __init__(self, stack: Stack) -> None:
        self._sqs, self._url = stack.cloud.client("sqs"), stack.outputs["ResultQueueUrl"]
        self._lock = threading.Lock()
        self._found: list[dict[str, Any]] = []

    def of(self, job_id: str) -> list[dict[str, Any]]:
        with self._lock:
            answer = self._sqs.receive_message(QueueUrl=self._url, MaxNumberOfMessages=10)
            for message in answer.get("Messages", []):
                self._found.append(json.loads(message["Body"]))
                self._sqs.delete_message(QueueUrl=self._url, ReceiptHandle=message["ReceiptHandle"])
            return [result for result in self._found if result.get("job") == job_id]


@dataclass
class Theatre:
    """What all stages share."""

    stack: Stack
    results: Results
    folder: Path
    loud: bool = False
    closing: threading.Event = field(default_factory=threading.Event)

    @property
    def cloud(self) -> Cloud:
        return self.stack.cloud


class Stage:
    """`types` are the instance types of this stage alone, so that its faults touch no other job."""

    def __init__(self, theatre: Theatre, name: str, types: tuple[str, ...], part: str = "") -> None:
        self.theatre, self.cloud, self.name, self.types = theatre, theatre.cloud, name, types
        self.part = part
        self.folder = theatre.folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checks: list[Check] = []
        self.job_id = ""
        self.began_at = time.time()
        self._table = theatre.stack.table()
        self._told: set[str] = set()

    # Doing

    def submit(
        self,
        *,
        nodes: int = 2,
        steps: int = 90,
        interval_steps: int = INTERVAL_STEPS,
        program: str = "",
        **training: Any,
    ) -> Job:
        """A small training job is accepted; `program` is a module that its ranks run in place of the trainer.

        `training` are fields of the request's training that take the place of the usual ones.
        """
        body = request(self.name + self.part, self.types, nodes=nodes, steps=steps, interval_steps=interval_steps)
        body["training"] |= training
        if program:
            # Nodes are processes here, so the image is this environment and its name is nobody's.
            body["image"] = {"uri": "local/frameworks", "command": [sys.executable, "-m", program]}
        self.job_id = read_acceptance(json.dumps(body), now=0).job.id
        (self.folder / f"request{self.part}.json").write_text(json.dumps(body, indent=1))
        self.steps = steps
        self.theatre.stack.send_request(json.dumps(body))
        self.until("the job is accepted", lambda: self._table.load(self.job_id), within_s=30)
        return self.job()

    def put_weights(self, name: str) -> str:
        """Weights of the size that these jobs train lie in the team's part of the bucket; returns their address."""
        bucket, prefix = self.theatre.stack.outputs["CheckpointBucketName"], f"teams/{TEAM}/weights/{name}"
        files = tiny_llama()
        listed = "".join(f"{hashlib.sha256(body).hexdigest()}  {file}\n" for file, body in files.items())
        for file, body in {**files, "SHA256SUMS": listed.encode()}.items():
            self.cloud.client("s3").put_object(Bucket=bucket, Key=f"{prefix}/{file}", Body=body)
        return f"s3://{bucket}/{prefix}"

    def register_dataset(self, name: str, inputs: list[Path]) -> str:
        """Text is a dataset in the team's part of the bucket, known as <name>@1; returns its digest."""
        bucket, prefix = self.theatre.stack.outputs["CheckpointBucketName"], f"teams/{TEAM}/datasets/{name}"
        facts: dict[str, Any] = {"licence": "Apache-2.0", "source": name, "shard_tokens": SHARD_TOKENS}
        with tempfile.TemporaryDirectory() as parent:
            index = prepare(inputs, Path(parent) / name, tokenizer=ByteTokenizer(), **facts)
            for path in (Path(parent) / name).iterdir():
                self.cloud.client("s3").put_object(Bucket=bucket, Key=f"{prefix}/{path.name}", Body=path.read_bytes())
        wish = {"name": name, "version": 1, "uri": f"s3://{bucket}/{prefix}"}
        self.theatre.stack.send_control(
            json.dumps({"schema": "holdfast.control/1", "action": "register_dataset", **wish})
        )
        self.until(f"{name}@1 is registered", lambda: self._table.dataset(name, 1), within_s=30)
        return index.sha256

    def corpus_digest(self) -> str:
        """Return the digest of the data that the job's newest save was trained on."""
        job = self.job()
        assert job.saved is not None
        key = manifest_key(job_prefix(job.team, job.id), job.saved.save)
        bucket = self.theatre.stack.outputs["CheckpointBucketName"]
        raw = self.cloud.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
        return read_manifest(raw).corpus_digest

    def control(self, action: str, **more: object) -> float:
        """The message is on the control queue; when that was."""
        body = {"schema": "holdfast.control/1", "job": self.job_id, "action": action, "requested_by": "ops", **more}
        at = time.time()
        self.theatre.stack.send_control(json.dumps(body))
        self.tell(f"{action} was asked for by message")
        return at

    def train_to(self, step: int) -> Job:
        """The job runs and has finished this step."""

        def there() -> Job | None:
            job = self.alive()
            return job if job.phase == "running" and self.step() >= step else None

        return self.until(f"step {step} is trained", there)

    def wait(self, seconds: float) -> None:
        """So much time has passed. Raises Missed when the theatre is closed meanwhile."""
        if self.theatre.closing.wait(seconds):
            raise Missed("stopped")

    def until(self, what: str, look: Callable[[], T | None], *, within_s: float = 90.0) -> T:
        """Return the first true thing that `look` returns. Raises Missed when none comes in time."""
        give_up_at = time.monotonic() + within_s
        while time.monotonic() < give_up_at:
            self._tell_history()
            if found := look():
                self._tell_history()
                return found
            self.wait(LOOK_S)
        job = self._table.load(self.job_id)
        where = f"{job.phase}: {job.stage}; {job.reason}" if job else "no such job"
        raise Missed(f"not within {within_s:g} s: {what} ({where})")

    def finish(self, phase: str = "completed", *, within_s: float = END_S) -> Job:
        """The job has ended in this phase, and nothing of it is left; checked for every scenario."""
        job = self.until(f"the job is {phase}", self._over, within_s=within_s)
        self.until("no machine is left", lambda: not self.living(), within_s=20)
        result = self.until("the result is out", lambda: self.theatre.results.of(self.job_id), within_s=20)
        left = [pid for one in self.instances() for pid in marked(NODE_MARKER, one["instance"])]
        self.check(f"{phase}, one result, 0 machines", job.phase == phase and len(result) == 1, job.phase)
        self.check("no process left", not left, len(left), told=False)
        return job

    def check(self, claim: str, ok: bool, found: object = "", *, told: bool = True) -> None:
        """The claim is in the record; one that is not `told` is in the line of the scenario only when missed."""
        self.checks.append(Check(claim if told or not ok else "", ok, str(found)))
        self.tell(f"{'ok' if ok else 'MISSED'}: {claim} ({found})")

    def check_within(self, what: str, seconds: float, bound_s: float) -> None:
        """The claim that it took no longer than the bound is in the record, with the time."""
        self.check(f"{what} after {seconds:.1f} s (<= {bound_s:g})", seconds <= bound_s, f"{seconds:.2f}")

    def tell(self, text: str) -> None:
        line = {"at": time.time(), "elapsed_s": round(time.time() - self.began_at, 3), "text": text}
        with (self.folder / "timeline.jsonl").open("a") as timeline:
            timeline.write(json.dumps({**line, "part": self.part}) + "\n")
        if self.theatre.loud:
            print(f"{line['elapsed_s']:7.1f} s  {self.part}{' ' if self.part else ''}{text}", flush=True)

    def abandon(self) -> None:
        """A job that is still alive is to end, so that it takes no time of the others."""
        job = self._table.load(self.job_id) if self.job_id else None
        if job is not None and not job.over and not self.theatre.closing.is_set():
            self.control("cancel", dedup_id="abandoned")

    # Looking

    def job(self) -> Job:
        job = self._table.load(self.job_id)
        if job is None:
            raise Missed(f"{self.job_id} is not there")
        return job

    def alive(self) -> Job:
        """Return the job. Raises Missed when it has ended already."""
        job = self.job()
        if job.over:
            raise Missed(f"the job has ended too early: {job.phase} {job.reason}")
        return job

    def history(self, *kinds: str) -> list[dict[str, Any]]:
        """Return what happened to the job, oldest first, of these kinds or at all."""
        return [one for one in self._table.history(self.job_id) if not kinds or one["kind"] in kinds]

    def members(self) -> list[str]:
        """Return the instances of the newest roster, by node rank."""
        return [node.instance for node in self.theatre.stack.members(self.job())]

    def instances(self) -> list[dict[str, Any]]:
        """Return every machine ever launched for the job."""
        found: list[dict[str, Any]] = self.cloud.instances()
        return [one for one in found if one["tags"].get("holdfast:job") == self.job_id]

    def living(self) -> list[str]:
        return [one["instance"] for one in self.instances() if one["state"] != "terminated"]

    def fleets(self) -> list[Line]:
        """Return the job's CreateFleet calls."""
        return [call for call in self.cloud.journal("ec2_calls") if self._is_of_job(call)]

    def metrics(self) -> list[Line]:
        """Return one line for each optimizer step that was trained, by time."""
        lines = rank_lines(self.cloud.root, "metrics", self._ids())
        return sorted(lines, key=lambda line: float(line["at"]))

    def step(self) -> int:
        return max((line["step"] for line in self.metrics()), default=0)

    def lost_steps(self) -> int:
        """Return how many steps were trained more than once, or never."""
        times = Counter(line["step"] for line in self.metrics())
        return sum(abs(times[step] - 1) for step in range(1, self.steps + 1))

    def provided(self, instance: str) -> tuple[int, int]:
        """Return how many files of saves the node's ranks were given, and how many of them lay on its own disk."""
        lines = [line for line in agent_lines(self.cloud.root, [instance]) if line["event"] == "provided"]
        return sum(line["files"] for line in lines), sum(line["local"] for line in lines)

    def first_step_after(self, at: float, attempt: int) -> float:
        """Return the seconds from then to the first optimizer step of the attempt."""
        steps = [line["at"] for line in self.metrics() if line["attempt"] == attempt]
        if not steps:
            raise Missed(f"attempt {attempt} trained no step")
        return round(min(steps) - at, 1)

    def keep(self) -> None:
        """The raw record lies in the scenario's folder."""
        (self.folder / f"checks{self.part}.json").write_text(json.dumps([asdict(one) for one in self.checks], indent=1))
        if not self.job_id or self.theatre.closing.is_set():
            return
        ids = self._ids()
        end = {"job": plain(self.job()), "history": self.history(), "instances": self.instances()}
        (self.folder / f"end{self.part}.json").write_text(json.dumps(end, indent=1))
        write_lines(self.folder / f"metrics{self.part}.jsonl", self.metrics())
        write_lines(self.folder / f"rank_events{self.part}.jsonl", rank_lines(self.cloud.root, "events", ids))
        write_lines(self.folder / f"agent_events{self.part}.jsonl", agent_lines(self.cloud.root, ids))
        write_lines(self.folder / f"fleets{self.part}.jsonl", self.fleets())

    def _over(self) -> Job | None:
        job = self.job()
        return job if job.over else None

    def _ids(self) -> Collection[str]:
        return {one["instance"] for one in self.instances()}

    def _is_of_job(self, call: Line) -> bool:
        return call["operation"] == "CreateFleet" and self.job_id in json.dumps(call["request"])

    def _tell_history(self) -> None:
        for event in self.history() if self.job_id else []:
            if event["sk"] not in self._told:
                self._told.add(event["sk"])
                self.tell(in_words(event))


def tiny_llama() -> dict[str, bytes]:
    """Return config.json and one safetensors file of MODEL in Hugging Face's Llama layout, the weights drawn."""
    dim, ffn, draw = MODEL["dim"], MODEL["ffn_dim"], numpy.random.default_rng(7)
    kv = dim // MODEL["heads"] * MODEL["kv_heads"]
    shapes = {"model.embed_tokens": (VOCAB, dim), "lm_head": (VOCAB, dim), "model.norm": (dim,)}
    inside = {
        "input_layernorm": (dim,), "post_attention_layernorm": (dim,), "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv, dim), "self_attn.v_proj": (kv, dim), "self_attn.o_proj": (dim, dim),
        "mlp.gate_proj": (ffn, dim), "mlp.up_proj": (ffn, dim), "mlp.down_proj": (dim, ffn),
    }  # fmt: skip
    for layer in range(MODEL["layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    tensors = {
        f"{name}.weight": numpy.ones(shape, "f4") if len(shape) == 1 else draw.normal(0, 0.02, shape).astype("f4")
        for name, shape in shapes.items()
    }
    config = {
        "model_type": "llama", "hidden_size": dim, "num_hidden_layers": MODEL["layers"], "intermediate_size": ffn,
        "num_attention_heads": MODEL["heads"], "num_key_value_heads": MODEL["kv_heads"], "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "hidden_act": "silu",
    }  # fmt: skip
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save(tensors)}


def request(name: str, types: tuple[str, ...], *, nodes: int, steps: int, interval_steps: int) -> dict[str, Any]:
    """Return a request for a training so small that starting the ranks takes most of its time."""
    return {
        "schema": "holdfast.job-request/1",
        "name": name,
        "team": TEAM,
        "dedup_id": name,
        "training": {
            "model": dict(MODEL),
            "data": {"corpus": "stdlib"},
            "steps": steps,
            "global_batch": 16,
            "sequence_length": 128,
            "learning_rate": 0.001,
            "warmup_steps": 5,
            "parallel": "fsdp",
            "seed": 7,
        },
        "fleet": {"nodes": nodes, "min_nodes": 1, "instance_types": list(types), "market": "spot", "zones": "any"},
        "checkpoint": {"interval_steps": interval_steps, "keep": 3},
        "limits": {"attempts": 3},
        "report_s": 1,
    }
