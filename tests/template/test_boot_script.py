"""Claims about the script that a node boots with, run in a folder with recorders in place of the commands it calls."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import deployed
import pytest

ROOT = deployed.ROOT
USER_DATA = deployed.resources("AWS::EC2::LaunchTemplate")["BaseLaunchTemplate"]["LaunchTemplateData"]["UserData"]
SCRIPT = USER_DATA["Fn::Base64"]["Fn::Sub"]
IMAGE = "111122223333.dkr.ecr.eu-west-1.amazonaws.com/holdfast-training:0.1.0"
PARAMETERS = {
    "AWS::StackName": "holdfast",
    "AWS::Region": "us-east-1",
    "OrdersTable": "orders",
    "NodeReportQueue": "https://sqs/reports",
    "CheckpointBucket": "bucket",
    "NodeLogs": "/holdfast/nodes",
    "ImageUri": IMAGE,
}
RECORDED = ("curl", "aws", "docker", "mdadm", "mkfs.ext4", "mount", "mountpoint", "systemctl", "nvidia-smi", "sleep")
RECORDER = """#!/bin/bash
name=${0##*/}
printf '%s\\0' "$name" "$@" >"$SANDBOX/calls/$(date +%s%N)-$$"
case $name in
    curl) case ${!#} in
        */api/token) echo token ;;
        */instance-id) echo i-0abc ;;
        */holdfast:image) cat "$SANDBOX/tag" 2>/dev/null || exit 22 ;;
    esac ;;
    aws) echo password ;;
    mountpoint) [[ -e $SANDBOX/opt/dlami/nvme ]] ;;
    nvidia-smi) [[ -e $SANDBOX/gpu ]] && echo "GPU 0: NVIDIA H100" ;;
    docker)
        if [[ $1 == login ]]; then cat >/dev/null; fi
        [[ $1 != pull || ! -e $SANDBOX/no-registry ]]
        ;;
