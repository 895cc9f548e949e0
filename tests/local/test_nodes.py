"""Instances as local processes: launched, warned, lost and ended, with the events of EC2."""

import json
import time
from datetime import datetime
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from botocore.exceptions import ClientError

from holdfast.adapters.fleets_ec2 import Ec2Fleets
from local.processes import marked
from tests.local.probing import eventually

pytestmark = pytest.mark.cloud


def running(stack, instance_id):
    """The facts that the node's agent wrote."""
    path = stack.cloud.root / "nodes" / instance_id / "facts.json"
    return eventually(lambda: path.exists() and json.loads(path.read_text()))


def seconds(moment):
    return datetime.fromisoformat(moment).timestamp()


def processes(instance_id):
    return marked("HOLDFAST_NODE", instance_id)


def states(stack, instance_id):
    lines = stack.cloud.journal("events")
    return [one["state"] for one in lines if one["kind"] == "state" and one["instance"] == instance_id]


def delivered(stack, detail_type, instance_id):
    return [one for one in stack.notes(detail_type) if one["detail"]["instance-id"] == instance_id]


def fetch(endpoint, path, token=None, method="GET", **headers):
    """(status, text) of one metadata request."""
    named = {"X-aws-ec2-metadata-token": token} if token else {}
    try:
        with urlopen(Request(f"{endpoint}latest/{path}", headers=named | headers, method=method)) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def token_of(endpoint):
    header = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    return fetch(endpoint, "api/token", method="PUT", **header)[1]


def test_a_launched_node_runs_with_the_environment_of_its_template_and_its_own_metadata(stack):
    answer = stack.launch(job="j-1", stack="s")
    [instance_id] = answer["Instances"][0]["InstanceIds"]
    facts = running(stack, instance_id)
    assert facts["stack"] == "holdfast"
    imds, token = facts["imds"], token_of(facts["imds"])
    assert fetch(imds, "meta-data/instance-id")[0] == 401
    assert fetch(imds, "meta-data/instance-id", token) == (200, instance_id)
    assert fetch(imds, "meta-data/instance-life-cycle", token) == (200, "spot")
    assert fetch(imds, "meta-data/placement/availability-zone", token) == (200, "us-east-1a")
    assert fetch(imds, "meta-data/tags/instance/holdfast:job", token) == (200, "j-1")
    assert fetch(imds, "meta-data/tags/instance/Name", token) == (200, "probe")
    assert fetch(imds, "meta-data/spot/instance-action", token)[0] == 404
    assert fetch(imds, "meta-data/events/maintenance/scheduled", token) == (200, "[]")
    identity = json.loads(fetch(imds, "dynamic/instance-identity/document", token)[1])
    assert identity["instanceId"] == instance_id
    filters = {"tag:holdfast:job": "j-1", "instance-state-name": "running"}
    described = stack.client("ec2").describe_instances(
        Filters=[{"Name": name, "Values": [value]} for name, value in filters.items()]
    )["Reservations"]
    assert [one["InstanceId"] for part in described for one in part["Instances"]] == [instance_id]
    assert described[0]["Instances"][0]["InstanceLifecycle"] == "spot"
    stack.client("ec2").terminate_instances(InstanceIds=[instance_id])


