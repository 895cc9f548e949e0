"""Keeps ports.RequestFiles on S3: small objects of our own account, in buckets that the stack was given."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from botocore.exceptions import ClientError

from holdfast.adapters.aws_errors import ACCESS_DENIED, NO_SUCH_KEY, code_of, status_of
from holdfast.domain.errors import Rejected


class S3RequestFiles:
    """`buckets` None = any; `owner` is the account that a bucket must belong to, None = not asked."""

    def __init__(self, client: Any, *, buckets: Collection[str] | None, owner: str | None) -> None:
        self.client, self.buckets, self.owner = client, buckets, owner

    def read(self, bucket: str, key: str, *, limit_bytes: int) -> bytes:
        uri = f"s3://{bucket}/{key}"
        if self.buckets is not None and bucket not in self.buckets:
            raise Rejected(
                "bucket_not_ours",
                f"{uri} is in none of the buckets that requests may lie in ({', '.join(sorted(self.buckets))}); "
                "copy it there",
            )
        answer = self._get(bucket, key, uri)
        raw: bytes = answer["Body"].read(limit_bytes + 1)
        if len(raw) > limit_bytes:
            raise Rejected(
                "reference_too_large",
                f"{uri} has {answer['ContentLength']} bytes, the limit for a request is {limit_bytes}; make it smaller",
            )
        return raw

    def _get(self, bucket: str, key: str, uri: str) -> Any:
        owner = {"ExpectedBucketOwner": self.owner} if self.owner else {}
        try:
            return self.client.get_object(Bucket=bucket, Key=key, **owner)
        except ClientError as error:
            if code_of(error) in NO_SUCH_KEY | {"NoSuchBucket"}:
                raise Rejected("reference_not_found", f"{uri} is not there; upload it first") from error
            if code_of(error) in ACCESS_DENIED or status_of(error) == 403:
                raise Rejected(
                    "reference_not_readable",
                    f"{uri} is not there or may not be read; in the checkpoint bucket requests lie under requests/, "
                    "and any bucket must belong to the stack's account",
                ) from error
            raise