esac
"""
INJECTIONS = (
    "x; touch PWNED #",
    "$(touch PWNED)",
    "`touch PWNED`",
    "x' ; touch PWNED ; '",
    'x" ; touch PWNED',
    "x\ntouch PWNED",
    "${IFS}",
    "--rdzv-endpoint=evil:1",
)


@dataclass
class Sandbox:
    """A folder that stands for the node's file system. `boot` returns the calls that the script made, in turn."""

    root: Path

    def add_instance_stores(self, number: int) -> None:
        """Each disk has two names, as udev gives them."""
        names = self.root / "dev/disk/by-id"
        names.mkdir(parents=True)
        for disk in range(number):
            (self.root / f"dev/nvme{disk}n1").touch()
            for end in ("", "-ns-1"):
                link = names / f"nvme-Amazon_EC2_NVMe_Instance_Storage_AWS{disk}{end}"
                link.symlink_to(self.root / f"dev/nvme{disk}n1")

    def boot(self) -> list[list[str]]:
        for folder in ("calls", "bin", "etc/systemd/system"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        (self.root / "bin/recorder").write_text(RECORDER)
        (self.root / "bin/recorder").chmod(0o755)
        for name in RECORDED:
            (self.root / "bin" / name).symlink_to("recorder")
        done = subprocess.run(
            ["bash", "-c", rendered(self.root)],
            cwd=self.root,
            env={"PATH": f"{self.root}/bin:/usr/bin:/bin", "SANDBOX": str(self.root)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        calls = [path.read_text().split("\0")[:-1] for path in sorted((self.root / "calls").iterdir())]
        return [[word.removeprefix(str(self.root)) for word in call] for call in calls]


def rendered(root: Path) -> str:
    """The script as CloudFormation would hand it out, its file system being the folder."""
    text = re.sub(r"\$\{([A-Za-z:]+)\}", lambda name: PARAMETERS[name[1]], SCRIPT).replace("${!", "${")
    for folder in ("etc", "var/lib", "dev/disk", "dev/infiniband", "opt/dlami"):
        text = re.sub(rf"(?<![\w.])/{folder}/", f"{root}/{folder}/", text)
    return text


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def findings(linter: str, *arguments: str) -> str:
    """What the linter of this environment says."""
    program = Path(sys.executable).parent / linter
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False).stdout


def of(calls: list[list[str]], *words: str) -> list[list[str]]:
    """The calls that begin with these words."""
    return [call for call in calls if call[: len(words)] == list(words)]


def test_the_boot_script_has_no_finding_of_shellcheck(tmp_path: Path) -> None:
    # What it sources is written by itself, before its eyes.
    (tmp_path / "boot.sh").write_text(rendered(Path("/")).replace("//", "/"))
    assert findings("shellcheck", "--exclude=SC1091,SC2154", str(tmp_path / "boot.sh")) == ""


def test_the_shell_scripts_of_the_project_have_no_finding_of_shellcheck() -> None:
    scripts = [*ROOT.glob("local/*.sh"), ROOT / ".ci/run"]
    assert findings("shellcheck", "--exclude=SC1091", *map(str, scripts)) == ""


@pytest.mark.parametrize("file", sorted(ROOT.glob("training_image/Dockerfile*")), ids=lambda file: file.name)
def test_the_dockerfiles_have_no_finding_of_hadolint(file: Path) -> None:
    assert findings("hadolint", str(file)) == ""


def test_the_agent_runs_under_systemd_with_the_stacks_image_and_its_variables(sandbox: Sandbox) -> None:
    calls = sandbox.boot()
    [created] = of(calls, "docker", "create")
    assert created[-1] == IMAGE and created[created.index("--network") + 1] == "host"
    assert created[created.index("--env-file") + 1] == "/etc/holdfast/environment"
    assert "HOLDFAST_ORDERS_TABLE=orders" in (sandbox.root / "etc/holdfast/environment").read_text().splitlines()
    unit = (sandbox.root / "etc/systemd/system/holdfast-agent.service").read_text()
    assert "ExecStop=/usr/bin/docker stop" in unit and "Restart=no" in unit
    assert calls[-1] == ["systemctl", "start", "holdfast-agent.service"]


def test_the_registry_of_the_image_is_signed_in_to_in_its_own_region(sandbox: Sandbox) -> None:
    calls = sandbox.boot()
    assert of(calls, "aws") == [["aws", "ecr", "get-login-password", "--region", "eu-west-1"]]
    [login] = of(calls, "docker", "login")
    assert login[-1] == IMAGE.partition("/")[0] and "--password-stdin" in login


def test_a_jobs_own_image_takes_the_place_of_the_stacks(sandbox: Sandbox) -> None:
    (sandbox.root / "tag").write_text("quay.io/team/image:2")
    calls = sandbox.boot()
    assert [of(calls, "docker", verb)[0][-1] for verb in ("pull", "create")] == ["quay.io/team/image:2"] * 2
    assert not of(calls, "docker", "login")


def test_without_instance_store_nothing_is_formatted_or_mounted(sandbox: Sandbox) -> None:
    calls = sandbox.boot()
    assert not of(calls, "mkfs.ext4") and not of(calls, "mdadm") and not of(calls, "mount")


def test_one_instance_store_is_mounted_as_it_is(sandbox: Sandbox) -> None:
    sandbox.add_instance_stores(1)
    calls = sandbox.boot()
    assert of(calls, "mkfs.ext4") == [["mkfs.ext4", "-q", "-E", "nodiscard", "/dev/nvme0n1"]]
    assert of(calls, "mount") == [["mount", "-o", "noatime", "/dev/nvme0n1", "/var/lib/holdfast"]]
    assert not of(calls, "mdadm")


def test_several_instance_stores_become_one_volume_each_disk_once(sandbox: Sandbox) -> None:
    sandbox.add_instance_stores(3)
    calls = sandbox.boot()
    [made] = of(calls, "mdadm")
    assert made[-4:] == ["--raid-devices=3", "/dev/nvme0n1", "/dev/nvme1n1", "/dev/nvme2n1"]
    assert of(calls, "mount")[0][-2:] == ["/dev/md/holdfast", "/var/lib/holdfast"]


def test_a_volume_that_the_machine_image_has_made_is_used_and_not_formatted(sandbox: Sandbox) -> None:
    sandbox.add_instance_stores(2)
    (sandbox.root / "opt/dlami/nvme").mkdir(parents=True)
    calls = sandbox.boot()
    assert of(calls, "mount") == [["mount", "--bind", "/opt/dlami/nvme/holdfast", "/var/lib/holdfast"]]
    assert not of(calls, "mkfs.ext4")


def test_gpus_and_efa_devices_are_handed_to_the_container(sandbox: Sandbox) -> None:
    (sandbox.root / "gpu").touch()
    (sandbox.root / "dev/infiniband").mkdir(parents=True)
    (sandbox.root / "dev/infiniband/uverbs0").touch()
    [created] = of(sandbox.boot(), "docker", "create")
    assert created[created.index("--gpus") + 1] == "all"
    handed = [value for name, value in itertools.pairwise(created) if name == "--device"]
    assert handed == ["/dev/kmsg", "/dev/infiniband/uverbs0"]


def test_a_registry_that_does_not_answer_is_asked_five_times(sandbox: Sandbox) -> None:
    (sandbox.root / "no-registry").touch()
    assert len(of(sandbox.boot(), "docker", "pull")) == 5


@pytest.mark.parametrize("text", INJECTIONS)
def test_o25_whatever_the_tag_of_the_image_says_reaches_docker_as_one_argument(sandbox: Sandbox, text: str) -> None:
    (sandbox.root / "tag").write_text(text)
    [created] = of(sandbox.boot(), "docker", "create")
    assert created[-1] == text
    assert not list(sandbox.root.rglob("PWNED"))
