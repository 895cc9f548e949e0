"""The end of a job -> its report in the bucket."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from bench.world.wire import wired_client
from bench.world.world import BUCKET, JOBS, World
from holdfast.adapters.items import to_item
from holdfast.application.news import phase_change
from holdfast.domain.baseline import Baseline, BaselineKey
from holdfast.messages.acceptance import read_acceptance
from job_contract.checkpoint_layout import job_prefix, metrics_key
from job_contract.reports import Steady
from job_contract.version import plain
from tests import builders as b
from tests.functions.scenes import JOB, fails, holding, table, training

PREFIX = job_prefix("research", JOB)


def ended(world: World) -> dict[str, Any]:
    """The event of a job that has ended, whose nodes brought three lines of metrics out."""
    job = b.after(training(world), b.finished(), b.closed())
    holding(world, job)
    lines = [{"step": step, "attempt": 1, "loss": 1.0, "tokens": 8, "seconds": 1.0, "at": 1.0} for step in (1, 2, 3)]
    body = "".join(json.dumps(line) + "\n" for line in lines)
    wired_client("s3").put_object(Bucket=BUCKET, Key=metrics_key(PREFIX, 1), Body=body)
    return {"source": "holdfast", "detail-type": "Training Job Phase Changed", "detail": phase_change(job)}


def stored(name: str) -> Any:
    return wired_client("s3").get_object(Bucket=BUCKET, Key=f"{PREFIX}/{name}")


def test_the_end_of_a_job_leaves_a_report_and_a_page_beside_its_saves(world: World) -> None:
    world.call("WriteReport", ended(world))
    report = json.loads(stored("report.json")["Body"].read())
    assert (report["job"], report["phase"], [one["step"] for one in report["curve"]]) == (JOB, "completed", [1, 2, 3])
    page = stored("report.html")
    assert page["ContentType"] == "text/html; charset=utf-8" and b"<svg" in page["Body"].read()


def test_an_end_that_is_told_twice_writes_the_same_report(world: World) -> None:
    event = ended(world)
    bodies = []
    for _ in range(2):
        world.call("WriteReport", event)
        bodies.append(stored("report.json")["Body"].read())
    assert bodies[0] == bodies[1]


def test_a_job_that_was_tried_again_meanwhile_gets_no_report_of_its_end(world: World) -> None:
    event = ended(world)
    training(world)
    world.call("WriteReport", event)
    assert wired_client("s3").list_objects_v2(Bucket=BUCKET, Prefix=f"{PREFIX}/report")["KeyCount"] == 0


def test_an_event_that_is_none_of_ours_is_set_aside(world: World) -> None:
    assert not fails(world, "WriteReport", {"detail": {"nothing": 1}})


def test_the_report_holds_the_run_against_one_node_of_the_same_model(world: World) -> None:
    event = ended(world)
    request = read_acceptance((b.ROOT / "events" / "job-request.json").read_text(), now=world.agenda.now).request
    item = {"pk": f"JOB#{JOB}", "sk": "REQUEST", **request}
    wired_client("dynamodb").put_item(TableName=JOBS, Item=to_item(item))
    told = {"kind": "fleet_bought", "at": 1.0, "cause": "", "attempt": 1, "version": 2}
    item = {"pk": f"JOB#{JOB}", "sk": "EVENT#fleet_bought#1", **told}
    detail = {"instance_type": "c7i.large", "zone": "z", "market": "spot", "nodes": 2}
    wired_client("dynamodb").put_item(TableName=JOBS, Item=to_item({**item, "detail": detail}))
    steady = Steady(steps=60, world_size=2, tokens_per_s=90.0, step_ms=10.0, data_wait_ms=1.0)
    line = {"step": 90, "attempt": 1, "at": 1.0, "steady": plain(steady)}
    wired_client("s3").put_object(Bucket=BUCKET, Key=metrics_key(PREFIX, 2), Body=json.dumps(line).encode())
    alone = Baseline.of(replace(steady, tokens_per_s=50.0), job="alone", at=world.agenda.now, nodes=1)
    table().keep_baseline(BaselineKey.of(json.loads(request["body"]), "c7i.large", 1), alone)
    world.call("WriteReport", event)
    speed = json.loads(stored("report.json")["Body"].read())["speed"]
    assert (speed["efficiency"], speed["one_node_tokens_per_s"], speed["tokens_per_s"]) == (0.9, 50, 90.0)
