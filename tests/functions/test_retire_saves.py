"""The end of a job -> the saves that it asked to keep are left in the bucket."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.world.wire import wired_client
from bench.world.world import BUCKET, World
from holdfast.application.news import phase_change
from job_contract.checkpoint_layout import (
    Head,
    Manifest,
    SavePointer,
    file_key,
    head_key,
    job_prefix,
    manifest_key,
    save_name,
    seal,
)
from tests import builders as b
from tests.functions.scenes import JOB, fails, holding, training

PREFIX = job_prefix("research", JOB)
SAVES = [save_name(10 * number, 1, number) for number in (1, 2, 3, 4)]


def put(key: str, body: bytes) -> None:
    wired_client("s3").put_object(Bucket=BUCKET, Key=key, Body=body)


def left() -> set[str]:
    pages = wired_client("s3").list_objects_v2(Bucket=BUCKET, Prefix=f"{PREFIX}/saves/")
    return {entry["Key"].split("/")[-2] for entry in pages.get("Contents", ())}


def ended(world: World) -> dict[str, Any]:
    """The event of a job that is over and asked for two saves; four are there, and a part of one never committed."""
    parent = None
    for number, save in enumerate(SAVES, 1):
        manifest = Manifest(
            job=JOB, attempt=1, step=10 * number, save=save, world_size=1, mesh=(1,), config_hash="c",
            corpus_digest="d", versions={}, facts={}, files=(), parent=parent,
        )  # fmt: skip
        raw, digest = seal(manifest)
        put(manifest_key(PREFIX, save), raw)
        put(file_key(PREFIX, save, "__0_0.distcp"), b"bytes")
        parent = SavePointer(save=save, manifest_sha256=digest)
    put(file_key(PREFIX, save_name(15, 1, 1), "__0_0.distcp"), b"bytes")
    assert parent is not None
    head = Head(job=JOB, attempt=1, step=40, save=parent.save, manifest_sha256=parent.manifest_sha256)
    put(head_key(PREFIX), seal(head)[0])
    job = replace(b.after(training(world), b.saved(40, 1, 4), b.finished(), b.closed()), keep=2)
    holding(world, job)
    return {"source": "holdfast", "detail-type": "Training Job Phase Changed", "detail": phase_change(job)}


def test_a_job_that_is_over_leaves_the_saves_that_it_asked_to_keep_and_being_told_twice_changes_nothing(
    world: World,
) -> None:
    event = ended(world)
    for _ in range(2):
        world.call("RetireSaves", event)
        assert left() == set(SAVES[2:])


def test_a_job_that_is_tried_again_keeps_what_is_there(world: World) -> None:
    event = ended(world)
    before = left()
    training(world)
    world.call("RetireSaves", event)
    assert left() == before


def test_an_event_that_is_none_of_ours_deletes_nothing(world: World) -> None:
    ended(world)
    before = left()
    assert not fails(world, "RetireSaves", {"detail": {"nothing": 1}})
    assert left() == before
