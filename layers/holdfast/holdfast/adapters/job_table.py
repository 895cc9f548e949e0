"""The jobs table and the orders table: rows, dedup keys, owners, intents; orders, rosters, wait items.

JOB#<job>        ROW                the job; in index `waiting` while dispatchable, `alive` while its attempt is open,
                                    `ended` when it is over
JOB#<job>        REQUEST            the accepted request, immutable
JOB#<job>        EVENT#<dedup key>  what happened: the dedup key and the history at once
NODE#<instance>  NODE               the owner of an instance, and what it reported
FLEET#<fleet>    INTENT             what may exist in EC2 because of us
IDENTITY#<id>    JOB                which job was accepted under a team's dedup_id, and its name
TEAMS            <team>             teams that ever sent a job
TEMPLATE#<name>  V#<version>        a job template; a version never changes
TEMPLATE#<name>  NEWEST             the highest version there is
DATASETS         <name>@<version>   a dataset: its place and digest; a version never changes
NOTICE#<job>#<attempt>  <instance>  a notice left for whoever writes the row next
SUSPECT          <instance>         seen by a sweep without an owner
CLAIM            <name>             taken by one caller until a time
LEDGER           ROW                what is in flight, used and held; versioned
QUOTA            TEAM#<team>        what a team may have in flight, MARKET#<market> likewise; set by the operator
QUOTA_CHANGES    TEAM#<team>#<key>  who set that quota, when, from what to what; the dedup key of the wish at once
POOL#<pool>      COLD               a pool that refused: until when no job asks it
JOB#<job>        PATIENCE           what the job's asking for machines has cost
QUARANTINE       <host>             a machine that was found bad
BASELINE#<model> <type>#<world size>#<work>  what a step of this kind usually takes
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from botocore.exceptions import ClientError

from holdfast.adapters.aws_errors import CONDITION_FAILED, code_of, raced
from holdfast.adapters.fleet_items import FleetItems
from holdfast.adapters.items import from_item, to_item
from holdfast.adapters.tables import key_of
from holdfast.domain.because import Because
from holdfast.domain.errors import Raced, Rejected, UnknownJob
from holdfast.domain.events import Event
from holdfast.domain.job import Job
from holdfast.domain.keys import KEEP_S, event_name
from holdfast.domain.ledger import NO_QUOTA, Ledger, Quota, QuotaChange, Quotas
from holdfast.domain.obligations import orders_for
from holdfast.domain.queueing import Waiter
from job_contract.orders import Roster, Wait, WaitItem, orders_key, roster_key, spec_key, wait_key
from job_contract.spec import JobSpec
from job_contract.version import build, decode, encode, plain

ALIVE_SHARDS = 8
EVENT_PREFIX = "EVENT#"
TTL_LAG_S = 7 * 86400
"""DynamoDB deletes days after the date. Row and request go last: a new job must not meet the history of an old one."""

DETAIL_CHARACTERS = 2_000
DETAIL_ITEMS = 300
"""Bounds of one detail in the history, so that no item comes near what DynamoDB takes."""

WAITING_CARRIES = tuple(sorted({known.name for known in fields(Waiter)} - {"id", "team", "attempt_open"}))
"""What the index `waiting` projects besides its keys, so that a dispatch reads no row it does not start."""

LINE_PAGE = 400
"""Jobs of one team that one dispatch looks at; the others stand in line behind them."""

NOTICE_KEPT_S = 86400
TELLS = "tells"
"""Set by a write that brings news, and by no other: a stream's filter sees one image, so it cannot compare two."""

FREES = "frees"
"""Likewise on the ledger: set by a write that gave a place back, so that a start wakes no dispatch."""


