"""Two repairs are seen to work before the product leans on them: a timeout from a path fires, a stop stays a stop.

They run in an account of their own (a 12-digit access key selects it), beside whatever is deployed meanwhile.
"""

import json
import time
import uuid

ACCOUNT = "999999999999"
_LIMIT_S = 8.0


class SelfCheckFailed(RuntimeError):
    """A repair has no effect; the message names it."""


def run(client) -> None:
    """Both claims hold. `client(service, access_key=...)` gives boto3 clients. Raises SelfCheckFailed."""
    sqs, sfn = client("sqs", access_key=ACCOUNT), client("stepfunctions", access_key=ACCOUNT)
    queue = sqs.create_queue(QueueName="self-check")["QueueUrl"]
    machine = sfn.create_state_machine(
        name="self-check",
        roleArn=f"arn:aws:iam::{ACCOUNT}:role/self-check",
        definition=json.dumps(_waiting(queue)),
    )["stateMachineArn"]

    def started(seconds: int) -> str:
        name, wait = uuid.uuid4().hex, json.dumps({"seconds": seconds})
        return sfn.start_execution(stateMachineArn=machine, name=name, input=wait)["executionArn"]

    timed = started(1)
    # Long enough to be stopped in time on a busy machine.
    stopped = started(20)
    sfn.stop_execution(executionArn=stopped, error="Stopped", cause="self-check")
    _expect(sfn, timed, "FAILED", "TimeoutSecondsPath of 1 s did not fire")
    _expect(sfn, stopped, "ABORTED", "a stopped execution did not stay ABORTED")


def _waiting(queue: str) -> dict:
    message = {"QueueUrl": queue, "MessageBody": {"token.$": "$$.Task.Token"}}
    step = {
        "Type": "Task",
        "Resource": "arn:aws:states:::sqs:sendMessage.waitForTaskToken",
        "Parameters": message,
        "TimeoutSecondsPath": "$.seconds",
        "End": True,
    }
    return {"StartAt": "Wait", "States": {"Wait": step}}


def _expect(sfn, execution: str, status: str, otherwise: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while (seen := sfn.describe_execution(executionArn=execution)["status"]) != status:
        if time.monotonic() > deadline:
            raise SelfCheckFailed(f"{otherwise}: it is {seen} after {_LIMIT_S:g} s")
        time.sleep(0.05)
