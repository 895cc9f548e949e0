"""From the notice to the order: AWS calls counted on the real handler, its own processor time, and the way to the node.

Calls are counted by a botocore hook over moto's tables. Processor time is measured in a fresh process, whose calls get
the answers that moto gave, below botocore: serialising, signing and parsing are charged, the network and moto are not.
The way from EventBridge to the first node is drawn from published latencies.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.settings import Pace
from bench.control_plane import published as p
from bench.table import Row, show
from bench.world.template import ROOT, read_template
from bench.world.wire import wired_client
from bench.world.world import JOBS, ORDERS, World
from job_contract.orders import Wait, WaitItem, orders_key
from tests import builders as b
from tests.functions.scenes import INSTANCE, JOB, table, training

DOORS: Mapping[str, str] = {
    "OnSpotInterruption": "ec2-spot-interruption-warning.json",
    "OnInstanceStateChange": "ec2-instance-state-change-shutting-down.json",
}
MOST_CALLS, MOST_CPU_MS = 4, 100.0
EVENTS, WARM_S, COLD_S = 10_000, 3.0, 5.0
PROCESSES = 3


@dataclass
class Heard:
    """Calls in their order; `answers` are (service, operation, body). `before_order` counts up to the order's own."""

    answers: list[tuple[str, str, str]] = field(default_factory=list)
    before_order: int | None = None

    def hears(self, http_response: Any, model: Any, context: Mapping[str, Any], **_: object) -> None:
        body = getattr(http_response, "content", b"{}").decode()
        self.answers.append((model.service_model.service_name, model.name, body))
        if model.name == "TransactWriteItems" and {"S": orders_key(JOB)} in _keys_put(context):
            self.before_order = self.before_order or len(self.answers)


def _keys_put(context: Mapping[str, Any]) -> list[Any]:
    return [write["Put"]["Item"].get("key") for write in context["api_params"]["TransactItems"]]


def heard_at(door: str) -> Heard:
    """Return the calls of one real invocation, a state of the run machine waiting for the news."""
    heard = Heard()
    with World() as world:
        world.ticking = False
        job = training(world)
        world.machine.answer("StartExecution", {"name": f"{JOB}-1", "input": "{}"})
        table().put_wait(WaitItem(job=JOB, attempt=job.attempt, wait=Wait.TRAINING, token=f"{JOB}-1/1"))
        clients = [wired_client(service) for service in ("dynamodb", "stepfunctions")]
        for client in clients:
            client.meta.events.register("after-call", heard.hears, unique_id="heard")
        try:
            world.call(door, told(door))
        finally:
            for client in clients:
                client.meta.events.unregister("after-call", unique_id="heard")
    return heard


def told(door: str) -> dict[str, Any]:
    event = b.sample(DOORS[door])
    event["detail"]["instance-id"] = INSTANCE
    return event


# -- processor time ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Milliseconds of processor time: importing the door, its first event up to the order, later ones, all of them."""

    import_ms: float
    first_ms: float
    warm_ms: float
    warm_p99_ms: float
    whole_ms: float


