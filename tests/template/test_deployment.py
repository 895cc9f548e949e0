"""The template deploys: linters, sources, environment, layers, outputs."""

import re
from dataclasses import fields

import cfnlint.api
import deployed
import pytest

from holdfast.runtime.settings import Settings

FUNCTIONS = deployed.resources("AWS::Lambda::Function")
PIN = re.compile(r"^([a-zA-Z0-9_.-]+)==(\S+)", re.MULTILINE)


def test_cfn_lint_finds_nothing():
    assert [str(match) for match in cfnlint.api.lint_file(deployed.TEMPLATE, {"regions": ["us-east-1"]})] == []


def test_every_door_is_a_function_and_every_function_a_door():
    files = {path.stem for path in (deployed.ROOT / "functions").glob("*.py")}
    handlers = {function["Handler"].removesuffix(".handler") for function in FUNCTIONS.values()}
    assert handlers == set(deployed.DOORS) == files


@pytest.mark.parametrize("door", deployed.DOORS)
def test_a_function_is_named_after_its_file(door):
    assert FUNCTIONS[deployed.function_of(door)]["Handler"] == f"{door}.handler"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_runs_what_is_tested_and_says_what_it_does(function):
    properties = FUNCTIONS[function]
    assert properties["Runtime"] == "python3.13"
    assert properties["Architectures"] == ["arm64"]
    assert properties["TracingConfig"] == {"Mode": "Active"}
    assert len(properties["Layers"]) == 2
    assert properties["Timeout"] <= 900
    assert properties["Description"]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_is_given_every_setting_that_it_reads_and_no_other(function):
    variables = set(FUNCTIONS[function]["Environment"]["Variables"])
    assert {name for name in variables if name.startswith("HOLDFAST_")} == {
        f"HOLDFAST_{field.name.upper()}" for field in fields(Settings)
    }


def test_layers_are_laid_out_so_that_sam_puts_their_packages_under_python():
    for name, folder in (("DependenciesLayer", "dependencies"), ("HoldfastLayer", "holdfast")):
        layer = deployed.written()["Resources"][name]
        assert layer["Metadata"]["BuildMethod"] == "python3.13"
        assert layer["Properties"]["ContentUri"] == f"layers/{folder}"
        assert not (deployed.ROOT / "layers" / folder / "python").exists()


def test_the_layer_has_the_versions_that_the_tests_run_with_and_every_one_is_hashed():
    text = (deployed.ROOT / "layers" / "dependencies" / "requirements.txt").read_text()
    layer = dict(PIN.findall(text))
    tested = dict(PIN.findall((deployed.ROOT / "requirements.txt").read_text()))
    assert {name: layer[name] for name in layer if name in tested} == {
        name: tested[name] for name in layer if name in tested
    }
    assert {"aws-lambda-powertools", "aws-xray-sdk", "boto3", "pydantic"} <= layer.keys() & tested.keys()
    blocks = re.split(r"^(?=[a-zA-Z])", text, flags=re.MULTILINE)[1:]
    assert len(blocks) == len(layer)
    assert all("--hash=sha256:" in block for block in blocks)


def test_the_outputs_are_those_that_people_and_programs_read():
    assert set(deployed.written()["Outputs"]) == {
        "RequestQueueUrl",
        "ControlQueueUrl",
        "ResultQueueUrl",
        "NodeReportQueueUrl",
        "JobsTableName",
        "OrdersTableName",
        "CheckpointBucketName",
        "EventBusName",
        "StateMachineArn",
        "RequestDeadLettersUrl",
        "ControlDeadLettersUrl",
        "NodeReportDeadLettersUrl",
        "FailedCallsUrl",
        "RuleDeadLettersUrl",
        "SweepFunctionName",
        "NewsTopicArn",
        "AlarmTopicArn",
        "LaunchTemplateId",
        "SubnetIds",
    }


def test_every_log_group_forgets():
    groups = deployed.resources("AWS::Logs::LogGroup")
    assert len(groups) == 3
    assert all(group["RetentionInDays"] for group in groups.values())


def test_every_function_writes_to_the_group_whose_retention_is_set():
    assert all(function["LoggingConfig"] == {"LogGroup": {"Ref": "DoorLogs"}} for function in FUNCTIONS.values())


def test_the_name_in_the_machines_arn_is_the_machines_name():
    machine = deployed.written()["Resources"]["RunAttempt"]["Properties"]["Name"]["Fn::Sub"]
    variables = deployed.written()["Globals"]["Function"]["Environment"]["Variables"]
    assert variables["HOLDFAST_STATE_MACHINE_ARN"]["Fn::Sub"].endswith(f":stateMachine:{machine}")


def test_the_machine_logs_its_errors_but_not_its_data_which_hold_tokens():
    logging = deployed.resources("AWS::StepFunctions::StateMachine")["RunAttempt"]["LoggingConfiguration"]
    assert logging["Level"] == "ERROR"
    assert logging["IncludeExecutionData"] is False