def test_terminate_ends_agent_and_ranks_and_publishes_both_states(stack):
    [instance_id] = stack.launch(market="on-demand")["Instances"][0]["InstanceIds"]
    running(stack, instance_id)
    assert len(processes(instance_id)) == 2
    stack.client("ec2").terminate_instances(InstanceIds=[instance_id])
    eventually(lambda: states(stack, instance_id)[-1] == "terminated")
    assert processes(instance_id) == []
    assert states(stack, instance_id) == ["pending", "running", "shutting-down", "terminated"]
    detail_type = "EC2 Instance State-change Notification"
    eventually(lambda: len(delivered(stack, detail_type, instance_id)) == 4)
    [shown] = stack.client("ec2").describe_instances(InstanceIds=[instance_id])["Reservations"][0]["Instances"]
    assert shown["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    assert "InstanceLifecycle" not in shown


def test_an_interrupted_node_is_warned_by_metadata_and_event_and_then_killed(stack):
    [instance_id] = stack.launch()["Instances"][0]["InstanceIds"]
    imds = running(stack, instance_id)["imds"]
    published_at = stack.cloud.interrupt(instance_id, notice_s=1.0)
    action = json.loads(fetch(imds, "meta-data/spot/instance-action", token_of(imds))[1])
    assert action["action"] == "terminate"
    [warning] = eventually(lambda: delivered(stack, "EC2 Spot Instance Interruption Warning", instance_id))
    assert warning["detail"] == {"instance-id": instance_id, "instance-action": "terminate"}
    assert seconds(warning["time"]) + 120 == pytest.approx(seconds(action["time"]), abs=1.5)
    assert warning["resources"] == [f"arn:aws:ec2:us-east-1:000000000000:instance/{instance_id}"]
    eventually(lambda: states(stack, instance_id)[-1] == "terminated")
    assert processes(instance_id) == []
    ends = [one["at"] for one in stack.cloud.journal("events") if one.get("instance") == instance_id]
    assert ends[-1] - published_at >= 1.0
    [shown] = stack.client("ec2").describe_instances(InstanceIds=[instance_id])["Reservations"][0]["Instances"]
    assert shown["StateReason"]["Code"] == "Server.SpotInstanceTermination"


def test_a_planted_event_and_a_failing_check_show_in_the_status_that_the_sweep_reads(stack):
    [instance_id] = stack.launch()["Instances"][0]["InstanceIds"]
    running(stack, instance_id)
    starts_at = float(int(time.time()) + 86_400)
    fleets = Ec2Fleets(stack.client("ec2"), stack="s", launch_template_id="", subnet_ids=[])
    assert instance_id not in {one.instance for one in fleets.troubled()}
    stack.cloud.schedule_event(instance_id, "system-reboot", starts_at, description="[Completed] reboot")
    stack.cloud.schedule_event(instance_id, "instance-retirement", starts_at)
    stack.cloud.impair(instance_id, starts_at - 90_000)
    [trouble] = [one for one in fleets.troubled() if one.instance == instance_id]
    assert [(one.code, one.starts_at) for one in trouble.events] == [("instance-retirement", starts_at)]
    assert trouble.impaired_since == starts_at - 90_000
    stack.client("ec2").terminate_instances(InstanceIds=[instance_id])


def test_a_killed_node_is_gone_without_notice_and_muted_changes_stay_off_the_bus(stack):
    [instance_id] = stack.launch()["Instances"][0]["InstanceIds"]
    running(stack, instance_id)
    eventually(lambda: len(delivered(stack, "EC2 Instance State-change Notification", instance_id)) == 2)
    stack.cloud.mute(state_changes=True)
    stack.cloud.kill_node(instance_id)
    eventually(lambda: states(stack, instance_id)[-1] == "terminated")
    stack.cloud.mute()
    assert states(stack, instance_id)[-1] == "terminated"
    assert len(delivered(stack, "EC2 Instance State-change Notification", instance_id)) == 2


def test_a_node_that_dies_unseen_is_shown_running_until_it_is_terminated(stack):
    [instance_id] = stack.launch()["Instances"][0]["InstanceIds"]
    running(stack, instance_id)
    stack.cloud.kill_node(instance_id, seen=False)
    assert processes(instance_id) == []
    [other] = stack.launch()["Instances"][0]["InstanceIds"]
    running(stack, other)  # the keeper has looked at both meanwhile
    assert stack.state(instance_id) == "running"
    stack.client("ec2").terminate_instances(InstanceIds=[instance_id, other])
    eventually(lambda: stack.state(instance_id) == "terminated")


def test_the_next_machine_of_a_type_may_tell_other_things_of_itself(stack):
    stack.cloud.next_launch("c5.large", zone="us-east-1f")
    odd, plain = (stack.launch()["Instances"][0]["InstanceIds"][0] for _ in range(2))
    zones = []
    for one in (odd, plain):
        imds = running(stack, one)["imds"]
        zones.append(fetch(imds, "meta-data/placement/availability-zone", token_of(imds))[1])
    assert zones == ["us-east-1f", "us-east-1a"]
    stack.client("ec2").terminate_instances(InstanceIds=[odd, plain])
    eventually(lambda: {stack.state(odd), stack.state(plain)} == {"terminated"})


def test_an_agent_that_exits_takes_its_machine_with_it(stack):
    leave = stack.cloud.root / "nodes" / "leave"
    leave.touch()
    [instance_id] = stack.launch()["Instances"][0]["InstanceIds"]
    eventually(lambda: stack.state(instance_id) == "terminated")
    leave.unlink()
    assert processes(instance_id) == []
    [shown] = stack.client("ec2").describe_instances(InstanceIds=[instance_id])["Reservations"][0]["Instances"]
    assert shown["StateReason"]["Code"] == "Client.InstanceInitiatedShutdown"


def test_a_cold_pool_is_an_answer_with_errors_and_no_machine(stack):
    stack.cloud.set_capacity("c5.large", "us-east-1a", "spot", slots=1)
    answer = stack.launch(2)
    stack.cloud.set_capacity("c5.large", "us-east-1a", "spot", slots=None)
    assert answer["Instances"] == []
    [error] = answer["Errors"]
    assert error["ErrorCode"] == "InsufficientInstanceCapacity"
    assert error["LaunchTemplateAndOverrides"]["Overrides"]["InstanceType"] == "c5.large"


def test_the_same_client_token_buys_once_and_other_parameters_are_refused(stack):
    first, second = (stack.launch(1, token="once", job="j-2") for _ in range(2))
    assert first["FleetId"] == second["FleetId"]
    assert first["Instances"] == second["Instances"]
    with pytest.raises(ClientError, match="IdempotentParameterMismatch"):
        stack.launch(1, token="once", job="j-3")
    stack.client("ec2").terminate_instances(InstanceIds=first["Instances"][0]["InstanceIds"])


def test_one_unknown_id_and_none_is_terminated(stack):
    [instance_id] = stack.launch()["Instances"][0]["InstanceIds"]
    with pytest.raises(ClientError, match=r"InvalidInstanceID\.NotFound"):
        stack.client("ec2").terminate_instances(InstanceIds=[instance_id, "i-0ffffffffffffffff"])
    assert stack.state(instance_id) in ("pending", "running")
    stack.client("ec2").terminate_instances(InstanceIds=[instance_id])


def test_instance_types_know_their_network_cards(stack):
    ec2 = stack.client("ec2")
    [shown] = ec2.describe_instance_types(InstanceTypes=["p5.48xlarge"])["InstanceTypes"]
    assert shown["VCpuInfo"]["DefaultVCpus"] == 192
    assert shown["GpuInfo"]["Gpus"][0]["Count"] == 8
    assert shown["NetworkInfo"]["MaximumNetworkCards"] == 32
    offers = ec2.describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": ["c5.large"]}]
    )["InstanceTypeOfferings"]
    assert {one["Location"] for one in offers} == {"us-east-1a", "us-east-1b", "us-east-1c"}


