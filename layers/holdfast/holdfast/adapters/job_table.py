"""The jobs table and the orders table: rows, dedup keys, owners, intents; orders, rosters, wait items.

JOB#<job>        ROW                the job; in index `waiting` while dispatchable, `alive` while its attempt is open,
                                    `ended` when it is over
JOB#<job>        REQUEST            the accepted request, immutable
JOB#<job>        EVENT#<dedup key>  what happened: the dedup key and the history at once
NODE#<instance>  NODE               the owner of an instance, and what it reported
FLEET#<fleet>    INTENT             what may exist in EC2 because of us
TEAMS            <team>             teams that ever sent a job
SUSPECT          <instance>         seen by a sweep without an owner
POOL#<pool>      COLD               a pool that refused: until when no job asks it
JOB#<job>        PATIENCE           what the job's asking for machines has cost
QUARANTINE       <host>             a machine that was found bad
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from holdfast.adapters.aws_errors import CONDITION_FAILED, code_of, raced
from holdfast.adapters.items import from_item, to_item
from holdfast.domain.errors import Raced, Unavailable, UnknownJob
from holdfast.domain.events import Event
from holdfast.domain.gate import Quarantined
from holdfast.domain.job import Job
from holdfast.domain.keys import event_name
from holdfast.domain.obligations import orders_for
from holdfast.domain.ownership import FleetIntent, Node, Ownership
from holdfast.domain.placement import FORGET_S, Cold, Patience, Pool
from job_contract.orders import Roster, Wait, WaitItem, orders_key, roster_key, spec_key, wait_key
from job_contract.spec import JobSpec
from job_contract.version import build, decode, encode, plain

T = TypeVar("T")

KEEP_S = 35 * 86400
"""How long the identity of a request, its row and its history outlive the job."""

ALIVE_SHARDS = 8
EVENT_PREFIX = "EVENT#"


class JobTable:
    """Keeps ports.JobStore on two DynamoDB tables."""

    def __init__(self, client: Any, *, jobs: str, orders: str) -> None:
        self.client, self.jobs, self.orders = client, jobs, orders

    # -- the job ---------------------------------------------------------------------------------------------------

    def create(self, job: Job, request: Mapping[str, Any], spec: JobSpec) -> bool:
        writes = [
            self._put(self.jobs, row_of(job), new=True),
            self._put(self.jobs, {**_key(f"JOB#{job.id}", "REQUEST"), **request}),
            self._put(self.jobs, _key("TEAMS", job.team)),
            self._put(self.orders, {"key": spec_key(job.id, spec.spec_id), **encode(spec)}),
            self._put(self.orders, {"key": orders_key(job.id), **encode(orders_for(job, job.submitted_at))}),
        ]
        try:
            self.client.transact_write_items(TransactItems=writes)
        except ClientError as error:
            if not raced(error):
                raise
            if self.load(job.id) is None:
                # Two first deliveries at once conflict without either having won yet: let the queue bring it again.
                raise Raced(f"{job.id} is being accepted by another delivery") from error
            return False
        return True

    def request(self, job_id: str) -> Mapping[str, Any] | None:
        return self._get(self.jobs, _key(f"JOB#{job_id}", "REQUEST"))

    def accepted_body(self, job_id: str) -> str:
        """Return the body of the accepted request. Raises UnknownJob."""
        request = self.request(job_id)
        if request is None:
            raise UnknownJob(job_id)
        return str(request["body"])

    def load(self, job_id: str) -> Job | None:
        item = self._get(self.jobs, _key(f"JOB#{job_id}", "ROW"))
        return build(Job, item) if item else None

    def load_for(self, job_id: str, key: str) -> tuple[Job | None, bool]:
        items = self._batch(self.jobs, [_key(f"JOB#{job_id}", "ROW"), _key(f"JOB#{job_id}", EVENT_PREFIX + key)])
        row = next((item for item in items if item["sk"] == "ROW"), None)
        return (build(Job, row) if row else None), any(item["sk"] != "ROW" for item in items)

    def save(self, before: Job, after: Job, event: Event, key: str) -> None:
        row = {
            "Put": {
                "TableName": self.jobs,
                "Item": to_item(row_of(after)),
                "ConditionExpression": "version = :before",
                "ExpressionAttributeValues": to_item({":before": before.version}),
            }
        }
        writes = [self._put(self.jobs, _history(before, after, event, key), new=True), row]
        if after.generation != before.generation:
            writes.append(self._put(self.orders, {"key": orders_key(after.id), **encode(orders_for(after, event.at))}))
        try:
            self.client.transact_write_items(TransactItems=writes)
        except ClientError as error:
            if raced(error):
                raise Raced(f"{after.id} moved past version {before.version}") from error
            raise

    def history(self, job_id: str) -> list[dict[str, Any]]:
        """Return what happened to the job, oldest first."""
        items = self._query(
            self.jobs, "pk = :pk AND begins_with(sk, :sk)", {":pk": f"JOB#{job_id}", ":sk": EVENT_PREFIX}
        )
        return sorted(items, key=lambda item: (item["version"], item["at"]))

    # -- what nodes and waiting states read ------------------------------------------------------------------------

    def put_wait(self, item: WaitItem) -> None:
        self.client.put_item(
            TableName=self.orders, Item=to_item({"key": wait_key(item.job, item.wait), **encode(item)})
        )

    def waits(self, job_id: str, waits: Iterable[Wait]) -> list[WaitItem]:
        items = self._batch(self.orders, [{"key": wait_key(job_id, wait)} for wait in waits])
        return [decode(WaitItem, item) for item in items]

    def drop_wait(self, item: WaitItem) -> None:
        try:
            self.client.delete_item(
                TableName=self.orders,
                Key=to_item({"key": wait_key(item.job, item.wait)}),
                ConditionExpression="#token = :token",
                ExpressionAttributeNames={"#token": "token"},
                ExpressionAttributeValues=to_item({":token": item.token}),
            )
        except ClientError as error:
            if code_of(error) not in CONDITION_FAILED:
                raise

    def put_roster(self, roster: Roster) -> None:
        self.client.put_item(
            TableName=self.orders, Item=to_item({"key": roster_key(roster.job, roster.roster_id), **encode(roster)})
        )

    # -- fleets and nodes ------------------------------------------------------------------------------------------

    def open_intent(self, intent: FleetIntent) -> FleetIntent:
        if self._put_unless("closed_at", _intent_item(intent)):
            return intent
        known = self.intent(intent.fleet)
        if known is None:
            raise Unavailable(f"the intent of {intent.fleet} vanished while it was read")
        return known

    def close_intent(self, intent: FleetIntent) -> None:
        self.client.put_item(TableName=self.jobs, Item=to_item(_intent_item(intent)))

    def intent(self, fleet: str) -> FleetIntent | None:
        item = self._get(self.jobs, _key(f"FLEET#{fleet}", "INTENT"))
        return build(FleetIntent, item) if item else None

    def own(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._put_new(_node_item(node))

    def node(self, instance: str) -> Node | None:
        item = self._get(self.jobs, _key(f"NODE#{instance}", "NODE"))
        return build(Node, item) if item else None

    def nodes(self, instances: Iterable[str]) -> list[Node]:
        items = self._batch(self.jobs, [_key(f"NODE#{instance}", "NODE") for instance in instances])
        return [build(Node, item) for item in items]

    def update_node(self, node: Node) -> None:
        told = {
            name: value
            for name, value in plain(node).items()
            if name in ("ready", "step", "loss", "tokens_per_s", "reported_at")
        }
        self.client.update_item(
            TableName=self.jobs,
            Key=to_item(_key(f"NODE#{node.instance}", "NODE")),
            UpdateExpression="SET " + ", ".join(f"#{name} = :{name}" for name in told),
            ConditionExpression="attribute_exists(pk)",
            ExpressionAttributeNames={f"#{name}": name for name in told},
            ExpressionAttributeValues=to_item({f":{name}": value for name, value in told.items()}),
        )

    def mark_ending(self, instances: Iterable[str], job_id: str, now: float) -> None:
        for instance in instances:
            self.client.update_item(
                TableName=self.jobs,
                Key=to_item(_key(f"NODE#{instance}", "NODE")),
                UpdateExpression=(
                    "SET #state = :ending, since_at = if_not_exists(ending_at, :now), "
                    "ending_at = if_not_exists(ending_at, :now), instance = :instance, job = :job, "
                    "fleet = if_not_exists(fleet, :none), attempt = if_not_exists(attempt, :zero), "
                    "expires_at = :expires"
                ),
                ExpressionAttributeNames={"#state": "state"},
                ExpressionAttributeValues=to_item(
                    {
                        ":ending": Ownership.ENDING.value,
                        ":now": now,
                        ":instance": instance,
                        ":job": job_id,
                        ":none": "",
                        ":zero": 0,
                        ":expires": round(now + KEEP_S),
                    }
                ),
            )

    # -- capacity --------------------------------------------------------------------------------------------------

    def cold(self, pools: Iterable[Pool]) -> dict[Pool, Cold]:
        wanted = list(dict.fromkeys(pools))
        items = self._batch(self.jobs, [_pool_key(pool) for pool in wanted])
        found = [build(Cold, item) for item in items]
        return {one.pool: one for one in found}

    def cool(self, cold: Cold) -> None:
        item = {**_pool_key(cold.pool), **plain(cold), "expires_at": round(cold.until + FORGET_S)}
        self.client.put_item(TableName=self.jobs, Item=to_item(item))

    def warm(self, pools: Iterable[Pool]) -> None:
        # Written rather than deleted: the doors may not delete from the jobs table.
        for pool in pools:
            self.cool(Cold(pool=pool, until=0.0, misses=0, code=""))

    def patience(self, job_id: str) -> Patience:
        item = self._get(self.jobs, _key(f"JOB#{job_id}", "PATIENCE"))
        return build(Patience, item) if item else Patience()

    def keep_patience(self, job_id: str, patience: Patience, now: float) -> None:
        item = {**_key(f"JOB#{job_id}", "PATIENCE"), **plain(patience), "expires_at": round(now + KEEP_S)}
        self.client.put_item(TableName=self.jobs, Item=to_item(item))

    def quarantine(self, found: Quarantined) -> None:
        item = {**_key("QUARANTINE", found.host), **plain(found), "expires_at": round(found.until)}
        self.client.put_item(TableName=self.jobs, Item=to_item(item))

    def quarantined(self, hosts: Iterable[str], now: float) -> dict[str, Quarantined]:
        items = self._batch(self.jobs, [_key("QUARANTINE", host) for host in dict.fromkeys(hosts)])
        found = [build(Quarantined, item) for item in items]
        return {one.host: one for one in found if one.until > now}

    # -- looking around --------------------------------------------------------------------------------------------

    def teams(self) -> list[str]:
        return [item["sk"] for item in self._query(self.jobs, "pk = :pk", {":pk": "TEAMS"})]

    def waiting(self, team: str) -> list[str]:
        return self._ids("waiting", "waiting_team = :key", team)

    def alive(self) -> list[str]:
        return [job for shard in range(ALIVE_SHARDS) for job in self._ids("alive", "alive_shard = :key", shard)]

    def ended(self, team: str) -> list[str]:
        """Return ids of jobs that are over, oldest end first; an index, so possibly stale."""
        return self._ids("ended", "ended_team = :key", team)

    def suspected(self, instance: str, now: float) -> float | None:
        key = _key("SUSPECT", instance)
        known = self._get(self.jobs, key)
        if known is not None:
            return float(known["at"])
        self._put_new({**key, "at": now, "expires_at": round(now + 86400)})
        return None

    # -- DynamoDB --------------------------------------------------------------------------------------------------

    def _ids(self, index: str, condition: str, key: str | int) -> list[str]:
        rows = self._query(self.jobs, condition, {":key": key}, IndexName=index)
        return [str(row["pk"]).removeprefix("JOB#") for row in rows]

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


def row_of(job: Job) -> dict[str, Any]:
    """Return the row's attributes: the job, its keys, and its place in the sparse indexes."""
    row = {**_key(f"JOB#{job.id}", "ROW"), **plain(job)}
    if job.dispatchable:
        row |= {"waiting_team": job.team, "waiting_rank": job.rank}
    if job.attempt_open:
        row["alive_shard"] = zlib.crc32(job.id.encode()) % ALIVE_SHARDS
    if job.ended_at is not None:
        row |= {"ended_team": job.team, "expires_at": round(job.ended_at + KEEP_S)}
    return row


