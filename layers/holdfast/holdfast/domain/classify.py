"""What went wrong, from what a failed attempt left behind: EC2's reason, the kernel's lines, the log, the exit.

The strongest witness speaks first: EC2 knows that it took a machine, the driver that a GPU broke, the log what the
program saw, and the exit only that it ended. Within the log the order of RULES decides, causes before echoes: a rank
that runs out of memory makes its peers time out, never the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from job_contract.xids import xids_in

LINE_CHARACTERS = 240
"""So much of the matched line goes into the reason."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """What is known of an end; everything but the class that the node gave it may be missing.

    `exit_code` is negative for a signal, as Python has it. `log` are the last lines of the rank, and of the kernel.
    """

    failure: str = "crash"
    reason: str = ""
    exit_code: int | None = None
    log: str = ""
    state_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A class of failure.py, why in one sentence, and the line that says so (empty when none does)."""

    failure: str
    reason: str
    line: str = ""

    @property
    def text(self) -> str:
        return f"{self.reason}: {self.line}" if self.line else self.reason


STATE_REASONS: Mapping[str, tuple[str, str]] = {
    "Server.SpotInstanceTermination": ("preemption", "EC2 took the spot instance back"),
    "Server.SpotInstanceShutdown": ("preemption", "EC2 shut the spot instance down"),
    "Server.InsufficientInstanceCapacity": ("capacity", "EC2 had no capacity for the instance after all"),
    "Client.VolumeLimitExceeded": (
        "capacity",
        "the account's volume limit was reached, so the instance could not start",
    ),
    "Server.InternalError": ("hardware", "the instance was ended by an error inside EC2"),
    "Server.ScheduledStop": ("hardware", "the instance was stopped by a scheduled retirement"),
    "Client.InternalError": ("supervisor", "the instance could not start: its volume's key or image is not usable"),
    "Client.InvalidSnapshot.NotFound": ("supervisor", "the instance could not start: the image's snapshot is missing"),
}
"""EC2's StateReason codes that tell a cause; a shutdown by a user or from inside tells none."""


@dataclass(frozen=True)
class Rule:
    failure: str
    reason: str
    pattern: re.Pattern[str]


def _rule(failure: str, reason: str, *patterns: str) -> Rule:
    return Rule(failure, reason, re.compile("|".join(patterns)))


RULES = (
    _rule(
        "supervisor",
        "the agent failed, not the job",
        r"the agent itself failed",
        r"agent_pid .* is not the parent",
        r"ContractError|UnknownVersion",
        r"FileNotFoundError: .*'/var/lib/holdfast/",
    ),
    _rule(
        "out_of_memory",
        "a GPU ran out of memory",
        r"torch\.(?:cuda\.)?OutOfMemoryError",
        r"CUDA out of memory",
        r"CUDA error: out of memory",
        r"CUBLAS_STATUS_ALLOC_FAILED",
        r"Failed to CUDA calloc",
    ),
    _rule(
        "out_of_memory",
        "the host ran out of memory",
        r"oom-kill:",
        r"Out of memory: Killed process",
        r"[Mm]emory cgroup out of memory",
        r"DefaultCPUAllocator: can't allocate memory",
        r"Cannot allocate memory",
        r"^MemoryError\b",
        r"(?:Bus error|bus error).*shared memory",
        r"unable to (?:open|mmap|allocate) (?:shared memory|.*shm)",
        r"No space left on device.*/dev/shm",
    ),
    _rule(
        "hardware",
        "a GPU is broken",
        r"uncorrectable (?:NVLink|ECC) error",
        r"CUDA error: (?:unknown error|hardware|the launch timed out)",
        r"CUDA_ERROR_(?:ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|SYSTEM_NOT_READY)",
        r"system not yet initialized",
        r"fallen off the bus",
        r"[Uu]nable to determine the device handle for GPU",
        r"CUDA-capable device\(s\) is/are busy or unavailable",
        r"No CUDA GPUs are available",
        r"nvidia-smi has failed",
    ),
    _rule(
        "hardware",
        "a local disk is broken",
        r"I/O error, dev (?:nvme|sd)",
        r"\[Errno 5\] Input/output error",
        r"\[Errno 30\] Read-only file system",
        r"blk_update_request: critical medium error",
    ),
    _rule(
        "bad_checkpoint",
        "the checkpoint cannot be read",
        r"PytorchStreamReader failed",
        r"failed finding central directory",
        r"CheckpointException",
        r"Error\(s\) in loading state_dict",
        r"Missing key\(s\) in state_dict",
        r"safetensors.*(?:HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer)",
        r"UnpicklingError",
        r"sha256 of .* differs",
        r"no save could be restored",
    ),
    _rule(
        "diverged",
        "training diverged",
        r"[Ll]oss (?:is|became|was) (?:nan|inf|not finite|NaN)",
        r"[Nn]on-?finite (?:loss|gradient)",
        r"Function '\w+' returned nan values",
        r"[Gg]radient(?:s| norm)? (?:is|are|became|overflow)\b.*(?:nan|inf|NaN|Inf)",
        r"[Cc]urrent loss scale already at minimum",
        r"FloatingPointError: .*(?:nan|infinity)",
    ),
    _rule(
        "user_error",
        "the program cannot be imported",
        r"^(?:E\s+)?(?:ModuleNotFoundError|ImportError): ",
        r"^(?:Syntax|Indentation)Error: ",
        r"can't open file .*: \[Errno 2\]",
        r"exec format error",
        r"executable file not found in \$PATH",
        r"the ranks could not be started: \[Errno (?:2|8|13)\]",
    ),
    _rule(
        "user_error",
        "the data cannot be read",
        r"FileNotFoundError: ",
        r"NotADirectoryError: ",
        r"PermissionError: ",
        r"\(NoSuchKey\)|\(NoSuchBucket\)|\(AccessDenied\)|\(403\).*Forbidden",
        r"UnicodeDecodeError: ",
        r"json\.decoder\.JSONDecodeError: ",
        r"pyarrow\.lib\.ArrowInvalid: ",
        r"GatedRepoError|RepositoryNotFoundError",
    ),
    _rule(
        "user_error",
        "the program does not fit its own settings",
        r"^AssertionError(?::|$)",
        r"device-side assert triggered",
        r"^NameError: ",
        r"^TypeError: .*unexpected keyword argument",
        r"mat1 and mat2 shapes cannot be multiplied",
        r"The size of tensor a \(\d+\) must match",
        r"unrecognized arguments: ",
        r"ValidationError: \d+ validation error",
        r"index out of range in self",
        r"invalid device ordinal",
    ),
    _rule(
        "network",
        "the network of the node failed",
        r"efa.*(?:Unreachable remote|unresponsive remote|Invalid address|Remote peer|RNR|No route)",
        r"NCCL WARN NET/(?:OFI|IB|AWS Libfabric).*(?:error|failed|[Uu]nable|Couldn't|Could not)",
        r"NCCL WARN.*NET/Socket.*(?:timed out|refused|failed)",
        r"provider efa output empty list",
        r"ncclSystemError",
        r"(?:socketStartConnect|Call to connect|socket connection).*(?:No route to host|timed out|refused|failed)",
        r"No route to host|Network is unreachable",
        r"client socket has (?:failed|timed out).*connect",
        r"c10d.*(?:Name or service not known|hostname of the client socket cannot be retrieved)",
        r"IBV_WC_(?:RETRY_EXC_ERR|RNR_RETRY_EXC_ERR)|Got completion .*with (?:status|error) 12",
        r"EADDRINUSE|Address already in use",
    ),
    _rule(
        "hang",
        "a collective did not end in time",
        r"[Ww]atchdog caught collective operation timeout",
        r"timed out in blocking wait",
        r"collective operation timeout",
        r"Heartbeat monitor timed out",
        r"Timeout at NCCL work",
        r"monitoredBarrier.*(?:timed out|timeout)",
        r"no progress for \d+ s",
    ),
    _rule(
        "peer_lost",
        "another rank was gone first",
        r"Connection closed by peer",
        r"Connection reset by peer",
        r"Broken pipe",
        r"Socket Timeout",
        r"Application timeout caused pair closure",
        r"ncclRemoteError",
        r"NCCL communicator was aborted",
        r"DistBackendError",
        r"DistNetworkError",
        r"recvValue failed|failed to recv, got 0 bytes",
    ),
)