def test_a_generated_template_version_keeps_user_data_and_network_cards(stack):
    ec2, template = stack.client("ec2"), stack.outputs["NodeTemplate"]
    cards = [{"DeviceIndex": 0, "NetworkCardIndex": 0, "InterfaceType": "efa"}]
    made = ec2.create_launch_template_version(
        LaunchTemplateId=template, SourceVersion="$Default", LaunchTemplateData={"NetworkInterfaces": cards}
    )["LaunchTemplateVersion"]
    [version] = ec2.describe_launch_template_versions(LaunchTemplateId=template, Versions=[str(made["VersionNumber"])])[
        "LaunchTemplateVersions"
    ]
    assert version["LaunchTemplateData"]["NetworkInterfaces"] == cards
    assert version["LaunchTemplateData"]["UserData"]
    assert version["LaunchTemplateData"]["MetadataOptions"]["HttpTokens"] == "required"


def test_a_mixed_gang_is_one_answer_with_an_element_a_market(stack):
    ec2 = stack.client("ec2")
    answer = ec2.create_fleet(
        Type="instant",
        LaunchTemplateConfigs=[
            {
                "LaunchTemplateSpecification": {
                    "LaunchTemplateId": stack.outputs["NodeTemplate"], "Version": "$Latest",
                },
                "Overrides": [{"AvailabilityZone": "us-east-1a"}],
            }
        ],
        TargetCapacitySpecification={
            "TotalTargetCapacity": 2, "OnDemandTargetCapacity": 1, "SpotTargetCapacity": 1,
            "DefaultTargetCapacityType": "spot",
        },
    )  # fmt: skip
    assert sorted((part["Lifecycle"], len(part["InstanceIds"])) for part in answer["Instances"]) == [
        ("on-demand", 1), ("spot", 1),
    ]  # fmt: skip
    ec2.terminate_instances(InstanceIds=[one for part in answer["Instances"] for one in part["InstanceIds"]])


