"""The head is the fence between attempts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import boto3
import pytest
from moto import mock_aws

from holdfast.adapters import checkpoints_s3
from holdfast.adapters.checkpoints_s3 import S3Checkpoints
from holdfast.domain.errors import IdentityReused, IllegalTransition
from job_contract.checkpoint_layout import (
    Head,
    Manifest,
    SavedFile,
    SavePointer,
    file_key,
    head_key,
    manifest_key,
    open_head,
    save_name,
    seal,
)
from job_contract.version import ContractError
from tests import builders as b

PREFIX = "teams/research/jobs/demo-0123456789"


@pytest.fixture
def s3() -> Iterator[Any]:
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1", aws_access_key_id="t", aws_secret_access_key="t")
        client.create_bucket(Bucket="bucket")
        yield client


def stored(s3: Any) -> Head:
    return open_head(s3.get_object(Bucket="bucket", Key=head_key(PREFIX))["Body"].read(), job="demo-0123456789")


def test_the_first_attempt_creates_the_head_and_takes_it_over_once(s3: Any) -> None:
    checkpoints = S3Checkpoints(s3, bucket="bucket")
    head = checkpoints.take_over(PREFIX, b.a_job(), 1)
    assert head == checkpoints.take_over(PREFIX, b.a_job(), 1) or stored(s3).attempt == 1
    assert stored(s3).pointer is None


def test_a_later_attempt_keeps_the_newest_save_and_shuts_the_older_out(s3: Any) -> None:
    checkpoints = S3Checkpoints(s3, bucket="bucket")
    first = checkpoints.take_over(PREFIX, b.a_job(), 1)
    saved = replace(first, step=25, save="step-00000025.a0001.s01", manifest_sha256="a" * 64)
    s3.put_object(Bucket="bucket", Key=head_key(PREFIX), Body=seal(saved)[0])
    job = b.a_job(last_roster_id="1-r")
    assert checkpoints.take_over(PREFIX, job, 2).save == "step-00000025.a0001.s01"
    assert stored(s3).attempt == 2
    with pytest.raises(IllegalTransition):
        checkpoints.take_over(PREFIX, job, 1)


@pytest.mark.parametrize("older", [Head(job="demo-0123456789", attempt=7), "saved in its first attempt"])
def test_a_job_whose_identity_was_used_before_takes_no_checkpoints_of_the_older_one(s3: Any, older: Any) -> None:
    if isinstance(older, str):
        older = Head(
            job="demo-0123456789", attempt=1, step=25, save="step-00000025.a0001.s01", manifest_sha256="a" * 64
        )
    s3.put_object(Bucket="bucket", Key=head_key(PREFIX), Body=seal(older)[0])
    for attempt in (1, 2):
        with pytest.raises(IdentityReused, match="another dedup_id"):
            S3Checkpoints(s3, bucket="bucket").take_over(PREFIX, b.a_job(), attempt)
    assert replace(stored(s3), sha256=None) == older


@pytest.mark.parametrize("damage", [b"", b"{", b'{"attempt":1}', b"flipped"])
def test_an_unreadable_head_is_rewritten_from_the_row(s3: Any, damage: bytes) -> None:
    s3.put_object(Bucket="bucket", Key=head_key(PREFIX), Body=damage)
    job = b.after(b.a_running_job(), b.saved(25))
    assert S3Checkpoints(s3, bucket="bucket").take_over(PREFIX, job, 2).save == "step-00000025.a0001.s01"
    assert stored(s3).attempt == 2


def test_one_flipped_byte_in_the_head_is_found(s3: Any) -> None:
    checkpoints = S3Checkpoints(s3, bucket="bucket")
    checkpoints.take_over(PREFIX, b.a_job(), 1)
    raw = bytearray(s3.get_object(Bucket="bucket", Key=head_key(PREFIX))["Body"].read())
    job = b.after(b.a_running_job(), b.saved(25))
    for at in range(0, len(raw), 7):
        flipped = raw.copy()
        flipped[at] ^= 1
        s3.put_object(Bucket="bucket", Key=head_key(PREFIX), Body=bytes(flipped))
        assert checkpoints.take_over(PREFIX, job, 2).save == "step-00000025.a0001.s01"


def test_a_retry_starts_a_branch_at_the_chosen_save(s3: Any) -> None:
    checkpoints = S3Checkpoints(s3, bucket="bucket")
    first = checkpoints.take_over(PREFIX, b.a_job(), 1)
    newest = replace(first, step=50, save="step-00000050.a0001.s02", manifest_sha256="b" * 64)
    s3.put_object(Bucket="bucket", Key=head_key(PREFIX), Body=seal(newest)[0])
    chosen = SavePointer(save="step-00000025.a0001.s01", manifest_sha256="a" * 64)
    job = b.a_job(branch=1, retry_from=chosen)
    assert checkpoints.take_over(PREFIX, job, 2).pointer == chosen
    later = replace(stored(s3), step=30, save="step-00000030.a0002.s01", manifest_sha256="c" * 64)
    s3.put_object(Bucket="bucket", Key=head_key(PREFIX), Body=seal(later)[0])
    assert checkpoints.take_over(PREFIX, job, 3).save == "step-00000030.a0002.s01"


def test_a_save_is_found_by_name_only_when_its_manifest_can_be_trusted(s3: Any) -> None:
    checkpoints, name = S3Checkpoints(s3, bucket="bucket"), "step-00000025.a0001.s01"
    manifest = Manifest(
        job="demo-0123456789", attempt=1, step=25, save=name, world_size=1, mesh=(1,), config_hash="c",
        corpus_digest="d", versions={}, facts={}, files=(),
    )  # fmt: skip
    raw, digest = seal(manifest)
    assert checkpoints.pointer(PREFIX, b.a_job(), name) is None
    s3.put_object(Bucket="bucket", Key=manifest_key(PREFIX, name), Body=raw)
    assert checkpoints.pointer(PREFIX, b.a_job(), name) == SavePointer(save=name, manifest_sha256=digest)
    assert checkpoints.pointer(PREFIX, b.a_job(id="another"), name) is None
    s3.put_object(Bucket="bucket", Key=manifest_key(PREFIX, name), Body=raw.replace(b'"step":25', b'"step":26'))
    assert checkpoints.pointer(PREFIX, b.a_job(), name) is None
    with pytest.raises(ContractError):
        checkpoints.pointer(PREFIX, b.a_job(), "../../../team-b/x")


def a_save(s3: Any, number: int, parent: SavePointer | None, files: int = 3) -> SavePointer:
    """A committed save of so many files is in the bucket, and the head names it."""
    name = save_name(10 * number, 1, number)
    listed = tuple(SavedFile(path=f"__0_{n}.distcp", size_bytes=1, sha256="0" * 64, node_rank=0) for n in range(files))
    manifest = Manifest(
        job="demo-0123456789", attempt=1, step=10 * number, save=name, world_size=1, mesh=(1,), config_hash="c",
        corpus_digest="d", versions={}, facts={}, files=listed, parent=parent,
    )  # fmt: skip
    raw, digest = seal(manifest)
    for path in (*(file.path for file in listed), "parts/node-0.json", "parts/node-1.json"):
        s3.put_object(Bucket="bucket", Key=file_key(PREFIX, name, path), Body=b"x")
    s3.put_object(Bucket="bucket", Key=manifest_key(PREFIX, name), Body=raw)
    pointer = SavePointer(save=name, manifest_sha256=digest)
    head = Head(
        job="demo-0123456789",
        attempt=1,
        step=pointer.step,
        save=name,
        manifest_sha256=digest,
        parent=parent,
    )
    s3.put_object(Bucket="bucket", Key=head_key(PREFIX), Body=seal(head)[0])
    return pointer


def left(s3: Any, save: str) -> set[str]:
    folder = file_key(PREFIX, save, "")
    found = s3.list_objects_v2(Bucket="bucket", Prefix=folder).get("Contents", [])
    return {item["Key"].removeprefix(folder) for item in found}


def test_saves_are_listed_and_the_line_is_read_from_the_head_down(s3: Any) -> None:
    checkpoints, line = S3Checkpoints(s3, bucket="bucket"), [None]
    for number in (1, 2, 3):
        line.append(a_save(s3, number, line[-1]))
    s3.put_object(Bucket="bucket", Key=f"{PREFIX}/saves/not-a-save/x", Body=b"")
    names = [pointer.save for pointer in line[1:]]
    assert checkpoints.saves(PREFIX) == names
    assert [one.save for one in checkpoints.lineage(PREFIX, b.a_job(), 2)] == [names[2], names[1]]
    s3.put_object(Bucket="bucket", Key=manifest_key(PREFIX, names[1]), Body=b"torn")
    assert [one.save for one in checkpoints.lineage(PREFIX, b.a_job(), 3)] == [names[2]]


def test_a_deletion_that_dies_anywhere_leaves_a_whole_save_or_none_and_is_finished_the_next_time(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints_s3, "KEYS_A_CALL", 1)
    data, delete = {f"__0_{n}.distcp" for n in range(3)}, s3.delete_objects
    for dies_at in range(1, 7):
        save = a_save(s3, dies_at, None).save
        calls = iter(range(1, 100))

        def dying(dies_at=dies_at, calls=calls, **call: Any) -> Any:
            if next(calls) == dies_at:
                raise ConnectionError
            return delete(**call)

        with monkeypatch.context() as dead, pytest.raises(ConnectionError):
            dead.setattr(s3, "delete_objects", dying)
            S3Checkpoints(s3, bucket="bucket").forget(PREFIX, save)
        there = left(s3, save)
        if "manifest.json" in there:
            assert data <= there
        else:
            assert not any(path.startswith("parts/") for path in there), "a node could commit it again"
        S3Checkpoints(s3, bucket="bucket").forget(PREFIX, save)
        assert left(s3, save) == set()
    with pytest.raises(ContractError):
        S3Checkpoints(s3, bucket="bucket").forget(PREFIX, "../../../team-b/x")