def cost_of(door: str, heard: Heard) -> Cost:
    """Return the median of some fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "answers.json"
        script.write_text(json.dumps({"answers": heard.answers, "event": told(door), "order": heard.before_order}))
        runs = [_replayed(DOOR_MODULES[door], script) for _ in range(PROCESSES)]
    middle = {name: sorted(run[name] for run in runs)[PROCESSES // 2] for name in runs[0]}
    return Cost(**middle)


DOOR_MODULES = {"OnSpotInterruption": "on_spot_interruption", "OnInstanceStateChange": "on_instance_state_change"}


def _replayed(module: str, script: Path) -> dict[str, float]:
    path = os.pathsep.join(str(ROOT / part) for part in ("layers/holdfast", "functions", "."))
    names = (
        "STACK",
        "JOBS_TABLE",
        "ORDERS_TABLE",
        "BUCKET",
        "BUS",
        "RESULT_QUEUE_URL",
        "LAUNCH_TEMPLATE_ID",
        "SUBNET_IDS",
    )
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "HOLDFAST_"))},
        **{f"HOLDFAST_{name}": "holdfast" for name in names},
        "HOLDFAST_JOBS_TABLE": JOBS,
        "HOLDFAST_ORDERS_TABLE": ORDERS,
        "HOLDFAST_STATE_MACHINE_ARN": "arn:aws:states:us-east-1:123456789012:stateMachine:holdfast-run-attempt",
        "PYTHONPATH": path,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "POWERTOOLS_TRACE_DISABLED": "1",
    }
    child = Path(__file__).with_name("replayed_door.py")
    done = subprocess.run(
        [sys.executable, str(child), module, str(script)], env=environment, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


# -- the way to the node -----------------------------------------------------------------------------------------------


def signal_s(chance: random.Random, cost: Cost, share: float, pace: Pace, *, cold: bool) -> tuple[float, float]:
    """Return seconds from the event to the first node's signal by EventBridge alone, and by the sooner of both ways."""
    own_ms = cost.first_ms if cold else cost.warm_ms
    seconds = p.EVENTBRIDGE_TO_LAMBDA.draw_s(chance) + own_ms / 1000 / share
    if cold:
        seconds += p.COLD_START.draw_s(chance)
    seconds += p.TABLE_READ.draw_s(chance) + p.TABLE_READ.draw_s(chance) + p.TRANSACTION.draw_s(chance)
    # The order lies there; the leader looks, and its agent acts at its next tick.
    seconds += chance.uniform(0, pace.orders_leader_s) + p.TABLE_READ.draw_s(chance) + chance.uniform(0, pace.tick_s)
    by_metadata = chance.uniform(0, pace.metadata_s) + chance.uniform(0, pace.tick_s)
    return seconds, min(seconds, by_metadata)


def rows() -> Iterator[Row]:
    """Yield calls, processor time, and the simulated way."""
    share = min(1.0, read_template().doors["OnSpotInterruption"].memory_mb / p.LAMBDA_MB_PER_CPU)
    costs = {}
    for door in DOORS:
        heard = heard_at(door)
        calls = heard.before_order or 0
        names = ", ".join(name for _, name, _ in heard.answers[:calls])
        yield Row(
            f"{door}: sequential calls to the order ({names})", calls, f"<= {MOST_CALLS}", 0 < calls <= MOST_CALLS
        )
        yield Row(f"{door}: calls in all", len(heard.answers), "reported", True)
        costs[door] = cost = cost_of(door, heard)
        yield Row(
            f"{door}: own CPU ms to the order, warm", cost.warm_ms, f"<= {MOST_CPU_MS:g}", cost.warm_ms <= MOST_CPU_MS
        )
        yield Row(f"{door}: the same, p99", cost.warm_p99_ms, f"<= {MOST_CPU_MS:g}", cost.warm_p99_ms <= MOST_CPU_MS)
        yield Row(f"{door}: own CPU ms of the first event", cost.first_ms, "reported", True)
        yield Row(f"{door}: CPU ms of its imports", cost.import_ms, "reported", True)
    chance, pace = random.Random(8), Pace()
    for name, cold, most_s in (("warm", False, WARM_S), ("cold", True, COLD_S)):
        ways = [signal_s(chance, costs["OnSpotInterruption"], share, pace, cold=cold) for _ in range(EVENTS)]
        for way, seconds in (
            ("EventBridge alone", [one for one, _ in ways]),
            ("with metadata", [one for _, one in ways]),
        ):
            ordered = sorted(seconds)
            p99 = ordered[EVENTS * 99 // 100]
            what = f"simulated, {name}, {way}: event to first signal, p50 {ordered[EVENTS // 2]:.2f} s, p99 s"
            yield Row(what, p99, f"<= {most_s:g}", p99 <= most_s)


if __name__ == "__main__":
    sys.exit(show(list(rows())))