class JobTable(FleetItems):
    """Keeps ports.JobStore on two DynamoDB tables."""

    # -- the job ---------------------------------------------------------------------------------------------------

    def create(self, job: Job, request: Mapping[str, Any], spec: JobSpec) -> bool:
        writes = [
            self._put(self.jobs, {**row_of(job), TELLS: True}, new=True),
            self._put(self.jobs, {**key_of(f"JOB#{job.id}", "REQUEST"), **request}),
            self._put(self.jobs, key_of("TEAMS", job.team)),
            self._put(self.orders, {"key": spec_key(job.id, spec.spec_id), **encode(spec)}),
            self._put(self.orders, {"key": orders_key(job.id), **encode(orders_for(job, job.submitted_at))}),
        ]
        identity = request.get("identity")
        if identity:
            writes.append(
                {
                    "Put": {
                        "TableName": self.jobs,
                        "Item": to_item({**_identity_key(identity), "job": job.id, "name": job.name}),
                        "ConditionExpression": "attribute_not_exists(pk) OR job = :job",
                        "ExpressionAttributeValues": to_item({":job": job.id}),
                    }
                }
            )
        try:
            self.client.transact_write_items(TransactItems=writes)
        except ClientError as error:
            if not raced(error):
                raise
            holder = self.holder(identity) if identity else None
            if self.load(job.id) is None and (holder is None or holder["job"] == job.id):
                # Two first deliveries at once conflict without either having won yet: let the queue bring it again.
                raise Raced(f"{job.id} is being accepted by another delivery") from error
            return False
        return True

    def request(self, job_id: str) -> Mapping[str, Any] | None:
        return self._get(self.jobs, key_of(f"JOB#{job_id}", "REQUEST"))

    def holder(self, identity: str) -> Mapping[str, Any] | None:
        return self._get(self.jobs, _identity_key(identity))

    def accepted_body(self, job_id: str) -> str:
        """Return the body of the accepted request. Raises UnknownJob."""
        request = self.request(job_id)
        if request is None:
            raise UnknownJob(job_id)
        return str(request["body"])

    # -- templates -------------------------------------------------------------------------------------------------

    def put_template(self, template: Mapping[str, Any]) -> bool:
        key = key_of(f"TEMPLATE#{template['name']}", f"V#{template['version']}")
        new = self._put_new({**key, **template})
        known = template if new else self.template(template["name"], template["version"])
        if known is None or known["body"] != template["body"]:
            raise Rejected(
                "template_version_taken",
                f"{template['name']} has a version {template['version']} with another content; put the change under "
                "the next one",
            )
        self._point_at(template["name"], template["version"])
        return new

    def template(self, name: str, version: int | None) -> Mapping[str, Any] | None:
        if version is None:
            newest = self._get(self.jobs, key_of(f"TEMPLATE#{name}", "NEWEST"))
            return self.template(name, int(newest["version"])) if newest else None
        return self._get(self.jobs, key_of(f"TEMPLATE#{name}", f"V#{version}"))

    def _point_at(self, name: str, version: int) -> None:
        """The pointer names this version, or a higher one."""
        try:
            self.client.update_item(
                TableName=self.jobs,
                Key=to_item(key_of(f"TEMPLATE#{name}", "NEWEST")),
                UpdateExpression="SET version = :version",
                ConditionExpression="attribute_not_exists(pk) OR version < :version",
                ExpressionAttributeValues=to_item({":version": version}),
            )
        except ClientError as error:
            if code_of(error) not in CONDITION_FAILED:
                raise

    # -- datasets --------------------------------------------------------------------------------------------------

    def put_dataset(self, dataset: Mapping[str, Any]) -> bool:
        new = self._put_new({**_dataset_key(dataset["name"], dataset["version"]), **dataset})
        known = dataset if new else self.dataset(dataset["name"], dataset["version"])
        if known is None or any(known[part] != dataset[part] for part in ("uri", "digest")):
            raise Rejected(
                "dataset_version_taken",
                f"{dataset['name']} has a version {dataset['version']} at another place or with another digest; "
                "register the change under the next one",
            )
        return new

    def dataset(self, name: str, version: int) -> Mapping[str, Any] | None:
        return self._get(self.jobs, _dataset_key(name, version))

    def datasets(self) -> list[dict[str, Any]]:
        """Return all versions of all datasets, by name and version."""
        items = self._query(self.jobs, "pk = :pk", {":pk": "DATASETS"})
        return sorted(items, key=lambda item: (item["name"], item["version"]))

    # -- the row ---------------------------------------------------------------------------------------------------

    def load(self, job_id: str) -> Job | None:
        item = self._get(self.jobs, key_of(f"JOB#{job_id}", "ROW"))
        return build(Job, item) if item else None

    def load_all(self, job_ids: Iterable[str]) -> list[Job]:
        return [build(Job, item) for item in self._batch(self.jobs, [key_of(f"JOB#{one}", "ROW") for one in job_ids])]

    def load_for(self, job_id: str, key: str) -> tuple[Job | None, bool]:
        items = self._batch(self.jobs, [key_of(f"JOB#{job_id}", "ROW"), key_of(f"JOB#{job_id}", EVENT_PREFIX + key)])
        row = next((item for item in items if item["sk"] == "ROW"), None)
        return (build(Job, row) if row else None), any(item["sk"] != "ROW" for item in items)

    def save(self, before: Job, after: Job, event: Event, key: str, ledger: Ledger | None = None) -> None:
        tells = after.news != before.news or after.budget_warned != before.budget_warned
        row = {
            "Put": {
                "TableName": self.jobs,
                "Item": to_item({**row_of(after), **({TELLS: True} if tells else {})}),
                "ConditionExpression": "version = :before",
                "ExpressionAttributeValues": to_item({":before": before.version}),
            }
        }
        writes = [self._put(self.jobs, _history(before, after, event, key), new=True), row]
        if after.generation != before.generation:
            writes.append(self._put(self.orders, {"key": orders_key(after.id), **encode(orders_for(after, event.at))}))
        if after.reserved != before.reserved:
            base = self.ledger() if ledger is None else ledger
            writes.append({"Put": self._ledger_put(base, base.moved(before, after, event.at))})
        try:
            self.client.transact_write_items(TransactItems=writes)
        except ClientError as error:
            if raced(error):
                raise Raced(f"{after.id} moved past version {before.version}, or the ledger did") from error
            raise

    def explain(self, job: Waiter, because: Because) -> bool:
        # The version stays: a reason is no change of the job, and must not race with one.
        try:
            self.client.update_item(
                TableName=self.jobs,
                Key=to_item(key_of(f"JOB#{job.id}", "ROW")),
                UpdateExpression="SET #waiting = :because",
                ConditionExpression="version = :version AND attribute_exists(waiting_team)",
                ExpressionAttributeNames={"#waiting": "waiting"},
                ExpressionAttributeValues=to_item({":because": plain(because), ":version": job.version}),
            )
        except ClientError as error:
            if raced(error):
                return False
            raise
        return True

    def history(self, job_id: str) -> list[dict[str, Any]]:
        """Return what happened to the job, oldest first."""
        items = self._query(
            self.jobs, "pk = :pk AND begins_with(sk, :sk)", {":pk": f"JOB#{job_id}", ":sk": EVENT_PREFIX}
        )
        return sorted(items, key=lambda item: (item["version"], item["at"]))

    # -- the ledger ------------------------------------------------------------------------------------------------

    def ledger(self) -> Ledger:
        item = self._get(self.jobs, key_of("LEDGER", "ROW"))
        return build(Ledger, item) if item else Ledger()

    def put_ledger(self, before: Ledger, after: Ledger) -> None:
        try:
            self.client.put_item(**self._ledger_put(before, after))
        except ClientError as error:
            if raced(error):
                raise Raced(f"the ledger moved past version {before.version}") from error
            raise

    def _ledger_put(self, before: Ledger, after: Ledger) -> dict[str, Any]:
        frees = {FREES: True} if after.freed > before.freed else {}
        return {
            "TableName": self.jobs,
            "Item": to_item({**key_of("LEDGER", "ROW"), **plain(after), **frees}),
            "ConditionExpression": "version = :before" if before.version else "attribute_not_exists(pk)",
            **({"ExpressionAttributeValues": to_item({":before": before.version})} if before.version else {}),
        }

    def quotas(self) -> Quotas:
        items = self._query(self.jobs, "pk = :pk", {":pk": "QUOTA"}, ConsistentRead=True)
        # One that was cleared stays as an item that says nothing: the doors may not delete from the jobs table.
        known = {item["sk"]: quota for item in items if (quota := build(Quota, item)) != NO_QUOTA}
        return Quotas(teams=_of_kind(known, "TEAM#"), markets=_of_kind(known, "MARKET#"))

    def quota(self, kind: str, name: str) -> Quota:
        item = self._get(self.jobs, key_of("QUOTA", _quota_key(kind, name)))
        return build(Quota, item) if item else NO_QUOTA

    def put_quota(self, change: QuotaChange) -> bool:
        key, version = _quota_key(change.kind, change.name), change.before.version
        told = key_of("QUOTA_CHANGES", f"{key}#{change.key}")
        quota = {
            "TableName": self.jobs,
            "Item": to_item({**key_of("QUOTA", key), **plain(change.after)}),
            "ConditionExpression": "version = :before" if version else "attribute_not_exists(version)",
            **({"ExpressionAttributeValues": to_item({":before": version})} if version else {}),
        }
        writes = [self._put(self.jobs, {**told, **plain(change)}, new=True), {"Put": quota}]
        try:
            self.client.transact_write_items(TransactItems=writes)
        except ClientError as error:
            if not raced(error):
                raise
            if self._get(self.jobs, told) is not None:
                return False
            raise Raced(f"the quota of {change.kind} {change.name} moved past version {version}") from error
        return True

    def quota_changes(self) -> list[QuotaChange]:
        """Return every change of a quota, oldest first."""
        items = self._query(self.jobs, "pk = :pk", {":pk": "QUOTA_CHANGES"})
        changes = [build(QuotaChange, item) for item in items]
        return sorted(changes, key=lambda change: (change.at, change.after.version))

    # Keys of its own: a crowd must not use up what the row's partition can write.
    def leave_notice(self, job_id: str, attempt: int, instance: str, deadline_at: float) -> None:
        left = {"deadline_at": deadline_at, "expires_at": round(deadline_at + NOTICE_KEPT_S)}
        key = key_of(f"NOTICE#{job_id}#{attempt}", instance)
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

    def expire(self, job_id: str, at: float | None) -> None:
        for item in self._query(self.jobs, "pk = :pk", {":pk": f"JOB#{job_id}"}):
            if item["sk"] == "REQUEST":
                self._expire(self.jobs, key_of(item["pk"], item["sk"]), at and at + TTL_LAG_S)
                if item.get("identity"):
                    self._expire(self.jobs, _identity_key(item["identity"]), at and at + TTL_LAG_S)
            elif item["sk"] != "ROW":
                self._expire(self.jobs, key_of(item["pk"], item["sk"]), at)
        for table, key in self._elsewhere(job_id):
            self._expire(table, key, at)

    def _elsewhere(self, job_id: str) -> Iterable[tuple[str, Mapping[str, str]]]:
        """Return table and key of what the job has outside its own partition; its history names fleets and rosters."""
        details = [item.get("detail") or {} for item in self.history(job_id)]
        for fleet in sorted({detail["fleet"] for detail in details if detail.get("fleet")}):
            intent = self.intent(fleet)
            if intent is not None:
                yield self.jobs, key_of(f"FLEET#{fleet}", "INTENT")
                yield from ((self.jobs, key_of(f"NODE#{instance}", "NODE")) for instance in intent.instances)
        for roster in sorted({detail["roster_id"] for detail in details if detail.get("roster_id")}):
            yield self.orders, {"key": roster_key(job_id, roster)}
        yield from ((self.orders, {"key": wait_key(job_id, wait)}) for wait in Wait)
        yield self.orders, {"key": orders_key(job_id)}
        job = self.load(job_id)
        if job is not None:
            yield self.orders, {"key": spec_key(job_id, job.spec_id)}

    def _expire(self, table: str, key: Mapping[str, str], at: float | None) -> None:
        values = {} if at is None else {"ExpressionAttributeValues": to_item({":at": round(at)})}
        try:
            self.client.update_item(
                TableName=table,
                Key=to_item(key),
                UpdateExpression="REMOVE expires_at" if at is None else "SET expires_at = :at",
                ConditionExpression="attribute_exists(#hash)",
                ExpressionAttributeNames={"#hash": next(iter(key))},
                **values,
            )
        except ClientError as error:
            if code_of(error) not in CONDITION_FAILED:
                raise

    # -- looking around --------------------------------------------------------------------------------------------

    def teams(self) -> list[str]:
        return [item["sk"] for item in self._query(self.jobs, "pk = :pk", {":pk": "TEAMS"})]

    def waiting(self, team: str) -> list[str]:
        return self._ids("waiting", "waiting_team = :key", team)

    def line(self, team: str) -> list[Waiter]:
        page = self.client.query(
            TableName=self.jobs,
            IndexName="waiting",
            KeyConditionExpression="waiting_team = :team",
            ExpressionAttributeValues=to_item({":team": team}),
            Limit=LINE_PAGE,
        )
        rows = [from_item(item) for item in page["Items"]]
        return [build(Waiter, {**row, "id": row["pk"].removeprefix("JOB#"), "team": team}) for row in rows]

    def alive(self) -> list[str]:
        return [job for shard in range(ALIVE_SHARDS) for job in self._ids("alive", "alive_shard = :key", shard)]

    def ended(self, team: str) -> list[str]:
        """Return ids of jobs that are over, oldest end first; an index, so possibly stale."""
        return self._ids("ended", "ended_team = :key", team)

    def claim(self, name: str, now: float, until_at: float) -> bool:
        item = {**key_of("CLAIM", name), "until_at": until_at, "expires_at": round(until_at + 86400)}
        try:
            self.client.put_item(
                TableName=self.jobs,
                Item=to_item(item),
                ConditionExpression="attribute_not_exists(pk) OR until_at <= :now",
                ExpressionAttributeValues=to_item({":now": now}),
            )
        except ClientError as error:
            if code_of(error) in CONDITION_FAILED:
                return False
            raise
        return True

    def _ids(self, index: str, condition: str, key: str | int) -> list[str]:
        rows = self._query(self.jobs, condition, {":key": key}, IndexName=index)
        return [str(row["pk"]).removeprefix("JOB#") for row in rows]


