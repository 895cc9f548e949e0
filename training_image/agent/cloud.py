"""The agent's only use of boto3: clients with short timeouts, and a bucket whose refusals have names."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import boto3
from boto3.dynamodb.types import TypeDeserializer
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

# What a call to AWS may raise after botocore's own retries.
CLOUD_ERRORS = (BotoCoreError, ClientError, Boto3Error)

_CONFIG = Config(
    connect_timeout=2,
    read_timeout=5,
    retries={"mode": "standard", "max_attempts": 3},
    max_pool_connections=64,
)
_CHUNK = 1 << 20
_WRAPPED = re.compile(r"An error occurred \((\w+)\)")
# Parts of one file at a time; with `Pace.uploads` files at a time all connections of the pool are in use.
_TRANSFER = TransferConfig(multipart_threshold=64 << 20, multipart_chunksize=32 << 20, max_concurrency=4)
# Answers that a later try does not change.
_PERMANENT = frozenset(
    {"PermanentRedirect", "AuthorizationHeaderMalformed", "AccessDenied", "NoSuchBucket", "InvalidAccessKeyId", "403"}
)


class Refused(Exception):
    """A conditional write was refused (412): the object is not as the condition wants it."""


class Conflict(Exception):
    """A conditional write ran at the same time as another (409); nothing is known, try again."""


class Missing(Exception):
    """There is no object under this key."""


@dataclass(frozen=True, kw_only=True)
class Clients:
    """One client a service; boto3's clients may be shared by threads."""

    dynamodb: Any
    sqs: Any
    s3: Any
    sfn: Any


def clients(region: str) -> Clients:
    """Endpoint and credentials come from the environment or the instance role, as boto3 finds them."""
    session = boto3.session.Session(region_name=region)
    names = {"dynamodb": "dynamodb", "sqs": "sqs", "s3": "s3", "sfn": "stepfunctions"}
    return Clients(**{field: session.client(service, config=_CONFIG) for field, service in names.items()})


class SecretStores:
    """Secrets Manager and Parameter Store; their clients are made by the first job that names a secret."""

    def __init__(self, region: str) -> None:
        self._session = boto3.session.Session(region_name=region)

    def secret(self, arn: str) -> str:
        """Return the current version's text. Raises CLOUD_ERRORS."""
        answer = self.secretsmanager.get_secret_value(SecretId=arn)
        return str(answer["SecretString"]) if "SecretString" in answer else answer["SecretBinary"].decode("latin-1")

    def parameter(self, name: str) -> str:
        """Return the parameter, decrypted. Raises CLOUD_ERRORS."""
        return str(self.ssm.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"])

    @cached_property
    def secretsmanager(self) -> Any:
        return self._session.client("secretsmanager", config=_CONFIG)

    @cached_property
    def ssm(self) -> Any:
        return self._session.client("ssm", config=_CONFIG)


def logs_client(region: str) -> Any:
    """Return a client of CloudWatch Logs."""
    return boto3.session.Session(region_name=region).client("logs", config=_CONFIG)


def error_code(error: Exception) -> str:
    """Return AWS's error code, the exception's name where AWS did not answer."""
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", "Unknown"))
    if isinstance(error, Boto3Error) and (code := _WRAPPED.search(str(error))):
        # S3UploadFailedError holds the answer as text: "... An error occurred (SlowDown) when calling ..."
        return code[1]
    return type(error).__name__


def permanent(error: Exception) -> bool:
    """Return whether asking again is in vain: the bucket is elsewhere, or closed to this node."""
    return error_code(error) in _PERMANENT


class OrdersTable:
    """Strong reads of the orders table. Every answer carries AWS's time: `clock_offset_s` is by how much ours is ahead.

    The header counts whole seconds, so the offset is good to about half a second; 0 until there was an answer.
    """

    clock_offset_s = 0.0

    def __init__(self, dynamodb: Any, table: str) -> None:
        self._dynamodb, self._table = dynamodb, table
        self._deserializer = TypeDeserializer()

    def read(self, key: str) -> dict[str, Any] | None:
        """Return the item's attributes, None when there is no item."""
        asked_at = time.time()
        answer = self._dynamodb.get_item(TableName=self._table, Key={"key": {"S": key}}, ConsistentRead=True)
        self.clock_offset_s = offset_of(answer, asked_at, time.time(), self.clock_offset_s)
        item = answer.get("Item")
        return item and {name: self._deserializer.deserialize(value) for name, value in item.items()}


def offset_of(answer: Mapping[str, Any], asked_at: float, answered_at: float, before: float) -> float:
    """Return the seconds that our clock is ahead of the one in the answer's Date; `before` when it does not tell.

    An answer that took long, retries included, says too little of when it was dated.
    """
    header = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    if not header or answered_at - asked_at > 1.0:
        return before
    try:
        dated_at = parsedate_to_datetime(header).timestamp()
    except ValueError:
        return before
    ahead = answered_at - (dated_at + 0.5)
    return 0.0 if abs(ahead) <= 0.5 else ahead


@dataclass(frozen=True)
class Stored:
    body: bytes
    etag: str


class Bucket:
    """The checkpoint bucket. Raises CLOUD_ERRORS and what each method names."""

    def __init__(self, s3: Any, name: str) -> None:
        self._s3, self._name = s3, name

    def sibling(self, name: str) -> Bucket:
        """Return another bucket, reached by the same client."""
        return Bucket(self._s3, name)

    def get(self, key: str) -> Stored | None:
        try:
            answer = self._s3.get_object(Bucket=self._name, Key=key)
        except ClientError as error:
            if _status(error) == 404:
                return None
            raise
        return Stored(answer["Body"].read(), answer["ETag"])

    def put(self, key: str, body: bytes) -> None:
        self._s3.put_object(Bucket=self._name, Key=key, Body=body)

    def put_new(self, key: str, body: bytes) -> None:
        """The object exists with this body. Raises Refused when there was one, Conflict."""
        self._conditional(key, body, IfNoneMatch="*")

    def replace(self, key: str, body: bytes, *, etag: str) -> None:
        """The object that had `etag` has this body now. Raises Refused when it had changed, Conflict."""
        self._conditional(key, body, IfMatch=etag)

    def keys(self, prefix: str) -> list[str]:
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._name, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def upload(self, path: Path, key: str) -> None:
        """The file is under the key, in parts where it is large."""
        self._s3.upload_file(str(path), self._name, key, Config=_TRANSFER)

    def stream(self, key: str) -> Iterator[bytes]:
        """Yield the object's bytes in chunks. Raises Missing."""
        try:
            answer = self._s3.get_object(Bucket=self._name, Key=key)
        except ClientError as error:
            if _status(error) == 404:
                raise Missing(key) from error
            raise
        yield from iter(lambda: answer["Body"].read(_CHUNK), b"")

    def _conditional(self, key: str, body: bytes, **condition: str) -> None:
        try:
            self._s3.put_object(Bucket=self._name, Key=key, Body=body, **condition)
        except ClientError as error:
            # S3 answers 404 to If-Match on a key that was deleted meanwhile.
            if _status(error) in (404, 412):
                raise Refused(key) from error
            if _status(error) == 409:
                raise Conflict(key) from error
            raise


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
