"""Keeps ports.Reports on S3: metrics that nodes brought out, and the report that is made of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from job_contract.checkpoint_layout import METRICS_FOLDER


class S3Reports:
    def __init__(self, client: Any, *, bucket: str) -> None:
        self.client, self.bucket = client, bucket

    def metrics(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{prefix}/{METRICS_FOLDER}/"
        )
        for page in pages:
            for one in page.get("Contents", []):
                body = self.client.get_object(Bucket=self.bucket, Key=one["Key"])["Body"]
                for line in body.iter_lines():
                    yield json.loads(line)

    def put(self, key: str, kind: str, body: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=body, ContentType=kind)
