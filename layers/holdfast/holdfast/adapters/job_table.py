"""The jobs table and the orders table: rows, dedup keys, owners, intents; orders, rosters, wait items.

JOB#<job>        ROW                the job; in index `waiting` while dispatchable, `alive` while its attempt is open,
                                    `ended` when it is over
JOB#<job>        REQUEST            the accepted request, immutable
JOB#<job>        EVENT#<dedup key>  what happened: the dedup key and the history at once
NODE#<instance>  NODE               the owner of an instance, and what it reported
FLEET#<fleet>    INTENT             what may exist in EC2 because of us
TEAMS            <team>             teams that ever sent a job
NOTICE#<job>#<attempt>  <instance>  a notice left for whoever writes the row next
SUSPECT          <instance>         seen by a sweep without an owner
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
from holdfast.domain.job import Job
from holdfast.domain.keys import event_name
from holdfast.domain.obligations import orders_for
from holdfast.domain.ownership import FleetIntent, Node, Ownership
from job_contract.orders import Roster, Wait, WaitItem, orders_key, roster_key, spec_key, wait_key
from job_contract.spec import JobSpec
from job_contract.version import build, decode, encode, plain

T = TypeVar("T")

KEEP_S = 35 * 86400
"""How long the identity of a request, its row and its history outlive the job."""

NOTICE_KEPT_S = 86400
ALIVE_SHARDS = 8
EVENT_PREFIX = "EVENT#"
TELLS = "tells"
"""Set by a write that brings news, and by no other: a stream's filter sees one image, so it cannot compare two."""


class JobTable:
    """Keeps ports.JobStore on two DynamoDB tables."""

    def __init__(self, client: Any, *, jobs: str, orders: str) -> None:
        self.client, self.jobs, self.orders = client, jobs, orders

    # -- the job ---------------------------------------------------------------------------------------------------

    def create(self, job: Job, request: Mapping[str, Any], spec: JobSpec) -> bool:
        writes = [
            self._put(self.jobs, {**row_of(job), TELLS: True}, new=True),
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
                "Item": to_item({**row_of(after), **({TELLS: True} if after.news != before.news else {})}),
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

    # Keys of its own: a crowd must not use up what the row's partition can write.
    def leave_notice(self, job_id: str, attempt: int, instance: str, deadline_at: float) -> None:
        left = {"deadline_at": deadline_at, "expires_at": round(deadline_at + NOTICE_KEPT_S)}
        key = _key(f"NOTICE#{job_id}#{attempt}", instance)
        self.client.put_item(TableName=self.jobs, Item=to_item({**key, **left}))

    def left_notices(self, job_id: str, attempt: int) -> Mapping[str, float]:
        items = self._query(self.jobs, "pk = :pk", {":pk": f"NOTICE#{job_id}#{attempt}"}, ConsistentRead=True)
        return {item["sk"]: float(item["deadline_at"]) for item in items}

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

    def roster(self, job_id: str, roster_id: str) -> Roster | None:
        item = self._get(self.orders, {"key": roster_key(job_id, roster_id)})
        return decode(Roster, item) if item else None

    def put_roster(self, roster: Roster) -> None:
        self.client.put_item(
            TableName=self.orders, Item=to_item({"key": roster_key(roster.job, roster.roster_id), **encode(roster)})
        )

    # -- fleets and nodes ------------------------------------------------------------------------------------------

    def open_intent(self, intent: FleetIntent) -> FleetIntent:
        if self._put_new(_intent_item(intent)):
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
            if name in ("ready", "step", "loss", "tokens_per_s", "reported_at", "step_at")
        }
        self.client.update_item(
            TableName=self.jobs,
            Key=to_item(_key(f"NODE#{node.instance}", "NODE")),
            UpdateExpression="SET " + ", ".join(f"#{name} = :{name}" for name in told),
            ConditionExpression="attribute_exists(pk)",
            ExpressionAttributeNames={f"#{name}": name for name in told},
            ExpressionAttributeValues=to_item({f":{name}": value for name, value in told.items()}),
        )

    def hold(self, instances: Iterable[str], until: float) -> None:
        for instance in instances:
            self._change_node(
                instance,
                "SET #state = :held, #until = :until",
                condition="#state = :member OR #state = :held",
                names={"#until": "until"},
                values={":held": Ownership.HELD.value, ":member": Ownership.MEMBER.value, ":until": until},
            )

    def adopt(self, instance: str, *, fleet: str, attempt: int, now: float) -> bool:
        return self._change_node(
            instance,
            "SET #state = :member, fleet = :fleet, attempt = :attempt, since_at = :now REMOVE ready, #until",
            condition="#state = :held OR (#state = :member AND attempt = :attempt)",
            names={"#until": "until"},
            values={
                ":held": Ownership.HELD.value,
                ":member": Ownership.MEMBER.value,
                ":fleet": fleet,
                ":attempt": attempt,
                ":now": now,
            },
        )

    def _change_node(
        self, instance: str, update: str, *, condition: str, names: Mapping[str, str], values: Mapping[str, Any]
    ) -> bool:
        try:
            self.client.update_item(
                TableName=self.jobs,
                Key=to_item(_key(f"NODE#{instance}", "NODE")),
                UpdateExpression=update,
                ConditionExpression=condition,
                ExpressionAttributeNames={"#state": "state", **names},
                ExpressionAttributeValues=to_item(values),
            )
        except ClientError as error:
            if code_of(error) in CONDITION_FAILED:
                return False
            raise
        return True

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
        try:
            self.client.put_item(
                TableName=self.jobs, Item=to_item(data), ConditionExpression="attribute_not_exists(pk)"
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


def _node_item(node: Node) -> dict[str, Any]:
    return {**_key(f"NODE#{node.instance}", "NODE"), **plain(node)}


def _intent_item(intent: FleetIntent) -> dict[str, Any]:
    return {**_key(f"FLEET#{intent.fleet}", "INTENT"), **plain(intent)}
