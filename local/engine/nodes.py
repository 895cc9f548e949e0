"""A running instance is a tree of local processes with a metadata service; its life is published as EC2 publishes it.

One keeper thread does all timed work: boots, notices that end, the grace after SIGTERM, agents that exit.
"""

import heapq
import itertools
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from local import containers
from local.engine import capacity as model
from local.engine.events import EventSource
from local.engine.imds import Metadata, MetadataServer, iso
from local.engine.settings import ACCOUNT, REGION, Settings
from local.processes import NODE_MARKER, Forker, kill_marked, marked, send_signal

THREAD = "node-keeper"
_TICK_S = 0.05
_logger = logging.getLogger("nodes")
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOLDFAST_LOCAL_CLOUD")
_BEGIN, _END = "# holdfast-environment", "# end-holdfast-environment"


@dataclass
class Node:
    """What belongs to one instance on this machine."""

    metadata: Metadata
    user_data: str
    server: MetadataServer | None = None
    container: containers.Container | None = None
    process: subprocess.Popen | None = None
    kill_at: float | None = None
    unseen: bool = False


class Nodes:
    def __init__(self, settings: Settings, capacity: model.Capacity, events: EventSource, forker: Forker) -> None:
        self.capacity = capacity
        self.lock = threading.RLock()
        self._settings, self._events, self._forker = settings, events, forker
        self._nodes: dict[str, Node] = {}
        self._oddities: dict[str, list[tuple[float | None, dict]]] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._wake = threading.Event()
        self._network = (
            containers.Network(settings.cloud_id, settings.image_root, settings.port) if settings.image_root else None
        )
        threading.Thread(target=self._keep, name=THREAD, daemon=True).start()

    def launch(self, instance: model.Instance, user_data: str) -> None:
        """The instance is announced as pending and boots after the boot delay."""
        metadata = Metadata(
            instance_id=instance.instance_id,
            instance_type=instance.candidate.instance_type,
            life_cycle=instance.market,
            zone=instance.candidate.zone,
            region=REGION,
            account=ACCOUNT,
            launched_at=instance.launched_at,
            tags=instance.tags,
        )
        boot_delay_s, facts = self._oddity(instance.candidate.instance_type)
        with self.lock:
            self._nodes[instance.instance_id] = Node(replace(metadata, **facts), user_data)
        self._at(0.0, lambda: self._events.state_changed(instance.instance_id, "pending"))
        self._at(boot_delay_s, lambda: self._boot(instance.instance_id))

    def next_launch(self, instance_type: str, *, boot_delay_s: float | None, metadata: dict) -> None:
        """One more machine of this type, the next that is launched, boots so late, or tells these things of itself."""
        with self.lock:
            self._oddities.setdefault(instance_type, []).append((boot_delay_s, metadata))

    def terminate(self, instance_id: str) -> None:
        """The instance is shutting down at once; its agent has SIGTERM, and after the grace SIGKILL ends all of it."""
        with self.lock:
            changed = self.capacity.shut_down(instance_id, model.USER_SHUTDOWN, now=time.time())
        if changed:
            self._at(0.0, lambda: self._stop_gently(instance_id))

    def interrupt(self, instance_id: str, *, notice_s: float, event: bool, metadata: bool) -> float:
        """A spot notice by each way that is switched on; when it ends, the machine is gone. The time of publication."""
        node = self._node(instance_id)
        with self.lock:
            self.capacity.claim(instance_id)
        published_at = time.time()
        if metadata:
            node.metadata.instance_action = {"action": "terminate", "time": iso(published_at + notice_s)}
        self._at(notice_s, lambda: self._lose(instance_id, model.SPOT_TERMINATION))
        return self._events.interruption_warning(instance_id, published_at + notice_s) if event else published_at

    def rebalance(self, instance_id: str, *, event: bool, metadata: bool) -> float:
        """A rebalance recommendation by each way that is switched on."""
        node = self._node(instance_id)
        if metadata:
            node.metadata.rebalance = {"noticeTime": iso(time.time())}
        return self._events.rebalance_recommendation(instance_id) if event else time.time()

    def kill(self, instance_id: str, *, seen: bool) -> None:
        """Every process of the node is dead without notice. EC2 sees it and ends the instance as after a failure of
        its host, or sees nothing and shows it running."""
        node = self._node(instance_id)
        node.unseen = not seen
        kill_marked(NODE_MARKER, instance_id)
        if seen:
            self._at(0.0, lambda: self._lose(instance_id, model.HOST_FAILURE))

    def console(self, instance_id: str, size: int = 65536) -> bytes:
        """The tail of what the node wrote."""
        path = self._directory(instance_id) / "agent.log"
        return path.read_bytes()[-size:] if path.exists() else b""

    def _oddity(self, instance_type: str) -> tuple[float, dict]:
        """The boot delay of the next machine of this type, and the facts of its metadata that are to be others."""
        with self.lock:
            waiting = self._oddities.get(instance_type)
            boot_delay_s, facts = waiting.pop(0) if waiting else (None, {})
        return self._settings.boot_delay_s if boot_delay_s is None else boot_delay_s, facts

    def _node(self, instance_id: str) -> Node:
        with self.lock:
            if instance_id not in self._nodes:
                raise model.InstanceNotFound([instance_id])
            return self._nodes[instance_id]

    def _directory(self, instance_id: str) -> Path:
        return self._settings.root_path / "nodes" / instance_id

    def _at(self, delay_s: float, action: Callable[[], None]) -> None:
        with self.lock:
            heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._order), action))
        self._wake.set()

    def _keep(self) -> None:
        while True:
            self._wake.wait(_TICK_S)
            self._wake.clear()
            while action := self._next_due():
                action()
            for instance_id in list(self._nodes):
                self._look_after(instance_id)

    def _next_due(self) -> Callable[[], None] | None:
        with self.lock:
            if self._due and self._due[0][0] <= time.monotonic():
                return heapq.heappop(self._due)[2]
        return None

    def _boot(self, instance_id: str) -> None:
        with self.lock:
            if not self.capacity.boot(instance_id):
                return
            node = self._nodes[instance_id]
        directory, command = self._directory(instance_id), self._settings.node_command
        (directory / "run").mkdir(parents=True, exist_ok=True)
        try:
            if self._network:
                node.container = self._network.enter(directory, command)
                node.metadata.local_ip, command = node.container.address, node.container.command
            node.server = MetadataServer(node.metadata, node.container and node.container.metadata)
            self._events.state_changed(instance_id, "running")
            node.process = self._start_agent(instance_id, node, command)
        except OSError:
            _logger.exception("the agent of %s did not start: %s", instance_id, self._settings.node_command)
            self._lose(instance_id, model.INSTANCE_SHUTDOWN)

    def _start_agent(self, instance_id: str, node: Node, command: list[str]) -> subprocess.Popen:
        directory = self._directory(instance_id)
        with (directory / "agent.log").open("ab") as log:
            return self._forker.popen(
                command,
                cwd=directory,
                env=self._environment(instance_id, node),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, instance_id: str, node: Node) -> dict[str, str]:
        repository, directory = Path(self._settings.repository), self._directory(instance_id)
        return (
            {name: os.environ[name] for name in _INHERITED if name in os.environ}
            | environment_of(node.user_data)
            | {
                "AWS_ENDPOINT_URL": self._settings.endpoint,
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": node.server.endpoint,
                "AWS_ACCESS_KEY_ID": instance_id,
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": REGION,
                "AWS_REGION": REGION,
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                "PYTHONPATH": f"{repository / 'training_image'}{os.pathsep}{repository / 'layers' / 'holdfast'}",
                "HOLDFAST_NODE_ROOT": str(directory),
                NODE_MARKER: instance_id,
            }
            | self._settings.node_environment
        )

    def _stop_gently(self, instance_id: str) -> None:
        self._events.state_changed(instance_id, "shutting-down")
        node = self._node(instance_id)
        node.kill_at = time.monotonic() + self._settings.stop_grace_s
        if node.process:
            pid = node.process.pid
            send_signal(containers.first_process(pid) if node.container else pid, signal.SIGTERM)

    def _look_after(self, instance_id: str) -> None:
        """One look at a node: an agent that exited takes its machine with it, a grace that ran out ends it."""
        node = self._nodes[instance_id]
        exited = node.process is None or node.process.poll() is not None
        if node.kill_at is not None:
            alone = exited and not marked(NODE_MARKER, instance_id)
            if alone or time.monotonic() >= node.kill_at:
                self._end(instance_id)
        elif node.process and exited and not node.unseen:
            self._lose(instance_id, model.INSTANCE_SHUTDOWN)

    def _lose(self, instance_id: str, reason: str) -> None:
        """The machine is gone now: every process killed, then both states published."""
        with self.lock:
            node = self._nodes.get(instance_id)
            changed = node is not None and self.capacity.shut_down(instance_id, reason, now=time.time())
        if node is None:
            return
        kill_marked(NODE_MARKER, instance_id)
        if changed:
            self._events.state_changed(instance_id, "shutting-down")
        self._end(instance_id)

    def _end(self, instance_id: str) -> None:
        kill_marked(NODE_MARKER, instance_id)
        with self.lock:
            node = self._nodes.pop(instance_id, None)
            self.capacity.terminate(instance_id)
        if node is None:
            return
        if node.process:
            node.process.wait()
        if node.server:
            node.server.close()
        if node.container:
            self._network.leave(node.container)
        self._events.state_changed(instance_id, "terminated")


def environment_of(user_data: str) -> dict[str, str]:
    """The HOLDFAST_ variables between the two marker lines of decoded user data."""
    lines = [line.strip() for line in user_data.splitlines()]
    if _BEGIN not in lines or _END not in lines:
        return {}
    block = lines[lines.index(_BEGIN) + 1 : lines.index(_END)]
    pairs = (line.removeprefix("export ").partition("=") for line in block if "=" in line)
    return {name: value.strip("'\"") for name, _, value in pairs if name.startswith("HOLDFAST_")}