def test_a_placement_group_lives_as_long_as_its_instances(stack):
    ec2 = stack.client("ec2")
    tags = [{"ResourceType": "placement-group", "Tags": [{"Key": "holdfast:job", "Value": "j"}]}]
    ec2.create_placement_group(GroupName="g", Strategy="cluster", TagSpecifications=tags)
    with pytest.raises(ec2.exceptions.ClientError, match="Duplicate"):
        ec2.create_placement_group(GroupName="g", Strategy="cluster")
    [instance] = ec2.create_fleet(
        Type="instant",
        LaunchTemplateConfigs=[
            {
                "LaunchTemplateSpecification": {
                    "LaunchTemplateId": stack.outputs["NodeTemplate"], "Version": "$Latest",
                },
                "Overrides": [{"AvailabilityZone": "us-east-1a", "Placement": {"GroupName": "g"}}],
            }
        ],
        TargetCapacitySpecification={"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "on-demand"},
    )["Instances"][0]["InstanceIds"]  # fmt: skip
    with pytest.raises(ec2.exceptions.ClientError, match="InUse"):
        ec2.delete_placement_group(GroupName="g")
    ec2.terminate_instances(InstanceIds=[instance])
    mine = [{"Name": "tag:holdfast:job", "Values": ["j"]}]
    assert [one["GroupName"] for one in ec2.describe_placement_groups(Filters=mine)["PlacementGroups"]] == ["g"]

    def gone():
        try:
            ec2.delete_placement_group(GroupName="g")
        except ec2.exceptions.ClientError as error:
            return error.response["Error"]["Code"] == "InvalidPlacementGroup.Unknown"
        return True

    eventually(gone)
    assert ec2.describe_placement_groups(Filters=mine)["PlacementGroups"] == []


def test_every_ec2_call_is_logged_with_its_answer(stack):
    answer = stack.launch(1, job="j-9")
    ids = answer["Instances"][0]["InstanceIds"]
    call = [one for one in stack.cloud.journal("ec2_calls") if one["operation"] == "CreateFleet"][-1]
    assert call["response"]["FleetId"] == answer["FleetId"]
    assert call["request"]["SpotOptions"]["MinTargetCapacity"] == 1
    stack.client("ec2").terminate_instances(InstanceIds=ids)
