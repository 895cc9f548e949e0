"""Each role may do what its part does and nothing else."""

import json
import re

import deployed
import pytest

from holdfast.application.news import PHASE_CHANGED

ROLES = deployed.resources("AWS::IAM::Role")
RECORDERS = set(deployed.DOORS) - {"publish_changes", "write_report", "retire_saves"}
WARN_POOLS = {"on_spot_interruption", "on_capacity_block_event", "on_bid_evicted", "on_node_report"}

# Actions for which AWS knows no narrower resource than "*".
UNSCOPED = {
    "ec2:DescribeInstances",
    "ec2:DescribeInstanceStatus",
    "ec2:DescribeSubnets",
    "ec2:DescribeFleets",
    "ec2:DescribeInstanceTypes",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeSpotPriceHistory",
    "ec2:DescribeLaunchTemplates",
    "ec2:DescribeLaunchTemplateVersions",
    "ec2:DescribeCapacityReservations",
    "ec2:DescribePlacementGroups",
    "ecr:GetAuthorizationToken",
    "logs:CreateLogDelivery",
    "logs:GetLogDelivery",
    "logs:UpdateLogDelivery",
    "logs:DeleteLogDelivery",
    "logs:ListLogDeliveries",
    "logs:PutResourcePolicy",
    "logs:DescribeResourcePolicies",
    "logs:DescribeLogGroups",
}

# What SAM attaches by itself: writing logs and traces, reading the event source.
OF_SAM = {
    "AWSLambdaBasicExecutionRole",
    "AWSLambdaSQSQueueExecutionRole",
    "AWSLambdaDynamoDBExecutionRole",
    "AWSXRayDaemonWriteAccess",
    "AWSXrayWriteOnlyAccess",
}

# What the product calls, by method of its client; a transaction needs the actions in it.
CALLS = {
    "get_item": "dynamodb:GetItem",
    "batch_get_item": "dynamodb:BatchGetItem",
    "put_item": "dynamodb:PutItem",
    "update_item": "dynamodb:UpdateItem",
    "delete_item": "dynamodb:DeleteItem",
    "query": "dynamodb:Query",
    "transact_write_items": "dynamodb:PutItem",
    "create_fleet": "ec2:CreateFleet",
    "terminate_instances": "ec2:TerminateInstances",
    "describe_instances": "ec2:DescribeInstances",
    "describe_instance_status": "ec2:DescribeInstanceStatus",
    "describe_subnets": "ec2:DescribeSubnets",
    "describe_instance_types": "ec2:DescribeInstanceTypes",
    "describe_instance_type_offerings": "ec2:DescribeInstanceTypeOfferings",
    "describe_spot_price_history": "ec2:DescribeSpotPriceHistory",
    "get_service_quota": "servicequotas:GetServiceQuota",
    "get_secret_value": "secretsmanager:GetSecretValue",
    "get_parameter": "ssm:GetParameter",
    "describe_launch_templates": "ec2:DescribeLaunchTemplates",
    "describe_launch_template_versions": "ec2:DescribeLaunchTemplateVersions",
    "create_launch_template": "ec2:CreateLaunchTemplate",
    "delete_launch_template": "ec2:DeleteLaunchTemplate",
    "describe_capacity_reservations": "ec2:DescribeCapacityReservations",
    "create_placement_group": "ec2:CreatePlacementGroup",
    "describe_placement_groups": "ec2:DescribePlacementGroups",
    "delete_placement_group": "ec2:DeletePlacementGroup",
    "get_console_output": "ec2:GetConsoleOutput",
    "get_object": "s3:GetObject",
    "put_object": "s3:PutObject",
    "put_events": "events:PutEvents",
    "send_message": "sqs:SendMessage",
    "start_execution": "states:StartExecution",
    "describe_execution": "states:DescribeExecution",
    "send_task_success": "states:SendTaskSuccess",
    "send_task_heartbeat": "states:SendTaskHeartbeat",
    "create_log_stream": "logs:CreateLogStream",
    "put_log_events": "logs:PutLogEvents",
    "list_objects_v2": "s3:ListBucket",
    "upload_file": "s3:PutObject",
    "delete_objects": "s3:DeleteObject",
}
SERVICES = "client|events|sqs|s3|sfn|dynamodb|ec2|quotas|secretsmanager|ssm"
METHOD = re.compile(rf'self\._?(?:{SERVICES})\.(?:get_paginator\("(\w+)"\)|(\w+)\()')