def row_of(job: Job) -> dict[str, Any]:
    """Return the row's attributes: the job, its keys, and its place in the sparse indexes."""
    row = {**key_of(f"JOB#{job.id}", "ROW"), **plain(job)}
    if job.dispatchable:
        row |= {"waiting_team": job.team, "waiting_rank": job.rank}
    if job.attempt_open:
        row["alive_shard"] = zlib.crc32(job.id.encode()) % ALIVE_SHARDS
    if job.ended_at is not None:
        row |= {"ended_team": job.team, "expires_at": round(job.ended_at + KEEP_S + TTL_LAG_S)}
    return row


def job_of(image: Mapping[str, Any]) -> Job | None:
    """Return the job in a stream record's image, None when there is none or it is not a job's row."""
    row = from_item(image)
    is_job = row.get("sk") == "ROW" and row["pk"].startswith("JOB#")
    return build(Job, row) if is_job else None


def wakes_dispatch(change: Mapping[str, Any]) -> bool:
    """Return whether a stream record's change may let a job start: a row that moved and waits, a freed place, a quota.

    The reason that a dispatch writes into a row moves no version, so a dispatch never wakes the next one.
    """
    old, new = from_item(change.get("OldImage", {})), from_item(change.get("NewImage", {}))
    if new.get("pk") == "LEDGER":
        return bool(new["freed"] > old.get("freed", 0))
    return "waiting_team" not in new or new.get("version") != old.get("version")


