"""The four step functions of the run machine, answering from a script instead of thinking.

A play lies in `<folder>/<job>.json`: for each of launch_fleet, ready, training, checkpoint, release_fleet and
close_attempt a list of words, one a call, the last one for every further call. Each call is a line in
`<folder>/<job>.calls`.

    raises    the function fails
    at_once   the token is settled before the function returns
    any other word is the outcome of a step, and what the driver of the play does with a token (see interpreters.py)
"""

import json
import os
import time
from pathlib import Path

SECONDS = {"ready_wait_s": 60, "run_s": 60, "heartbeat_s": 50, "checkpoint_wait_s": 60}


class StepFailed(Exception):
    """What the script calls raises."""


def answer(function, event, folder, stepfunctions):
    """What the function returns for the event; `stepfunctions` makes the client that settles a token at once."""
    play = json.loads((folder / f"{event['job']}.json").read_text())
    role = event.get("wait", function)
    words = play["words"].get(role, ["ended"])
    word = words[min(sum(call["role"] == role for call in read_calls(folder, event["job"])), len(words) - 1)]
    call = {"function": function, "role": role, "word": word, "event": event, "at": time.time()}
    with (folder / f"{event['job']}.calls").open("a") as log:
        log.write(json.dumps(call) + "\n")
    if word == "raises":
        raise StepFailed(f"{role} fails as its script says")
    if word == "at_once":
        stepfunctions().send_task_success(taskToken=event["token"], output=json.dumps({"outcome": "ended"}))
    if "token" in event:
        return None
    return {"outcome": word, "ready_wait_s": (SECONDS | play["seconds"])["ready_wait_s"]}


def read_calls(folder, job):
    """The calls of the job so far, oldest first."""
    path = folder / f"{job}.calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def handler(event, context):
    """The same as a real function: its name in SCRIPTED_FUNCTION, the plays in SCRIPTED_FOLDER."""

    def stepfunctions():
        import boto3

        return boto3.client("stepfunctions")

    return answer(os.environ["SCRIPTED_FUNCTION"], event, Path(os.environ["SCRIPTED_FOLDER"]), stepfunctions)
