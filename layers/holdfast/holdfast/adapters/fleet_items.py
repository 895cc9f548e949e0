"""The items of machines in the jobs table: what may exist in EC2, who owns it, and what is known of places to buy it.

Their keys stand in job_table.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from holdfast.adapters.aws_errors import CONDITION_FAILED, code_of
from holdfast.adapters.items import to_item
from holdfast.adapters.tables import Tables, key_of
from holdfast.domain.baseline import KEPT_S, Baseline, BaselineKey
from holdfast.domain.errors import Unavailable
from holdfast.domain.gate import Quarantined
from holdfast.domain.keys import KEEP_S
from holdfast.domain.ownership import FleetIntent, Node, Ownership
from holdfast.domain.placement import FORGET_S, Cold, Patience, Pool
from job_contract.version import build, plain

REPORTED = frozenset(
    {"ready", "step", "loss", "tokens_per_s", "evaluation_loss", "reported_at", "step_at", "slow", "watch"}
)
"""What a node's item has from its reports."""


class FleetItems(Tables):
    """Intents, nodes, pools, baselines, quarantine."""

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
        item = self._get(self.jobs, key_of(f"FLEET#{fleet}", "INTENT"))
        return build(FleetIntent, item) if item else None

    def own(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._put_new(_node_item(node))

    def node(self, instance: str) -> Node | None:
        item = self._get(self.jobs, key_of(f"NODE#{instance}", "NODE"))
        return build(Node, item) if item else None

    def nodes(self, instances: Iterable[str]) -> list[Node]:
        items = self._batch(self.jobs, [key_of(f"NODE#{instance}", "NODE") for instance in instances])
        return [build(Node, item) for item in items]

    def update_node(self, node: Node) -> None:
        told = {name: value for name, value in plain(node).items() if name in REPORTED}
        self.client.update_item(
            TableName=self.jobs,
            Key=to_item(key_of(f"NODE#{node.instance}", "NODE")),
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
                Key=to_item(key_of(f"NODE#{instance}", "NODE")),
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
                Key=to_item(key_of(f"NODE#{instance}", "NODE")),
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

    def suspected(self, instance: str, now: float) -> float | None:
        key = key_of("SUSPECT", instance)
        known = self._get(self.jobs, key)
        if known is not None:
            return float(known["at"])
        self._put_new({**key, "at": now, "expires_at": round(now + 86400)})
        return None

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
        item = self._get(self.jobs, key_of(f"JOB#{job_id}", "PATIENCE"))
        return build(Patience, item) if item else Patience()

    def keep_patience(self, job_id: str, patience: Patience, now: float) -> None:
        item = {**key_of(f"JOB#{job_id}", "PATIENCE"), **plain(patience), "expires_at": round(now + KEEP_S)}
        self.client.put_item(TableName=self.jobs, Item=to_item(item))

    def baseline(self, key: BaselineKey) -> Baseline | None:
        item = self._get(self.jobs, _baseline_key(key))
        return build(Baseline, item) if item else None

    def keep_baseline(self, key: BaselineKey, baseline: Baseline) -> None:
        item = {**_baseline_key(key), **plain(baseline), "expires_at": round(baseline.at + KEPT_S)}
        self.client.put_item(TableName=self.jobs, Item=to_item(item))

    def baselines(self, model: str, instance_type: str) -> list[Baseline]:
        values = {":pk": f"BASELINE#{model}", ":sk": f"{instance_type}#"}
        items = self._query(self.jobs, "pk = :pk AND begins_with(sk, :sk)", values)
        return [build(Baseline, item) for item in items]

    def quarantine(self, found: Quarantined) -> None:
        item = {**key_of("QUARANTINE", found.host), **plain(found), "expires_at": round(found.until)}
        self.client.put_item(TableName=self.jobs, Item=to_item(item))

    def quarantined(self, hosts: Iterable[str], now: float) -> dict[str, Quarantined]:
        items = self._batch(self.jobs, [key_of("QUARANTINE", host) for host in dict.fromkeys(hosts)])
        found = [build(Quarantined, item) for item in items]
        return {one.host: one for one in found if one.until > now}


def _pool_key(pool: Pool) -> dict[str, str]:
    return key_of(f"POOL#{pool.key}", "COLD")


def _baseline_key(key: BaselineKey) -> dict[str, str]:
    return key_of(f"BASELINE#{key.model}", f"{key.instance_type}#{key.world_size}#{key.work}")


def _node_item(node: Node) -> dict[str, Any]:
    return {**key_of(f"NODE#{node.instance}", "NODE"), **plain(node)}


def _intent_item(intent: FleetIntent) -> dict[str, Any]:
    return {**key_of(f"FLEET#{intent.fleet}", "INTENT"), **plain(intent)}
