"""What went wrong, told from recorded log tails, exits, Xid lines and EC2's reasons."""

from __future__ import annotations

import pytest

from holdfast.domain.classify import RULES, STATE_REASONS, Ended, classify, refined
from holdfast.domain.failure import CLASSES
from job_contract.xids import PROGRAM_XIDS, REPLACE_XIDS
from tests.builders import ROOT

TAILS = ROOT / "events" / "tails"

EXPECTED = {
    "oom-cuda": ("out_of_memory", "torch.OutOfMemoryError"),
    "oom-cuda-while-peers-time-out": ("out_of_memory", "GPU 2 has a total capacity"),
    "oom-cublas": ("out_of_memory", "CUBLAS_STATUS_ALLOC_FAILED"),
    "oom-host-cgroup": ("out_of_memory", "oom-kill:"),
    "oom-host-dataloader-shm": ("out_of_memory", "insufficient shared memory"),
    "oom-host-allocator": ("out_of_memory", "DefaultCPUAllocator"),
    "hang-watchdog-allreduce": ("hang", "SeqNum=1580"),
    "hang-heartbeat-monitor": ("hang", "Heartbeat monitor timed out"),
    "hang-blocking-wait": ("hang", "timed out in blocking wait"),
    "network-efa-unreachable": ("network", "Unreachable remote"),
    "network-efa-no-provider": ("network", "provider efa output empty list"),
    "network-ofi-address-vector": ("network", "Unable to insert remote address"),
    "network-rendezvous-refused": ("network", "No route to host"),
    "network-port-taken": ("network", "EADDRINUSE"),
    "network-nccl-socket": ("network", "Connection timed out"),
    "peer-lost-gloo": ("peer_lost", "Connection closed by peer"),
    "peer-lost-nccl-remote": ("peer_lost", "NCCL error in"),
    "peer-lost-store": ("peer_lost", "recvValue failed"),
    "hardware-xid-79": ("hardware", "fallen off the bus"),
    "hardware-xid-48-ecc": ("hardware", "double bit error"),
    "hardware-xid-154-asks-for-a-reset": ("hardware", "GPU Reset Required"),
    "hardware-nvlink-xid-74": ("hardware", "NVLink: fatal error"),
    "hardware-ecc-without-kernel-lines": ("hardware", "uncorrectable ECC error"),
    "hardware-no-gpu": ("hardware", "No CUDA GPUs are available"),
    "hardware-fabric-manager": ("hardware", "system not yet initialized"),
    "hardware-local-disk": ("hardware", "critical medium error"),
    "diverged-nan-loss": ("diverged", "loss is nan at step 1213"),
    "diverged-anomaly": ("diverged", "LogSoftmaxBackward0"),
    "diverged-loss-scale": ("diverged", "loss scale already at minimum"),
    "user-import": ("user_error", "No module named 'flash_attn'"),
    "user-data-missing": ("user_error", "/data/corpus/v3/index.json"),
    "user-data-denied": ("user_error", "AccessDenied"),
    "user-assert-config": ("user_error", "must be a multiple of heads 33"),
    "user-label-out-of-range": ("user_error", "device-side assert"),
    "user-arguments": ("user_error", "--learning_rate"),
    "bad-checkpoint-zip": ("bad_checkpoint", "failed finding central directory"),
    "bad-checkpoint-keys": ("bad_checkpoint", "Error(s) in loading state_dict"),
    "bad-checkpoint-dcp": ("bad_checkpoint", "CheckpointException"),
    "supervisor-contract": ("supervisor", "UnknownVersion"),
    "crash-segfault": ("crash", ""),
    "crash-unknown": ("crash", ""),
    "crash-xid-of-the-program": ("crash", ""),
}


def tail(name: str) -> str:
    return (TAILS / f"{name}.txt").read_text()


