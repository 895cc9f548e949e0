"""Starts and ends the ranks of one attempt on this node, and says how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent import child
from agent.host import Host
from agent.hygiene import ATTEMPT_MARKER, NODE_MARKER, end_marked
from job_contract.node_files import EXIT_CODES
from job_contract.orders import Roster
from job_contract.spec import JobSpec

LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Seats:
    """Which global ranks this node runs, and what torch.distributed needs to know at their start."""

    job: str
    attempt: int
    node_rank: int
    nodes: int
    ranks_per_node: int
    leader_ip: str
    leader_port: int
    interface: str

    @classmethod
    def of(cls, spec: JobSpec, roster: Roster, node_rank: int, interface: str) -> Seats:
        return cls(
            job=roster.job,
            attempt=roster.attempt,
            node_rank=node_rank,
            nodes=len(roster.nodes),
            ranks_per_node=spec.ranks_per_node,
            leader_ip=roster.leader.ip,
            leader_port=roster.leader.port,
            interface=interface,
        )

    @property
    def ranks(self) -> range:
        first = self.node_rank * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    @property
    def marker(self) -> str:
        return f"{self.job}-{self.attempt}"


def rank_environment(
    base: Mapping[str, str],
    seats: Seats,
    rank: int,
    root: Path,
    variables: Mapping[str, str] | None = None,
    machine: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment of one rank. Nothing of AWS is in it: the trainer never talks to AWS.

    The job's own `variables` stand over the node's and over what its `machine` calls for, and under the agent's; no
    shell ever reads them.
    """
    return {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **{name: value for name, value in base.items() if not name.startswith("AWS_")},
        **(machine or {}),
        **(variables or {}),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - seats.ranks[0]),
        "WORLD_SIZE": str(seats.nodes * seats.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(seats.ranks_per_node),
        "MASTER_ADDR": seats.leader_ip,
        "MASTER_PORT": str(seats.leader_port),
        "GLOO_SOCKET_IFNAME": seats.interface,
        NODE_MARKER: str(root),
        ATTEMPT_MARKER: seats.marker,
    }


class Ranks:
    """The rank processes, each in a session of its own, each killed by the kernel when the agent dies."""

    def __init__(
        self,
        command: Sequence[str],
        seats: Seats,
        *,
        run_dir: Path,
        root: Path,
        variables: Mapping[str, str] | None = None,
        machine: Mapping[str, str] | None = None,
        host: Host | None = None,
    ) -> None:
        # The parent-death signal fires when the forking thread ends, so only the thread that lives longest may fork.
        assert threading.current_thread() is threading.main_thread()
        self._root, self._logs = root, run_dir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for rank in seats.ranks:
            environment = rank_environment(os.environ, seats, rank, root, variables, machine)
            cpus = host.cpus_of(rank - seats.ranks[0]) if host else ""
            self._processes[rank] = self._start(command, environment, rank, run_dir, cpus)

    def _start(
        self, command: Sequence[str], environment: dict[str, str], rank: int, run_dir: Path, cpus: str
    ) -> subprocess.Popen[bytes]:
        launcher = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), cpus]
        with (self._logs / f"rank-{rank}.log").open("ab") as log:
            return subprocess.Popen(
                [*launcher, *command, str(run_dir)],
                env=environment,
                cwd=run_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def codes(self) -> dict[int, int | None]:
        """Return the exit code by rank, None for a rank that runs."""
        return {rank: process.poll() for rank, process in self._processes.items()}

    def end(self, *, grace_s: float) -> None:
        """No rank runs, nor anything a rank started; each had SIGTERM and `grace_s` first."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while None in self.codes().values() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._signal(signal.SIGKILL)
        end_marked(self._root)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace_s)

    def log_tail(self, rank: int) -> str:
        """Return the last lines that the rank wrote, at most 4 kB of them."""
        try:
            raw = (self._logs / f"rank-{rank}.log").read_bytes()[-LOG_TAIL_BYTES:]
        except FileNotFoundError:
            return ""
        return "\n".join(raw.decode(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def dump_stacks(self, *, within_s: float) -> None:
        """Each rank that can has written the stacks of its threads to its log; a stopped one goes on to do so."""
        self._signal(signal.SIGUSR1)
        self._signal(signal.SIGCONT)
        time.sleep(within_s)

    def _signal(self, number: int) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)


@dataclass(frozen=True, kw_only=True)
class Crash:
    """The end of a rank that tells most about why the attempt failed here."""

    failure: str
    reason: str
    rank: int
    exit_code: int | None = None


def worst(codes: Mapping[int, int | None]) -> Crash | None:
    """Return the crash among the exits, None when all that ended did so with 0.

    A rank that lost a peer only echoes another one's end, so any other class is preferred.
    """
    crashes = [crash_of(rank, code) for rank, code in sorted(codes.items()) if code]
    return next((crash for crash in crashes if crash.failure != "peer_lost"), crashes[0] if crashes else None)


def crash_of(rank: int, code: int) -> Crash:
    """Return the class of a rank's exit code other than 0; a code that is not agreed upon, or a signal, is a crash."""
    if code < 0:
        name = signal.Signals(-code).name if -code in signal.Signals._value2member_map_ else f"signal {-code}"
        hint = " (the kernel's memory killer sends it)" if -code == signal.SIGKILL else ""
        return Crash(failure="crash", reason=f"rank {rank} was ended by {name}{hint}", rank=rank, exit_code=code)
    failure = EXIT_CODES.get(code, "crash")
    return Crash(failure=failure, reason=f"rank {rank} ended with exit code {code}", rank=rank, exit_code=code)