def actions(role: str) -> set[str]:
    return {action for action, _ in deployed.grants(role)}


def called(folder: str) -> set[str]:
    """Methods of AWS clients that the sources of a folder call."""
    text = "\n".join(path.read_text() for path in (deployed.ROOT / folder).rglob("*.py"))
    return {paged or direct for paged, direct in METHOD.findall(text)} - {"get_paginator"}


@pytest.mark.parametrize("role", ROLES)
def test_no_action_is_a_wildcard(role):
    assert not [action for action in actions(role) if "*" in action]


@pytest.mark.parametrize("role", ROLES)
def test_every_resource_is_named_unless_aws_knows_none(role):
    assert {action for action, resource in deployed.grants(role) if resource == '"*"'} <= UNSCOPED


@pytest.mark.parametrize("role", ROLES)
def test_policies_of_aws_are_only_those_that_sam_attaches_and_the_session_manager(role):
    arns = json.dumps(ROLES[role].get("ManagedPolicyArns", []))
    names = set(re.findall(r"/([A-Za-z]+)\"", arns))
    assert names <= OF_SAM | ({"AmazonSSMManagedInstanceCore"} if role == "NodeRole" else set())


ENDERS = {
    "launch_fleet",
    "release_fleet",
    "close_attempt",
    "on_attempt_ended",
    "sweep",
    "control_job",
    "dispatch_queue",
}


@pytest.mark.parametrize(
    ("action", "doors"),
    [
        ("ec2:CreateFleet", {"launch_fleet"}),
        ("ec2:RunInstances", {"launch_fleet"}),
        ("iam:PassRole", {"launch_fleet"}),
        ("ec2:TerminateInstances", ENDERS),
        ("states:StartExecution", {"dispatch_queue", "sweep"}),
        ("dynamodb:Query", {"dispatch_queue", "sweep", "publish_changes", "write_report", *WARN_POOLS}),
        ("dynamodb:PutItem", RECORDERS),
        ("states:SendTaskSuccess", RECORDERS - {"accept_request"}),
        ("ec2:CreateLaunchTemplate", {"launch_fleet"}),
        ("ec2:CreatePlacementGroup", {"launch_fleet"}),
        ("ec2:DeleteLaunchTemplate", {"sweep"}),
        ("ec2:DescribeInstanceStatus", {"sweep"}),
        ("ec2:DeletePlacementGroup", {"sweep"}),
        ("ec2:GetConsoleOutput", ENDERS),
        ("events:PutEvents", {"publish_changes"}),
        ("s3:PutObject", {"launch_fleet", "write_report"}),
        ("ec2:DescribeSpotPriceHistory", {"accept_request", "launch_fleet", "sweep"}),
        ("servicequotas:GetServiceQuota", {"accept_request", "launch_fleet", "sweep"}),
        ("s3:DeleteObject", {"sweep", "retire_saves"}),
        ("dynamodb:Scan", set()),
    ],
)
def test_only_these_doors_may(action, doors):
    assert deployed.doors_that_may(action) == doors


def test_no_door_deletes_from_the_jobs_table():
    resource = json.dumps({"Fn::GetAtt": ["JobsTable", "Arn"]})
    granted = {door: deployed.grants(f"{deployed.function_of(door)}Role") for door in deployed.DOORS}
    assert [door for door, may in granted.items() if ("dynamodb:DeleteItem", resource) in may] == []


