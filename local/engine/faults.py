"""What the harness may do to the cloud while it runs: POST /_holdfast/<verb> with a JSON body."""

import time
from collections.abc import Callable
from fnmatch import fnmatchcase

from local.engine import capacity as model
from local.engine.events import EventSource
from local.engine.nodes import Nodes

PREFIX = "/_holdfast/"


class Faults:
    def __init__(self, nodes: Nodes, events: EventSource, muted_kinds: set[str]) -> None:
        self._nodes, self._events, self._muted_kinds = nodes, events, muted_kinds
        self._slow_keys: dict[str, float] = {}
        self._verbs: dict[str, Callable[..., object]] = {
            "interrupt": nodes.interrupt,
            "rebalance": nodes.rebalance,
            "next_launch": nodes.next_launch,
            "slow_uploads": self.slow_uploads,
            "kill": nodes.kill,
            "mute": self.mute,
            "set_capacity": self.set_capacity,
            "schedule": self.schedule,
            "impair": self.impair,
            "instances": self.instances,
            "emit": events.put,
        }

    def answer(self, verb: str, arguments: dict) -> tuple[int, object]:
        """Status and JSON answer; a word the cloud doesn't know, or an instance that is not there, is a 4xx."""
        if verb not in self._verbs:
            return 404, {"error": f"no such verb: {verb}"}
        try:
            return 200, self._verbs[verb](**arguments)
        except model.InstanceNotFound as error:
            return 404, {"error": f"not running here: {error.args[0]}"}

    def mute(self, state_changes: bool, reports: list[str]) -> None:
        """From now on exactly this is lost on its way."""
        self._events.muted_state_changes = state_changes
        self._muted_kinds.clear()
        self._muted_kinds.update(reports)

    def set_capacity(
        self, instance_type: str, zone: str, market: str, slots: int | None, error_code: str, partial: bool
    ) -> None:
        with self._nodes.lock:
            self._nodes.capacity.set_pool(
                instance_type=instance_type, zone=zone, market=market, slots=slots, code=error_code, partial=partial
            )

    def slow_uploads(self, keys: str, seconds: float) -> None:
        """From now on each object whose key is like `keys` takes so long to put; 0 ends it."""
        self._slow_keys[keys] = seconds

    def upload_delay_s(self, path: str) -> float:
        """How long the put of the object at this path is to take."""
        return max((seconds for keys, seconds in self._slow_keys.items() if fnmatchcase(path, keys)), default=0.0)

    def schedule(self, instance_id: str, code: str, starts_at: float, description: str) -> None:
        """One more scheduled event is in the instance's status; no event and no metadata tell of it."""
        with self._nodes.lock:
            self._instance(instance_id).scheduled.append((code, starts_at, description))

    def impair(self, instance_id: str, since: float | None) -> None:
        """The instance's status check fails since then; None = it passes again."""
        with self._nodes.lock:
            self._instance(instance_id).impaired_since = since

    def _instance(self, instance_id: str) -> model.Instance:
        if instance_id not in self._nodes.capacity.instances:
            raise model.InstanceNotFound([instance_id])
        return self._nodes.capacity.instances[instance_id]

    def instances(self) -> list[dict]:
        with self._nodes.lock:
            return [_shown(one) for one in self._nodes.capacity.instances.values()]


def _shown(one: model.Instance) -> dict:
    return {
        "instance": one.instance_id,
        "state": one.state,
        "reason": one.reason,
        "type": one.candidate.instance_type,
        "zone": one.candidate.zone,
        "market": one.market,
        "fleet": one.fleet_id,
        "tags": one.tags,
        "launched_at": one.launched_at,
        "ended_at": one.ended_at,
        "age_s": time.time() - one.launched_at,
    }
