"""Two interpreters for the shipped machine with scripted functions: moto in this process, and the embedded cloud."""

import importlib.util
import io
import json
import time
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import boto3
from botocore.exceptions import ClientError

HERE = Path(__file__).resolve().parent
MACHINE = HERE.parent.parent / "statemachines" / "run_attempt.asl.json"
FUNCTIONS = ("launch_fleet", "leave_token", "release_fleet", "close_attempt")
REGION = "us-east-1"
NEWS_S = 0.25
"""News comes this long after the token was left: moto forgets an answer that comes before the function returned."""

_spec = importlib.util.spec_from_file_location("scripted_steps", HERE / "scripted_steps.py")
scripted = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(scripted)


@dataclass(frozen=True)
class Play:
    """What each function says, call by call; the seconds that differ from the calm ones; how long nodes beat.

    Words that the driver understands, beside an outcome, which it sends as news: silent (nothing), beating (heartbeats
    for `beats_s`, then the outcome "ended"), late (the token of the wait before is settled first).
    """

    words: dict[str, list[str]]
    seconds: dict[str, int] = field(default_factory=dict)
    beats_s: float = 60


@dataclass
class Run:
    """One execution: the states it entered, the calls its functions got, what the driver did with its tokens."""

    arn: str
    play: Play
    status: str = "RUNNING"
    states: list[str] = field(default_factory=list)
    calls: list[dict] = field(default_factory=list)
    settled: dict[str, str] = field(default_factory=dict)
    late_answer: str = ""

    def of(self, role: str) -> list[dict]:
        return [call for call in self.calls if call["role"] == role]

    def events(self, role: str) -> list[dict]:
        return [call["event"] for call in self.of(role)]


def substitution(function: str) -> str:
    """launch_fleet -> LaunchFleetArn."""
    return "".join(part.capitalize() for part in function.split("_")) + "Arn"


def paced(machine: str) -> str:
    """The same machine, its retries a second apart at most: the curve itself is read off the file by another test."""
    definition = json.loads(machine)
    for state in definition["States"].values():
        for retrier in state.get("Retry", []):
            if retrier.get("MaxAttempts") != 0:
                retrier |= {"IntervalSeconds": 1, "BackoffRate": 1.0, "MaxDelaySeconds": 2}
    return json.dumps(definition)


def run_all(
    client, folder: Path, machine_arn: str, plays: dict[str, Play], *, within_s: float = 40.0
) -> dict[str, Run]:
    """Every play as an execution of its own, side by side, until all have ended."""
    stepfunctions = client("stepfunctions")
    runs: dict[str, Run] = {}
    waiting = dict(plays)
    deadline = time.monotonic() + within_s
    while waiting or any(run.status == "RUNNING" for run in runs.values()):
        for job in list(waiting)[:2]:
            runs[job] = _start(stepfunctions, folder, machine_arn, job, waiting.pop(job))
        for job, run in runs.items():
            if run.status == "RUNNING":
                _drive(stepfunctions, folder, job, run)
        left = sorted({*waiting, *(job for job, run in runs.items() if run.status == "RUNNING")})
        assert time.monotonic() < deadline, f"still running: {', '.join(left)}"
        time.sleep(0.05)
    for run in runs.values():
        run.states = _states(stepfunctions, run.arn)
    return runs


def _start(stepfunctions, folder: Path, machine_arn: str, job: str, play: Play) -> Run:
    (folder / f"{job}.json").write_text(json.dumps({"words": play.words, "seconds": play.seconds}))
    answer = stepfunctions.start_execution(
        stateMachineArn=machine_arn, name=f"{job}-1", input=json.dumps({"job": job, "attempt": 1})
    )
    return Run(arn=answer["executionArn"], play=play)


