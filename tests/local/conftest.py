"""One cloud for all behaviour checks, with the small template deployed and time shortened."""

import sys
import time

import pytest

from local.cloud import Cloud
from tests.local.probing import HERE, Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory):
    root = tmp_path_factory.mktemp("cloud")
    command = [sys.executable, "-S", str(HERE / "fake_agent.py")]
    pace = {"schedule_factor": 0.02, "alarm_period_factor": 0.05, "async_retry_s": 0.1}
    with Cloud(root, node_command=command, boot_delay_s=0.1, stop_grace_s=1.0, **pace) as cloud:
        started = time.monotonic()
        outputs = cloud.deploy(HERE / "template.yaml", {"VpcId": cloud.vpc_id, "SubnetIds": cloud.subnet_ids})
        yield Stack(cloud, outputs, time.monotonic() - started)