def test_every_recorded_tail_has_an_expected_class() -> None:
    assert {path.stem for path in TAILS.glob("*.txt")} == set(EXPECTED)
    assert len(EXPECTED) >= 30


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recorded_tail_is_classified_with_the_line_that_says_so(name: str) -> None:
    failure, words = EXPECTED[name]
    verdict = classify(Ended(log=tail(name), reason="rank 0 ended with exit code 1", exit_code=1))
    assert verdict.failure == failure
    assert words in verdict.line
    assert (verdict.line == "") == (failure == "crash")


def test_every_class_that_can_come_out_has_a_budget() -> None:
    known = {rule.failure for rule in RULES} | {failure for failure, _ in STATE_REASONS.values()}
    assert known <= set(CLASSES)


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("Server.SpotInstanceTermination", "preemption"),
        ("Server.InsufficientInstanceCapacity", "capacity"),
        ("Server.InternalError", "hardware"),
        ("Client.InternalError", "supervisor"),
        ("Client.UserInitiatedShutdown", "crash"),
        ("", "crash"),
    ],
)
def test_ec2s_reason_is_believed_where_it_tells_a_cause(code: str, failure: str) -> None:
    assert classify(Ended(state_reason=code, log=tail("crash-unknown"))).failure == failure


def test_a_reclaimed_machine_is_no_fault_of_what_its_log_says_last() -> None:
    ended = Ended(state_reason="Server.SpotInstanceTermination", log=tail("hang-watchdog-allreduce"))
    assert classify(ended).failure == "preemption"


@pytest.mark.parametrize("number", sorted(REPLACE_XIDS))
def test_a_broken_gpu_is_hardware_whatever_the_program_says(number: int) -> None:
    log = f"NVRM: Xid (PCI:0000:53:00): {number}, pid=1, name=python3, text\n" + tail("oom-cuda")
    verdict = classify(Ended(log=log))
    assert verdict.failure == "hardware"
    assert f"Xid {number}" in verdict.reason


@pytest.mark.parametrize("number", sorted(PROGRAM_XIDS | {63, 92, 121, 154, 162}))
def test_an_xid_of_the_program_or_for_information_leaves_the_word_to_the_log(number: int) -> None:
    line = f"NVRM: Xid (PCI:0000:53:00): {number}, pid=1, name=python3, text\n"
    assert classify(Ended(log=line + tail("user-import"))).failure == "user_error"
    assert classify(Ended(log=line)).failure == "crash"


@pytest.mark.parametrize(
    ("code", "words"), [(-9, "SIGKILL"), (137, "SIGKILL"), (-11, "SIGSEGV"), (139, "SIGSEGV"), (-6, "SIGABRT")]
)
def test_a_signal_without_a_line_is_a_crash_that_names_it(code: int, words: str) -> None:
    verdict = classify(Ended(exit_code=code, reason="rank 1 ended"))
    assert verdict.failure == "crash"
    assert words in verdict.reason


def test_a_kill_is_out_of_memory_only_when_the_kernel_says_so() -> None:
    assert classify(Ended(exit_code=-9)).failure == "crash"
    assert classify(Ended(exit_code=-9, log=tail("oom-host-cgroup"))).failure == "out_of_memory"


def test_the_class_of_the_node_is_refined_only_where_it_knew_none() -> None:
    told = Ended(failure="peer_lost", reason="rank 1 ended with exit code 73", log=tail("oom-cuda"))
    assert refined(told).failure == "peer_lost"
    crashed = Ended(failure="crash", reason="rank 3 ended with exit code 1", log=tail("oom-cuda"), exit_code=1)
    verdict = refined(crashed)
    assert verdict.failure == "out_of_memory"
    assert verdict.text.startswith("rank 3 ended with exit code 1; a GPU ran out of memory: [rank3]: torch.OutOf")


def test_an_agent_that_failed_itself_is_a_fault_of_the_supervisor() -> None:
    ended = Ended(failure="crash", reason="the agent itself failed 20 times in a row; see its journal")
    assert refined(ended).failure == "supervisor"


def test_a_reason_stays_short_however_long_the_line() -> None:
    assert len(classify(Ended(log="torch.OutOfMemoryError: " + "x" * 10_000)).text) < 400