def _history(before: Job, after: Job, event: Event, key: str) -> dict[str, Any]:
    detail = {name: _clipped(value) for name, value in plain(event).items() if name not in ("at", "cause", "attempt")}
    return {
        **key_of(f"JOB#{after.id}", EVENT_PREFIX + key),
        "kind": event_name(event),
        "at": event.at,
        "cause": event.cause,
        "attempt": getattr(event, "attempt", after.attempt),
        "before": before.phase.value,
        "after": after.phase.value,
        "version": after.version,
        "detail": detail,
        # What is told of a job after its end was not there when the rest was given its date.
        **({"expires_at": round(after.ended_at + KEEP_S)} if after.ended_at is not None else {}),
    }


def _quota_key(kind: str, name: str) -> str:
    return f"{kind.upper()}#{name}"


def _of_kind(known: Mapping[str, Quota], prefix: str) -> dict[str, Quota]:
    return {name.removeprefix(prefix): quota for name, quota in known.items() if name.startswith(prefix)}


def _clipped(value: Any) -> Any:
    """Return what a reader of the history needs of a detail: a gang may have hundreds of machines."""
    if isinstance(value, str):
        return value if len(value) <= DETAIL_CHARACTERS else f"{value[:DETAIL_CHARACTERS]}..."
    if isinstance(value, list):
        clipped = [_clipped(item) for item in value[:DETAIL_ITEMS]]
        return [*clipped, f"and {len(value) - DETAIL_ITEMS} more"] if len(value) > DETAIL_ITEMS else clipped
    return value


def _dataset_key(name: str, version: int) -> dict[str, Any]:
    return key_of("DATASETS", f"{name}@{version}")


def _identity_key(identity: str) -> dict[str, str]:
    return key_of(f"IDENTITY#{identity}", "JOB")
