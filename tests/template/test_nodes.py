"""What every node has in common."""

import json
import os
import re
import shutil
import subprocess
import sys

import deployed
import pytest

DATA = deployed.resources("AWS::EC2::LaunchTemplate")["BaseLaunchTemplate"]["LaunchTemplateData"]
USER_DATA = DATA["UserData"]["Fn::Base64"]["Fn::Sub"]


def test_metadata_want_a_token_are_reachable_from_a_container_and_show_tags():
    assert DATA["MetadataOptions"] == {
        "HttpEndpoint": "enabled",
        "HttpTokens": "required",
        "HttpPutResponseHopLimit": 2,
        "InstanceMetadataTags": "enabled",
    }


def test_a_node_that_shuts_down_is_gone_with_its_encrypted_disk():
    assert DATA["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert all(
        disk["Ebs"]["Encrypted"] and disk["Ebs"]["DeleteOnTermination"] and disk["Ebs"]["VolumeType"] == "gp3"
        for disk in DATA["BlockDeviceMappings"]
    )


def test_type_subnet_and_market_are_left_to_the_purchase():
    assert not {"InstanceType", "NetworkInterfaces", "InstanceMarketOptions", "KeyName"} & DATA.keys()


def test_the_image_is_named_by_a_parameter():
    assert DATA["ImageId"] == {"Fn::Sub": "resolve:ssm:${AmiParameter}"}


def test_the_agent_gets_its_five_variables():
    lines = USER_DATA.splitlines()
    first, last = lines.index("# holdfast-environment"), lines.index("# end-holdfast-environment")
    assert dict(line.split("=", 1) for line in lines[first + 1 : last]) == {
        "HOLDFAST_STACK": "${AWS::StackName}",
        "HOLDFAST_ORDERS_TABLE": "${OrdersTable}",
        "HOLDFAST_REPORT_QUEUE_URL": "${NodeReportQueue}",
        "HOLDFAST_BUCKET": "${CheckpointBucket}",
        "HOLDFAST_IMAGE": "${ImageUri}",
    }


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_user_data_is_a_script_that_bash_can_read():
    assert USER_DATA.startswith("#!/bin/bash\n")
    script = USER_DATA.replace("${!", "${")
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""


ATTACKS = [
    "x; touch PWNED #", "$(touch PWNED)", "`touch PWNED`", "x' ; touch PWNED ; '", 'x" ; touch PWNED', "x\ntouch PWNED",
    "${IFS}", "*",
]  # fmt: skip
RECORDER = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
with open(os.path.join({folder!r}, "calls"), "a") as log:
    log.write(json.dumps([name, *sys.argv[1:]]) + "\\n")
if name == "curl":
    sys.stdout.write({image!r} if sys.argv[-1].endswith("holdfast:image") else "i-0aaaaaaaaaaaaaaa1")
"""
REPLACED = ("curl", "docker", "aws", "sleep", "nvidia-smi", "touch")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("image", ATTACKS)
def test_o25_what_stands_in_the_image_tag_reaches_docker_as_one_word(tmp_path, image):
    """The door lets only an image's name through; were it not so, the boot script would still run nothing of it."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in REPLACED:
        recorder = RECORDER.format(python=sys.executable, folder=str(tmp_path), image=image)
        (commands / name).write_text(recorder)
        (commands / name).chmod(0o755)
    script = USER_DATA.replace("/etc/holdfast", str(tmp_path / "etc")).replace("/var/lib/holdfast", str(tmp_path / "v"))
    script = re.sub(r"\$\{(?!!)[A-Za-z:]+\}", "given", script).replace("${!", "${")
    path = f"{commands}:{os.environ['PATH']}"
    run = subprocess.run(["bash"], input=script, text=True, capture_output=True, cwd=tmp_path, env={"PATH": path})
    assert (run.returncode, run.stderr) == (0, "")
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert ["docker", "pull", image] in calls
    assert [call[-1] for call in calls if call[:2] == ["docker", "run"]] == [image]
    assert not [call for call in calls if call[0] == "touch"]
    assert not list(tmp_path.rglob("PWNED"))


def test_user_data_fit():
    assert len(USER_DATA) < 16_384  # bytes, EC2's limit before encoding


def test_nodes_are_open_to_each_other_and_to_nobody_else():
    group = deployed.resources("AWS::EC2::SecurityGroup")["NodeSecurityGroup"]
    assert "SecurityGroupIngress" not in group
    assert [(rule["FromPort"], rule["ToPort"]) for rule in group["SecurityGroupEgress"]] == [(443, 443)]
    itself = {"Fn::GetAtt": ["NodeSecurityGroup", "GroupId"]}
    [way_in] = deployed.resources("AWS::EC2::SecurityGroupIngress").values()
    [way_out] = deployed.resources("AWS::EC2::SecurityGroupEgress").values()
    assert (way_in["GroupId"], way_in["SourceSecurityGroupId"], way_in["IpProtocol"]) == (itself, itself, "-1")
    assert (way_out["GroupId"], way_out["DestinationSecurityGroupId"], way_out["IpProtocol"]) == (itself, itself, "-1")