def _drive(stepfunctions, folder: Path, job: str, run: Run) -> None:
    """What nodes and news do to the newest token, once."""
    run.status = stepfunctions.describe_execution(executionArn=run.arn)["status"]
    run.calls = scripted.read_calls(folder, job)
    tokens = [call for call in run.calls if "token" in call["event"]]
    if not tokens or tokens[-1]["event"]["token"] in run.settled:
        return
    call, age_s = tokens[-1], time.time() - tokens[-1]["at"]
    word, token = call["word"], call["event"]["token"]
    if age_s < NEWS_S or word in ("silent", "raises", "at_once"):
        return
    if word == "beating" and age_s < run.play.beats_s:
        _told(stepfunctions.send_task_heartbeat, taskToken=token)
        return
    if word == "late":
        run.late_answer = _settle(stepfunctions, tokens[-2]["event"]["token"], {"outcome": "interrupted"})
    outcome = "ended" if word in ("beating", "late") else word
    run.settled[token] = _settle(stepfunctions, token, {"outcome": outcome, **(scripted.SECONDS | run.play.seconds)})


def _settle(stepfunctions, token: str, outcome: dict) -> str:
    return _told(stepfunctions.send_task_success, taskToken=token, output=json.dumps(outcome))


def _told(call, **arguments) -> str:
    """ "accepted", or the code with which the token was refused."""
    try:
        call(**arguments)
    except ClientError as error:
        return error.response["Error"]["Code"]
    return "accepted"


def _states(stepfunctions, execution: str) -> list[str]:
    pages = stepfunctions.get_paginator("get_execution_history").paginate(executionArn=execution)
    return [
        event["stateEnteredEventDetails"]["name"]
        for page in pages
        for event in page["events"]
        if event["type"].endswith("StateEntered")
    ]


def _machine(client, functions: dict[str, str], role: str) -> str:
    definition = paced(MACHINE.read_text())
    for function, arn in functions.items():
        definition = definition.replace("${" + substitution(function) + "}", arn)
    answer = client("stepfunctions").create_state_machine(name="scripted", definition=definition, roleArn=role)
    return answer["stateMachineArn"]


def _scripted_machine(client, folder: Path) -> str:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as code:
        code.write(HERE / "scripted_steps.py", "scripted_steps.py")
    role = client("iam").create_role(RoleName="scripted", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    functions = {
        function: client("lambda").create_function(
            FunctionName=function,
            Runtime="python3.13",
            Role=role,
            Handler="scripted_steps.handler",
            Timeout=30,
            Code={"ZipFile": archive.getvalue()},
            Environment={"Variables": {"SCRIPTED_FUNCTION": function, "SCRIPTED_FOLDER": str(folder)}},
        )["FunctionArn"]
        for function in FUNCTIONS
    }
    return _machine(client, functions, role)


@contextmanager
def moto_machine(folder: Path, monkeypatch):
    """A client factory and the machine's ARN, in moto's interpreter; a function runs in the thread of its execution."""
    from moto import mock_aws
    from moto.awslambda.models import LambdaFunction

    def client(service: str):
        return boto3.client(
            service,
            region_name=REGION,
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def invoke(function, event=None):
        payload = json.loads(event) if isinstance(event, str | bytes) else event
        try:
            said = scripted.answer(function.function_name, payload, folder, lambda: client("stepfunctions"))
        except scripted.StepFailed as error:
            return json.dumps({"errorType": "StepFailed", "errorMessage": str(error)}), True, ""
        return json.dumps(said), False, ""

    monkeypatch.setattr(LambdaFunction, "_invoke_lambda", invoke)
    with mock_aws(config={"stepfunctions": {"execute_state_machine": True}}):
        yield client, _scripted_machine(client, folder)


@contextmanager
def cloud_machine(folder: Path, root: Path):
    """A client factory and the machine's ARN, in the embedded cloud; a function is a process of its own."""
    from local.cloud import Cloud

    with Cloud(root) as cloud:
        yield cloud.client, _scripted_machine(cloud.client, folder)