def job_of(image: Mapping[str, Any]) -> Job | None:
    """Return the job in a stream record's image, None when there is none or it is not a row."""
    row = from_item(image)
    return build(Job, row) if row.get("sk") == "ROW" else None


def _history(before: Job, after: Job, event: Event, key: str) -> dict[str, Any]:
    detail = {name: value for name, value in plain(event).items() if name not in ("at", "cause", "attempt")}
    return {
        **_key(f"JOB#{after.id}", EVENT_PREFIX + key),
        "kind": event_name(event),
        "at": event.at,
        "cause": event.cause,
        "attempt": getattr(event, "attempt", after.attempt),
        "before": before.phase.value,
        "after": after.phase.value,
        "version": after.version,
        "detail": detail,
    }


def _key(pk: str, sk: str) -> dict[str, str]:
    return {"pk": pk, "sk": sk}


def _pool_key(pool: Pool) -> dict[str, str]:
    return _key(f"POOL#{pool.key}", "COLD")


def _node_item(node: Node) -> dict[str, Any]:
    return {**_key(f"NODE#{node.instance}", "NODE"), **plain(node)}


def _intent_item(intent: FleetIntent) -> dict[str, Any]:
    return {**_key(f"FLEET#{intent.fleet}", "INTENT"), **plain(intent)}
