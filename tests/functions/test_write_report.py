"""The end of a job -> its report in the bucket."""

from __future__ import annotations

import json
from typing import Any

from bench.world.wire import wired_client
from bench.world.world import BUCKET, World
from holdfast.application.news import phase_change
from job_contract.checkpoint_layout import job_prefix, metrics_key
from tests import builders as b
from tests.functions.scenes import JOB, fails, holding, training

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