def test_only_what_answers_users_sends_to_the_result_queue():
    resource = json.dumps({"Fn::GetAtt": ["ResultQueue", "Arn"]})
    may = {
        door
        for door in deployed.DOORS
        if ("sqs:SendMessage", resource) in deployed.grants(f"{deployed.function_of(door)}Role")
    }
    assert may == {"accept_request", "control_job", "publish_changes"}


def test_o09_no_function_can_put_work_back_where_it_wakes_one_of_us():
    """A circle of queue and function is cut by Lambda after 16 rounds, and its work is gone. So no door may send to a
    queue that wakes a door, where failures wait wakes nobody, and the news on the bus are none of the requests on it.
    """
    mappings = deployed.resources("AWS::Lambda::EventSourceMapping").values()
    queues = deployed.resources("AWS::SQS::Queue")
    read = {deployed.named(one["EventSourceArn"]) for one in mappings} & set(queues)
    assert read == {"RequestQueue", "ControlQueue", "NodeReportQueue"}
    for door in deployed.DOORS:
        granted = deployed.grants(f"{deployed.function_of(door)}Role")
        sendable = {resource for action, resource in granted if action == "sqs:SendMessage"}
        assert sendable <= {json.dumps({"Fn::GetAtt": [queue, "Arn"]}) for queue in set(queues) - read}
    on_our_bus = [
        rule["EventPattern"]
        for rule in deployed.resources("AWS::Events::Rule").values()
        if rule.get("EventBusName") == {"Ref": "EventBus"}
        and any(deployed.named(target["Arn"]) in read for target in rule["Targets"])
    ]
    assert len(on_our_bus) == 1
    assert all(PHASE_CHANGED not in pattern["detail-type"] for pattern in on_our_bus)


def test_what_the_supervisor_calls_is_granted_to_a_door():
    methods = called("layers/holdfast/holdfast/adapters")
    assert len(methods) >= 15
    assert {method: bool(deployed.doors_that_may(CALLS[method])) for method in methods} == dict.fromkeys(methods, True)


@pytest.mark.parametrize("action", ["dynamodb:GetItem", "dynamodb:BatchGetItem", "dynamodb:PutItem"])
def test_whoever_records_reads_and_writes_both_tables(action):
    tables = {json.dumps({"Fn::GetAtt": [table, "Arn"]}) for table in ("JobsTable", "OrdersTable")}
    for door in RECORDERS:
        granted = deployed.grants(f"{deployed.function_of(door)}Role")
        assert tables <= {resource for given, resource in granted if given == action}


def test_what_the_agent_calls_is_granted_to_the_node():
    methods = called("training_image/agent")
    assert {"get_item", "send_message", "send_task_heartbeat", "put_object"} <= methods
    assert {CALLS[method] for method in methods} <= actions("NodeRole")


def test_an_instance_is_ended_only_when_it_carries_this_stacks_tag():
    [statement] = [one for one in deployed.statements("ReleaseFleetRole") if "ec2:TerminateInstances" in one["Action"]]
    assert statement["Condition"] == {"StringEquals": {"aws:ResourceTag/holdfast:stack": {"Ref": "AWS::StackName"}}}


@pytest.mark.parametrize("kind", ["fleet", "instance", "volume", "network-interface"])
def test_nothing_is_bought_without_this_stacks_tag(kind):
    for statement in deployed.statements("LaunchFleetRole"):
        bought = f":{kind}/" in json.dumps(statement["Resource"])
        if bought and "ec2:RunInstances" in deployed.as_list(statement["Action"]):
            condition = statement["Condition"]["StringEquals"]
            assert condition == {"aws:RequestTag/holdfast:stack": {"Ref": "AWS::StackName"}}


