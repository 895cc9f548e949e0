"""Executions are named after job and attempt, so that a start is told apart from its repetition."""

from __future__ import annotations

import json
from collections.abc import Iterator

import boto3
import pytest
from botocore.exceptions import ClientError
from botocore.stub import Stubber

from holdfast.adapters.workflow_sfn import StepFunctions
from holdfast.domain.errors import ExecutionOver
from tests.builders import NOW

ARN = "arn:aws:states:us-east-1:123456789012:stateMachine:s-run-attempt"
EXECUTION = "arn:aws:states:us-east-1:123456789012:execution:s-run-attempt:j-0123456789-2"
ASKED = {"stateMachineArn": ARN, "name": "j-0123456789-2", "input": json.dumps({"job": "j-0123456789", "attempt": 2})}
STARTED = {"executionArn": EXECUTION, "startDate": NOW}


@pytest.fixture
def stub() -> Iterator[tuple[StepFunctions, Stubber]]:
    client = boto3.client("stepfunctions", region_name="us-east-1", aws_access_key_id="t", aws_secret_access_key="t")
    with Stubber(client) as stubber:
        yield StepFunctions(client, state_machine_arn=ARN), stubber


def described(stubber: Stubber, status: str) -> None:
    answer = {"executionArn": EXECUTION, "stateMachineArn": ARN, "status": status, "startDate": NOW}
    stubber.add_response("describe_execution", answer, {"executionArn": EXECUTION})


def test_o13_a_start_that_is_repeated_while_it_runs_is_the_same_start(stub: tuple[StepFunctions, Stubber]) -> None:
    """Step Functions answers the same name and input with the execution that runs, and refuses once it has ended."""
    workflow, stubber = stub
    for _ in range(2):
        stubber.add_response("start_execution", STARTED, ASKED)
        workflow.start("j-0123456789", 2)
    stubber.add_client_error("start_execution", "ExecutionAlreadyExists", expected_params=ASKED)
    described(stubber, "RUNNING")
    workflow.start("j-0123456789", 2)
    stubber.assert_no_pending_responses()


@pytest.mark.parametrize("status", ["SUCCEEDED", "FAILED", "TIMED_OUT", "ABORTED"])
def test_o13_a_name_that_was_used_up_is_told_and_starts_nothing_else(
    stub: tuple[StepFunctions, Stubber], status: str
) -> None:
    workflow, stubber = stub
    stubber.add_client_error("start_execution", "ExecutionAlreadyExists", expected_params=ASKED)
    described(stubber, status)
    with pytest.raises(ExecutionOver, match=f"j-0123456789-2 has ended: {status}"):
        workflow.start("j-0123456789", 2)


def test_any_other_refusal_of_a_start_is_raised(stub: tuple[StepFunctions, Stubber]) -> None:
    workflow, stubber = stub
    stubber.add_client_error("start_execution", "ThrottlingException")
    with pytest.raises(ClientError):
        workflow.start("j-0123456789", 2)
