"""Keep an embedded cloud running behind the terminal, and say how to use it. `make down` ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from local.cloud import Cloud
from local.stack import REPOSITORY, SCHEDULE_FACTOR, deploy

FOLDER = REPOSITORY / "out" / "up"
READY = FOLDER / "ready.json"
START_S = 60.0


def running() -> dict[str, Any] | None:
    """Return what the running cloud wrote of itself, None when none is running."""
    try:
        ready: dict[str, Any] = json.loads(READY.read_text())
        command = Path(f"/proc/{ready['pid']}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return ready if b"local.up" in command else None


def serve() -> None:
    """Run until told to stop; `ready.json` says where."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        with Cloud(FOLDER / "cloud", schedule_factor=SCHEDULE_FACTOR) as cloud:
            outputs = deploy(cloud).outputs
            ready = {"pid": os.getpid(), "environment": cloud.environment(), "outputs": outputs}
            READY.write_text(json.dumps(ready, indent=1))
            while True:
                signal.pause()
    except KeyboardInterrupt:
        READY.unlink(missing_ok=True)


def start() -> dict[str, Any]:
    """A cloud is running; returns what it wrote of itself. Raises RuntimeError with the end of its log."""
    known = running()
    if known is not None:
        return known
    FOLDER.mkdir(parents=True, exist_ok=True)
    READY.unlink(missing_ok=True)
    log = FOLDER / "up.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "local.up", "--serve"],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at and server.poll() is None:
        ready = running()
        if ready is not None:
            return ready
        time.sleep(0.1)
    server.terminate()
    raise RuntimeError(f"the embedded cloud did not start:\n{log.read_text()[-2000:]}")


def main() -> int:
    if "--serve" in sys.argv[1:]:
        serve()
        return 0
    ready = start()
    settings = " ".join(f"{name}={value}" for name, value in ready["environment"].items())
    queue = ready["outputs"]["RequestQueueUrl"]
    print(f"""The embedded cloud runs at {ready["environment"]["AWS_ENDPOINT_URL"]}; `make down` ends it.

    export {settings}

Drop a request with the AWS CLI, or with ours:

    aws sqs send-message --queue-url {queue} --message-body file://events/job-request.json
    .venv/bin/holdfast submit events/job-request.json
    .venv/bin/holdfast list
    .venv/bin/holdfast watch JOB

The result comes to the queue {ready["outputs"]["ResultQueueUrl"]}; logs are in {FOLDER / "cloud"}.""")
    return 0


if __name__ == "__main__":
    sys.exit(main())
