"""The head is the fence between attempts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import boto3
import pytest
from moto import mock_aws

from holdfast.adapters.checkpoints_s3 import S3Checkpoints
from holdfast.domain.errors import IllegalTransition
from job_contract.checkpoint_layout import Head, head_key, open_head, seal
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
    assert checkpoints.take_over(PREFIX, b.a_job(), 2).save == "step-00000025.a0001.s01"
    assert stored(s3).attempt == 2
    with pytest.raises(IllegalTransition):
        checkpoints.take_over(PREFIX, b.a_job(), 1)


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
