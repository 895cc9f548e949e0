"""A cloud of its own for each test: it leaves nothing behind, however it ends, and listens on loopback only."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from local.cloud import Cloud, CloudFailed
from local.processes import CLOUD_MARKER, marked
from tests.local.probing import HERE, eventually

pytestmark = pytest.mark.cloud
REPOSITORY = HERE.parent.parent
COMMAND = [sys.executable, "-S", str(HERE / "fake_agent.py")]
PARAMETERS = {"VpcId": "vpc-00000001", "SubnetIds": "subnet-00000001"}


def listening(pids):
    """Local addresses (hex, as in /proc/net/tcp) on which the processes listen."""
    sockets = set()
    for pid in pids:
        for link in Path("/proc", str(pid), "fd").iterdir():
            try:
                target = os.readlink(link)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(fields[1].partition(":")[0])
    return found


def buy(cloud, outputs):
    cloud.client("ec2").create_fleet(
        Type="instant",
        LaunchTemplateConfigs=[
            {
                "LaunchTemplateSpecification": {"LaunchTemplateId": outputs["NodeTemplate"], "Version": "$Latest"},
                "Overrides": [{"AvailabilityZone": "us-east-1a"}],
            }
        ],
        TargetCapacitySpecification={"TotalTargetCapacity": 2, "DefaultTargetCapacityType": "spot"},
    )


def launch(cloud):
    outputs = cloud.deploy(HERE / "template.yaml", PARAMETERS)
    buy(cloud, outputs)
    cloud.client("lambda").invoke(FunctionName=outputs["Environment"], Payload=b'{"names": []}')
    eventually(lambda: len(list(cloud.root.glob("nodes/*/facts.json"))) == 2)


def test_stop_ends_everything_within_three_seconds_and_only_loopback_was_open(tmp_path):
    with Cloud(tmp_path, node_command=COMMAND) as cloud:
        launch(cloud)
        pids = cloud.processes_left()
        assert len(pids) >= 7  # engine, the warm process and one function of it, two agents, two ranks
        assert listening(pids) == {"0100007F"}
        started = time.monotonic()
    assert time.monotonic() - started < 3
    assert cloud.processes_left() == []


def test_a_killed_engine_takes_its_functions_nodes_and_ranks_with_it(tmp_path):
    with Cloud(tmp_path, node_command=COMMAND) as cloud:
        launch(cloud)
        os.kill(cloud._engine.pid, signal.SIGKILL)
        eventually(lambda: cloud.processes_left() == [], within_s=3)


def test_a_killed_harness_takes_the_cloud_with_it(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from local.cloud import Cloud\n"
        "cloud = Cloud(Path(sys.argv[1])); cloud.start(); print(cloud.id, flush=True); time.sleep(600)\n"
    )
    harness = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    cloud_id = harness.stdout.readline().strip()
    assert marked(CLOUD_MARKER, cloud_id)
    harness.kill()
    harness.wait()
    harness.stdout.close()
    eventually(lambda: marked(CLOUD_MARKER, cloud_id) == [], within_s=3)


def test_a_start_file_before_the_code_reaches_every_function(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['STARTED_BY'] = 'sitecustomize'\n")
    with Cloud(tmp_path / "state", lambda_pythonpath=str(tmp_path)) as cloud:
        outputs = cloud.deploy(HERE / "template.yaml", PARAMETERS)
        answer = cloud.client("lambda").invoke(
            FunctionName=outputs["Environment"], Payload=json.dumps({"names": ["STARTED_BY"]})
        )
        assert json.loads(answer["Payload"].read())["STARTED_BY"] == "sitecustomize"


def test_an_agent_that_cannot_start_ends_its_instance(tmp_path):
    with Cloud(tmp_path, node_command=["/no/such/agent"]) as cloud:
        outputs = cloud.deploy(HERE / "template.yaml", PARAMETERS)
        buy(cloud, outputs)
        eventually(lambda: {one["state"] for one in cloud.instances()} == {"terminated"})


def test_a_missing_private_name_stops_the_start_with_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import ministack.services.sqs as sqs\ndel sqs._get_q\n")
    cloud = Cloud(tmp_path / "state")
    start = cloud._start_engine

    def start_with_other_ministack(held):
        monkeypatch.setattr("local.cloud.REPOSITORY", f"{REPOSITORY}:{tmp_path}")
        return start(held)

    monkeypatch.setattr(cloud, "_start_engine", start_with_other_ministack)
    with pytest.raises(CloudFailed, match=r"ministack.services.sqs._get_q does not exist .* ministack==1.5.33"):
        cloud.start()
    assert cloud.processes_left() == []
