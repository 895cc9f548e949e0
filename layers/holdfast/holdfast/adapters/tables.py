"""DynamoDB calls on the two tables, as every part of the store makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from holdfast.adapters.aws_errors import CONDITION_FAILED, code_of
from holdfast.adapters.items import from_item, to_item


class Tables:
    """The jobs table, keyed by pk and sk, and the orders table, keyed by key. Reads of items are consistent."""

    def __init__(self, client: Any, *, jobs: str, orders: str) -> None:
        self.client, self.jobs, self.orders = client, jobs, orders

    def _query(self, table: str, condition: str, values: Mapping[str, Any], **more: Any) -> list[dict[str, Any]]:
        pages = self.client.get_paginator("query").paginate(
            TableName=table, KeyConditionExpression=condition, ExpressionAttributeValues=to_item(values), **more
        )
        return [from_item(item) for page in pages for item in page["Items"]]

    def _get(self, table: str, key: Mapping[str, str]) -> dict[str, Any] | None:
        item = self.client.get_item(TableName=table, Key=to_item(key), ConsistentRead=True).get("Item")
        return from_item(item) if item else None

    def _batch(self, table: str, keys: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for start in range(0, len(keys), 100):
            wanted: Any = {table: {"Keys": [to_item(key) for key in keys[start : start + 100]], "ConsistentRead": True}}
            while wanted:
                answer = self.client.batch_get_item(RequestItems=wanted)
                found += [from_item(item) for item in answer["Responses"].get(table, [])]
                wanted = answer.get("UnprocessedKeys")
        return found

    def _put(self, table: str, data: Mapping[str, Any], *, new: bool = False) -> dict[str, Any]:
        put: dict[str, Any] = {"TableName": table, "Item": to_item(data)}
        if new:
            put["ConditionExpression"] = "attribute_not_exists(pk)"
        return {"Put": put}

    def _put_new(self, data: Mapping[str, Any]) -> bool:
        return self._put_unless("pk", data)

    def _put_unless(self, attribute: str, data: Mapping[str, Any]) -> bool:
        """Write the item unless one with this attribute stands there; returns whether it was written."""
        try:
            self.client.put_item(
                TableName=self.jobs, Item=to_item(data), ConditionExpression=f"attribute_not_exists({attribute})"
            )
        except ClientError as error:
            if code_of(error) in CONDITION_FAILED:
                return False
            raise
        return True


def key_of(pk: str, sk: str) -> dict[str, str]:
    """Return the key of an item of the jobs table."""
    return {"pk": pk, "sk": sk}