def test_tags_are_written_only_with_what_is_made():
    [statement] = [one for one in deployed.statements("LaunchFleetRole") if one["Action"] == "ec2:CreateTags"]
    made = ["CreateFleet", "RunInstances", "CreateLaunchTemplate", "CreatePlacementGroup"]
    assert statement["Condition"] == {"StringEquals": {"ec2:CreateAction": made}}


@pytest.mark.parametrize("action", ["ec2:CreateLaunchTemplate", "ec2:CreatePlacementGroup"])
def test_nothing_is_made_without_this_stacks_tag(action):
    [statement] = [one for one in deployed.statements("LaunchFleetRole") if action in deployed.as_list(one["Action"])]
    assert statement["Condition"] == {"StringEquals": {"aws:RequestTag/holdfast:stack": {"Ref": "AWS::StackName"}}}


@pytest.mark.parametrize("action", ["ec2:DeleteLaunchTemplate", "ec2:DeletePlacementGroup"])
def test_only_what_carries_this_stacks_tag_is_given_back(action):
    [statement] = [one for one in deployed.statements("SweepRole") if action in deployed.as_list(one["Action"])]
    assert statement["Condition"] == {"StringEquals": {"aws:ResourceTag/holdfast:stack": {"Ref": "AWS::StackName"}}}


def test_the_node_role_is_passed_to_ec2_only():
    [statement] = [one for one in deployed.statements("LaunchFleetRole") if one["Action"] == "iam:PassRole"]
    assert deployed.named(statement["Resource"]) == "NodeRole"
    assert statement["Condition"] == {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}}


def test_a_node_decides_nothing_and_takes_nothing_back():
    may = actions("NodeRole")
    assert {action for action in may if action.startswith("states:")} == {"states:SendTaskHeartbeat"}
    assert {action for action in may if action.startswith("dynamodb:")} == {"dynamodb:GetItem"}
    assert not [action for action in may if "Delete" in action or action.startswith(("ec2:", "iam:", "lambda:"))]


def test_a_node_reads_orders_and_reports_but_not_elsewhere():
    granted = deployed.grants("NodeRole")
    assert {resource for action, resource in granted if action == "dynamodb:GetItem"} == {
        json.dumps({"Fn::GetAtt": ["OrdersTable", "Arn"]})
    }
    assert {resource for action, resource in granted if action == "sqs:SendMessage"} == {
        json.dumps({"Fn::GetAtt": ["NodeReportQueue", "Arn"]})
    }


def test_the_machine_calls_its_four_steps_only():
    granted = deployed.grants("RunAttemptRole")
    called_functions = {json.loads(resource)["Fn::GetAtt"][0] for action, resource in granted if "lambda" in action}
    assert called_functions == {"LaunchFleet", "LeaveToken", "ReleaseFleet", "CloseAttempt"}


def test_strangers_may_send_only_to_the_request_queue_and_the_bus():
    policies = deployed.resources("AWS::SQS::QueuePolicy")
    assert {deployed.named(queue) for policy in policies.values() for queue in policy["Queues"]} == {
        "RequestQueue",
        "RuleDeadLetters",
    }
    for policy in policies.values():
        for statement in policy["PolicyDocument"]["Statement"]:
            one = statement["Fn::If"][1] if "Fn::If" in statement else statement
            assert one["Action"] == "sqs:SendMessage"
            assert "Condition" in one or one["Principal"] == {"AWS": {"Ref": "SenderArns"}}
    bus = deployed.resources("AWS::Events::EventBusPolicy")["EventBusPolicy"]["Statement"]
    assert (bus["Action"], bus["Principal"]) == ("events:PutEvents", {"AWS": {"Ref": "SenderAccounts"}})


def test_nobody_from_outside_may_send_before_a_parameter_names_them():
    parameters = deployed.written()["Parameters"]
    assert {parameters[name]["Default"] for name in ("SenderArns", "SenderTopicArns", "SenderAccounts")} == {""}
    assert deployed.written()["Resources"]["EventBusPolicy"]["Condition"] == "HasSenderAccounts"
