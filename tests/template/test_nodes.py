"""What every node has in common."""

import shutil
import subprocess

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


def test_the_agent_gets_its_six_variables():
    lines = USER_DATA.splitlines()
    first, last = lines.index("# holdfast-environment"), lines.index("# end-holdfast-environment")
    assert dict(line.split("=", 1) for line in lines[first + 1 : last]) == {
        "HOLDFAST_STACK": "${AWS::StackName}",
        "HOLDFAST_ORDERS_TABLE": "${OrdersTable}",
        "HOLDFAST_REPORT_QUEUE_URL": "${NodeReportQueue}",
        "HOLDFAST_BUCKET": "${CheckpointBucket}",
        "HOLDFAST_LOG_GROUP": "${NodeLogs}",
        "HOLDFAST_IMAGE": "${ImageUri}",
    }


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_user_data_is_a_script_that_bash_can_read():
    assert USER_DATA.startswith("#!/bin/bash\n")
    script = USER_DATA.replace("${!", "${")
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""


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
