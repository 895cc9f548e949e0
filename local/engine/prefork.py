"""Function environments are forked from one warm process that has imported what every function imports.

A cold start costs 50 ms instead of 400, and the environments share their pages. What reads its environment on import
(aws_xray_sdk) is not imported ahead. Where a start file of the interpreter must run (a sitecustomize for crash tests),
environments are started plainly.
"""

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from local.processes import Forker, die_with, send_signal

_MESSAGE_BYTES = 1 << 18
_REAP_S = 1.0
_FAREWELL = -1


class Environments:
    """The engine's side: asks the warm process for one environment at a time."""

    def __init__(self, forker: Forker) -> None:
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forker.popen([sys.executable, "-m", "local.engine.prefork", str(other.fileno())], pass_fds=[other.fileno()])
        other.close()

    def start(self, *, environment: dict[str, str], cwd: str) -> "Environment":
        """A process that runs the awslambdaric in `cwd` with this environment; its output is in `stdout`."""
        reading, writing = os.pipe()
        order = json.dumps({"environment": environment, "cwd": cwd}).encode()
        try:
            with self._lock:
                socket.send_fds(self._socket, [order], [writing])
                answer, descriptors, _, _ = socket.recv_fds(self._socket, 64, 1)
        finally:
            os.close(writing)
        if not descriptors:
            os.close(reading)
            raise OSError(f"no environment: {answer.decode() or 'the warm process is gone, see engine.log'}")
        return Environment(int(answer), descriptors[0], reading)


class Environment:
    """As much of subprocess.Popen as a ministack worker uses. The exit code of another's child is not known: -1."""

    def __init__(self, pid: int, pidfd: int, output: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        # The worker's log pump closes it.
        self.stdout = open(output, "rb")  # noqa: SIM115
        self._pidfd = pidfd
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if self._look(timeout) is None:
            raise subprocess.TimeoutExpired("awslambdaric", timeout)
        return _FAREWELL

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            send_signal(self.pid, number)

    def _look(self, timeout: float | None) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._pidfd], [], [], timeout)[0]:
                os.close(self._pidfd)
                self.returncode = _FAREWELL
            return self.returncode


def serve(channel: socket.socket) -> None:
    """Forks an environment for each order, until the engine is gone."""
    _import_ahead()
    gc.collect()
    gc.freeze()
    while True:
        if not select.select([channel], [], [], _REAP_S)[0]:
            _reap()
            continue
        order, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 1)
        if not order:
            return
        [output] = descriptors
        pid, here = os.fork(), os.getpid()
        if pid == 0:
            _become(json.loads(order), output, channel)
        assert here == os.getpid()
        pidfd = os.pidfd_open(pid)  # not reaped yet, so the number is still its own
        socket.send_fds(channel, [str(pid).encode()], [pidfd])
        os.close(pidfd)
        os.close(output)
        _reap()


def _import_ahead() -> None:
    import aws_lambda_powertools.logging
    import aws_lambda_powertools.metrics
    import aws_lambda_powertools.utilities.batch
    import awslambdaric.lambda_runtime_marshaller
    import boto3
    import pydantic

    assert not {"aws_xray_sdk", "runtime_client"} & set(sys.modules)
    boto3.session.Session()
    del aws_lambda_powertools, awslambdaric, pydantic


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _become(order: dict, output: int, channel: socket.socket) -> None:
    """This process is the environment: it never returns."""
    status = 1
    try:
        channel.close()
        _take_place(order, output)
        from awslambdaric.__main__ import main

        main(["awslambdaric", os.environ["_HANDLER"]])
        status = 0
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else 1
    except BaseException:  # noqa: BLE001
        # The loop of the warm process is on this stack, and nothing may reach it.
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        os._exit(status)


def _take_place(order: dict, output: int) -> None:
    os.setsid()
    die_with(os.getppid())
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)
    repository = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    os.chdir(order["cwd"])
    folders = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = folders + [entry for entry in sys.path if entry and entry not in repository]
    for name in [name for name in sys.modules if name.partition(".")[0] == "local"]:
        if name != "local.processes":
            del sys.modules[name]


if __name__ == "__main__":
    os.chdir(Path("/"))
    serve(socket.socket(fileno=int(sys.argv[1])))
