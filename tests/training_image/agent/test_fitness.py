"""Whether a node may take part in another attempt, and what it tells when it may not."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from agent.fitness import clear_shared_memory, unfit
from agent.gpus import GpuFigures, open_gpus, reader
from agent.hygiene import marked
from agent.kernel import KernelLog, message_of
from job_contract.xids import xids_in
from tests.builders import ROOT

TAILS = ROOT / "events" / "tails"
GPU = GpuFigures(
    address="00000000:53:00.0",
    utilization_percent=0,
    memory_used_bytes=600 << 20,
    memory_bytes=80 << 30,
    power_w=71.4,
    temperature_c=31,
)


def verdict(tmp_path, **found):
    facts = {"gpus": (GPU,), "kernel": (), "clock_offset_s": 0.5, "pids": (4321,), "shared_memory": tmp_path, **found}
    return unfit(root=tmp_path / "root", **facts)


def test_a_clean_node_is_fit(tmp_path):
    assert verdict(tmp_path) is None
    assert verdict(tmp_path, gpus=()) is None


def test_a_gpu_that_broke_during_the_attempt_makes_the_node_unfit(tmp_path):
    lines = (TAILS / "hardware-xid-79.txt").read_text().splitlines()
    reason = verdict(tmp_path, kernel=lines)
    assert "Xid 79 (GPU has fallen off the bus)" in reason


def test_an_error_that_the_program_caused_keeps_the_node(tmp_path):
    lines = (TAILS / "crash-xid-of-the-program.txt").read_text().splitlines()
    assert list(xids_in(lines))
    assert verdict(tmp_path, kernel=lines) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            {"gpus": (replace(GPU, memory_used_bytes=41 << 30),)},
            "GPU 00000000:53:00.0 holds 44.0 GB though no rank runs",
        ),
        ({"clock_offset_s": -7.2}, "the clock is -7 s off"),
    ],
)
def test_what_is_left_or_off_has_a_sentence(tmp_path, found, words):
    assert words in verdict(tmp_path, **found)


def test_shared_memory_of_the_ranks_is_freed_and_that_of_others_is_not(tmp_path):
    for name in ("torch_4321_77_0", "torch_4322_77_0", "psm_ab", "nccl-x1"):
        (tmp_path / name).touch()
    assert clear_shared_memory(tmp_path, (4321,)) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nccl-x1", "psm_ab", "torch_4322_77_0"]


def test_shared_memory_that_cannot_be_freed_is_named(tmp_path):
    (tmp_path / "torch_4321_77_0").mkdir()
    assert "torch_4321_77_0" in verdict(tmp_path)


LINES = [
    "NVRM: Xid (PCI:0000:53:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    "usb 1-1: new high-speed USB device",
    "oom-kill:constraint=CONSTRAINT_MEMCG,task=python3,pid=77",
]


def test_the_kernel_log_keeps_what_matters_since_the_mark_and_in_order():
    written = iter([["NVRM: Xid (PCI:0000:1b:00): 48, old"], LINES, [], ["I/O error, dev nvme1n1, sector 8"]])
    log = KernelLog(lambda: next(written))
    assert log.lines() == (LINES[0], LINES[2])
    assert log.lines() == (LINES[0], LINES[2])
    assert log.lines()[-1].startswith("I/O error")


def test_the_kernel_log_is_bounded():
    numbers = itertools.count()
    log = KernelLog(lambda: [f"NVRM: Xid (PCI:0000:53:00): 13, {next(numbers)}" for _ in range(150)])
    assert (len(log.lines()), len(log.lines())) == (150, 200)


def test_a_machine_without_a_kernel_log_to_read_tells_nothing():
    assert KernelLog(tuple).lines() == ()
    assert isinstance(KernelLog().lines(), tuple)


def test_a_record_of_the_kernel_is_read_without_its_prefix_and_its_keys():
    record = "3,1842,712345678,-;NVRM: Xid (PCI:0000:53:00): 79, pid=1\n SUBSYSTEM=pci\n DEVICE=+pci:0000:53:00.0\n"
    assert message_of(record) == "NVRM: Xid (PCI:0000:53:00): 79, pid=1"


class Nvml:
    """As much of pynvml as is called; `broken` makes each call fail as a lost GPU does."""

    NVML_TEMPERATURE_GPU = 0
    broken = False

    class NVMLError(Exception):
        pass

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self):
        if self.broken:
            raise self.NVMLError("GPU is lost")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(used=10_000_000_000, total=80_000_000_000)

    def nvmlDeviceGetPciInfo(self, device):
        return SimpleNamespace(busId=(b"00000000:64:00.0", "00000000:53:00.0")[device])

    def nvmlDeviceGetUtilizationRates(self, device):
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetPowerUsage(self, device):
        return 640_000

    def nvmlDeviceGetTemperature(self, device, sensor):
        return 55


def test_the_figures_of_gpus_are_told_in_the_order_of_the_bus_one_line_each():
    figures = reader(Nvml())()
    assert [str(gpu) for gpu in figures] == [
        "00000000:53:00.0 97 % 10.0 of 80.0 GB 640 W 55 C",
        "00000000:64:00.0 97 % 10.0 of 80.0 GB 640 W 55 C",
    ]


def test_without_driver_library_or_answer_there_are_no_figures():
    nvml = Nvml()
    read = reader(nvml)
    nvml.broken = True
    assert (read(), reader(nvml)(), open_gpus()()) == ((), (), ())


# -- the agent ---------------------------------------------------------------------------------------------------------


def running(node, play):
    node.orders.value = play.seen("run", 3)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)


def test_a_survivor_that_is_unfit_says_so_at_once_and_then_in_place_of_checking_in(start_node, play):
    node = start_node()
    running(node, play)
    node.agent.tools.kernel._read = lambda: LINES[:1]
    node.orders.value = play.seen("wait", 4)
    told = node.wait_for("unfit")
    assert (told.attempt, "Xid 79" in told.reason) == (1, True)
    ready = len(node.heard("ready"))
    node.orders.value = play.seen("wait", 5, attempt=2)
    play.until(lambda: [report for report in node.heard("unfit") if report.attempt == 2], node)
    assert len(node.heard("ready")) == ready


def test_a_survivor_that_is_fit_checks_in_again(start_node, play):
    node = start_node()
    running(node, play)
    node.orders.value = play.seen("wait", 4)
    play.until(lambda: node.agent.state == "waiting", node)
    node.orders.value = play.seen("wait", 5, attempt=2)
    play.until(lambda: [report for report in node.heard("ready") if report.attempt == 2], node)
    assert node.heard("unfit") == []


def test_an_attempt_that_the_supervisor_gave_up_has_no_ranks_and_no_report(start_node, play):
    """A peer's machine is gone: its own ranks would wait for it until a collective times out."""
    node = start_node()
    running(node, play)
    assert marked(node.root)
    node.orders.value = play.seen("wait", 4)
    node.agent.tick()
    assert (marked(node.root), node.agent.state) == ([], "waiting")
    assert (node.heard("failed"), node.heard("unfit")) == ([], [])


def test_lines_of_the_kernel_go_with_the_log_of_a_rank_that_failed(start_node, play):
    node = start_node()
    node.agent.tools.kernel._read = itertools.chain([[], LINES], itertools.repeat([])).__next__
    node.orders.value = play.seen("run", 3, behaviour="exit:1")
    failed = node.wait_for("failed")
    assert "about to fail" in failed.log_tail
    assert failed.log_tail.endswith(LINES[2])
