"""Keeps ports.Workflow on Step Functions: one execution an attempt, named `<job>-<attempt>`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import ClientError

from holdfast.adapters.aws_errors import DEAD_TOKEN, EXECUTION_EXISTS, NO_EXECUTION, code_of
from holdfast.domain.errors import ExecutionOver


class StepFunctions:
    def __init__(self, client: Any, *, state_machine_arn: str) -> None:
        self.client, self.arn = client, state_machine_arn

    def start(self, job_id: str, attempt: int) -> None:
        try:
            self.client.start_execution(
                stateMachineArn=self.arn,
                name=f"{job_id}-{attempt}",
                input=json.dumps({"job": job_id, "attempt": attempt}),
            )
        except ClientError as error:
            if code_of(error) not in EXECUTION_EXISTS:
                raise
            # A name is taken for 90 days: only a running one is the start that we asked for.
            status = self.status(job_id, attempt)
            if status != "RUNNING":
                raise ExecutionOver(f"{job_id}-{attempt} has ended: {status}") from error

    def status(self, job_id: str, attempt: int) -> str | None:
        try:
            answer = self.client.describe_execution(executionArn=self._execution(job_id, attempt))
        except ClientError as error:
            if code_of(error) in NO_EXECUTION:
                return None
            raise
        return str(answer["status"])

    def settle(self, token: str, answer: Mapping[str, Any]) -> None:
        try:
            self.client.send_task_success(taskToken=token, output=json.dumps(answer))
        except ClientError as error:
            if code_of(error) not in DEAD_TOKEN:
                raise

    def _execution(self, job_id: str, attempt: int) -> str:
        return f"{self.arn.replace(':stateMachine:', ':execution:')}:{job_id}-{attempt}"