SIGNALS: Mapping[int, tuple[str, str]] = {
    -7: ("crash", "SIGBUS: shared memory is full, or a mapped file is gone"),
    -9: ("crash", "SIGKILL, by the kernel's memory killer or by hand; no line says by which"),
    -11: ("crash", "SIGSEGV: a native library crashed"),
    -6: ("crash", "SIGABRT: a native library gave up"),
    -4: ("user_error", "SIGILL: the program was built for another processor"),
}


def classify(ended: Ended) -> Verdict:
    """Return the class of an end. What nothing is known of is a crash."""
    return (
        _by_state_reason(ended.state_reason)
        or _by_xid(ended.log)
        or _by_text(f"{ended.log}\n{ended.reason}")
        or _by_exit(ended.exit_code)
        or Verdict(failure=ended.failure, reason=ended.reason or "ended without a word")
    )


def refined(ended: Ended) -> Verdict:
    """Return the node's own class, or a better one where the node knew no more than that its ranks crashed."""
    if ended.failure != "crash":
        return Verdict(failure=ended.failure, reason=ended.reason)
    verdict = classify(ended)
    if not ended.reason or ended.reason in verdict.text:
        return verdict
    return Verdict(failure=verdict.failure, reason=f"{ended.reason}; {verdict.reason}", line=verdict.line)


def _by_state_reason(code: str) -> Verdict | None:
    known = STATE_REASONS.get(code)
    return Verdict(failure=known[0], reason=known[1], line=code) if known else None


def _by_xid(log: str) -> Verdict | None:
    broken = next((found for found in xids_in(log.splitlines()) if found.replace), None)
    if broken is None:
        return None
    reason = f"a GPU is broken, Xid {broken.number} ({broken.replace})"
    return Verdict(failure="hardware", reason=reason, line=_cut(broken.line))


def _by_text(text: str) -> Verdict | None:
    lines = text.splitlines()
    for rule in RULES:
        for line in lines:
            if rule.pattern.search(_bare(line)):
                return Verdict(failure=rule.failure, reason=rule.reason, line=_cut(line))
    return None


PREFIX = re.compile(r"^(?:\[rank\s*\d+\]:\s*|\[default\d+\]:\s*)")


def _bare(line: str) -> str:
    """Return the line without the rank that torch puts before it."""
    return PREFIX.sub("", line.strip())


def _by_exit(code: int | None) -> Verdict | None:
    if code is None:
        return None
    # A shell between the agent and the program turns signal n into exit code 128 + n.
    known = SIGNALS.get(128 - code if code > 128 else code)
    return Verdict(failure=known[0], reason=known[1]) if known else None


def _cut(line: str) -> str:
    line = line.strip()
    return line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]}..."
