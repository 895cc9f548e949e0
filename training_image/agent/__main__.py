"""`python -m agent`: puts the parts together, and ends the ranks on SIGTERM and SIGINT."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

from agent.agent import Agent, speaker
from agent.attempt import Tools
from agent.cloud import Bucket, OrdersTable, SecretStores, clients, logs_client
from agent.gpus import open_gpus
from agent.guard import Guard
from agent.heartbeat import Heartbeat
from agent.host import Host, read_host
from agent.identity import Identity, read_identity
from agent.imds import DEFAULT_ENDPOINT, Imds, ImdsUnavailable
from agent.journal import Journal
from agent.kernel import KernelLog
from agent.logs import Follower, TailShipper
from agent.notices import NoticePoller, WarningPoller
from agent.orders import OrdersPoller
from agent.reports import Reporter
from agent.settings import Pace, Settings


class Stop:
    """Set by a signal, read by the loops."""

    def __init__(self) -> None:
        self.asked = False
        self.agent: Agent | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self.agent:
            self.agent.stopping = True


def boot(imds: Imds, journal: Journal, stop: Stop) -> tuple[Identity, Host] | None:
    """Return who this node is and what it has, however long its metadata takes; None when asked to stop before."""
    while not stop.asked:
        try:
            return read_identity(imds), read_host(imds)
        except (ImdsUnavailable, OSError) as error:
            journal.note("no_identity", error=str(error))
            time.sleep(1.0)
    return None


def build(identity: Identity, host: Host, settings: Settings, pace: Pace, imds: Imds, journal: Journal) -> Agent:
    """Return the agent with its clients of AWS."""
    aws = clients(identity.region)
    table = OrdersTable(aws.dynamodb, settings.orders_table)
    reporter = Reporter(aws.sqs, settings.report_queue_url, journal)
    tools = Tools(
        settings=settings,
        pace=pace,
        interface=identity.interface,
        instance_type=identity.instance_type,
        gpus=identity.gpus,
        efas=identity.efa_devices,
        bucket=Bucket(aws.s3, settings.bucket),
        journal=journal,
        say=speaker(identity, reporter),
        secrets=SecretStores(identity.region),
        host=host,
        kernel=KernelLog(),
        gpu_figures=open_gpus(),
        clock_offset_s=lambda: table.clock_offset_s,
    )
    agent: Agent
    orders = OrdersPoller(
        table, identity.job, journal, interval_s=lambda: agent.orders_interval_s(), gpus=identity.gpus
    )
    notices = NoticePoller(imds, journal, interval_s=pace.metadata_s)
    heartbeat = Heartbeat(aws.sfn, table, identity.job, journal, interval_s=pace.heartbeat_s)
    warnings = WarningPoller(imds, journal, interval_s=pace.warnings_s)
    agent = Agent(
        identity,
        tools,
        orders=orders,
        notices=notices,
        warnings=warnings,
        heartbeat=heartbeat,
        reporter=reporter,
        logs=TailShipper(tools.bucket, journal),
        follower=Follower(logs_client(identity.region), settings.log_group, journal) if settings.log_group else None,
    )
    return agent


def main() -> int:
    """Return the exit code; no process of the node's ranks is left."""
    stop = Stop()
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    settings, pace = Settings.from_environment(os.environ), Pace()
    journal = Journal(settings.root / "events.jsonl")
    guard = Guard(settings.root)
    try:
        imds = Imds(os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", DEFAULT_ENDPOINT))
        found = boot(imds, journal, stop)
        if found is None:
            return 0
        identity, host = found
        journal.note("booted", instance=identity.instance, job=identity.job, zone=identity.zone, ip=identity.ip)
        journal.note("host", driver=host.driver, efa=host.efa_provider, gpus=[str(gpu) for gpu in host.gpus])
        stop.agent = build(identity, host, settings, pace, imds, journal)
        if stop.asked:
            return 0
        return stop.agent.run()
    finally:
        guard.close()


if __name__ == "__main__":
    sys.exit(main())
