"""What a machine says of itself: /proc and /sys trees as GPU nodes have them, and the clock in AWS's answers."""

import sys

import pytest

from agent.child import cpus_in
from agent.cloud import offset_of
from agent.host import Gpu, Host, disk_free_bytes, memory_free_bytes, provider_in, read_host, topology
from agent.imds import ImdsUnavailable

VERSION = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
CLOSED_VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
INFORMATION = """Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 193
GPU UUID: \t GPU-{0}
Bus Type: \t PCIe
"""
FI_INFO = """provider: efa
    fabric: efa
    domain: rdmap16s27-rdm
    version: 122.0
    type: FI_EP_RDM
    protocol: FI_PROTO_EFA
provider: efa
    fabric: efa
    domain: rdmap32s27-rdm
"""
# Two of a node's eight sides: bridge, GPU and two cards behind it, a disk, and the network card of the host.
DEVICES = {
    "pci0000:44/0000:44:00.0/0000:53:00.0": ("0x10de", "0x030200", "0", "0-47,96-143"),
    "pci0000:44/0000:44:00.0/0000:52:00.0": ("0x1d0f", "0x020000", "0", "0-47,96-143"),
    "pci0000:44/0000:44:00.0/0000:51:00.0": ("0x1d0f", "0x020000", "0", "0-47,96-143"),
    "pci0000:55/0000:55:00.0/0000:64:00.0": ("0x10de", "0x030200", "0", "0-47,96-143"),
    "pci0000:55/0000:55:00.0/0000:63:00.0": ("0x1d0f", "0x020000", "0", "0-47,96-143"),
    "pci0000:a1/0000:a1:00.0/0000:b9:00.0": ("0x10de", "0x030200", "1", "48-95,144-191"),
    "pci0000:a1/0000:a1:00.0/0000:b8:00.0": ("0x1d0f", "0x020000", "1", "48-95,144-191"),
    "pci0000:00/0000:00:1e.0": ("0x1d0f", "0x010802", "0", "0-47,96-143"),
}
CARDS = {
    "rdmap81s0": "0000:51:00.0",
    "rdmap82s0": "0000:52:00.0",
    "rdmap99s0": "0000:63:00.0",
    "rdmap184s0": "0000:b8:00.0",
}


@pytest.fixture
def tree(tmp_path):
    """The /sys of a GPU node: devices by their way from the root, with the kernel's links to them."""
    bus, cards = tmp_path / "bus/pci/devices", tmp_path / "class/infiniband"
    bus.mkdir(parents=True)
    cards.mkdir(parents=True)
    for way, values in DEVICES.items():
        folder = tmp_path / "devices" / way
        folder.mkdir(parents=True)
        for name, value in zip(("vendor", "class", "numa_node", "local_cpulist"), values, strict=True):
            (folder / name).write_text(f"{value}\n")
        (bus / folder.name).symlink_to(folder)
    for name, address in CARDS.items():
        (cards / name).mkdir()
        (cards / name / "device").symlink_to(bus / address)
    return tmp_path


def test_each_gpu_is_told_with_its_numa_node_its_cpus_and_the_cards_behind_its_bridge(tree):
    near, far = "0-47,96-143", "48-95,144-191"
    assert topology(tree) == (
        Gpu(address="0000:53:00.0", numa=0, cpus=near, cards=("rdmap81s0", "rdmap82s0")),
        Gpu(address="0000:64:00.0", numa=0, cpus=near, cards=("rdmap99s0",)),
        Gpu(address="0000:b9:00.0", numa=1, cpus=far, cards=("rdmap184s0",)),
    )
    assert str(topology(tree)[2]) == "0000:b9:00.0 numa 1 cpus 48-95,144-191 efa rdmap184s0"


def test_a_rank_is_pinned_to_the_cpus_of_its_gpu_where_there_are_several_nodes_of_memory(tree):
    host = Host(gpus=topology(tree))
    assert [host.cpus_of(rank) for rank in range(4)] == ["0-47,96-143", "0-47,96-143", "48-95,144-191", ""]
    assert Host(gpus=topology(tree)[:2]).cpus_of(0) == ""
    assert Host().cpus_of(0) == ""


def test_a_list_of_cpus_is_read_as_the_kernel_writes_it():
    assert cpus_in("0-2,5,8-9") == {0, 1, 2, 5, 8, 9}


class Documents:
    def __init__(self, **documents):
        self.documents = documents

    def read(self, path):
        return self.documents.get(path.partition("/")[2].replace("-", "_"))


@pytest.mark.parametrize(("text", "driver"), [(VERSION, "580.95.05"), (CLOSED_VERSION, "535.183.01")])
def test_a_gpu_node_tells_driver_provider_group_and_a_name_that_stays_with_its_gpus(tmp_path, text, driver):
    def proc(name, *serials):
        for number, serial in enumerate(serials):
            folder = tmp_path / name / f"driver/nvidia/gpus/0000:{number}"
            folder.mkdir(parents=True)
            (folder / "information").write_text(INFORMATION.format(serial))
        (tmp_path / name / "driver/nvidia/version").write_text(text)
        return tmp_path / name

    def read(folder):
        imds = Documents(group_name="gang-a", host_id="h-1")
        return read_host(imds, proc=folder, sys=tmp_path / "none", fi_info=lambda: provider_in(FI_INFO))

    host = read(proc("one", "aa11", "bb22"))
    assert (host.driver, host.efa_provider, host.placement_group) == (driver, "efa", "gang-a")
    assert host.name.startswith("gpu-")
    assert host.name == read(proc("same, other order", "bb22", "aa11")).name
    assert host.name != read(proc("other", "aa11", "cc33")).name


def test_a_cpu_node_tells_none_of_it(tmp_path):
    assert read_host(Documents(), proc=tmp_path, sys=tmp_path, fi_info=lambda: None) == Host()


def test_a_dedicated_host_is_told_by_its_id_where_there_is_no_gpu(tmp_path):
    assert read_host(Documents(host_id="h-0f"), proc=tmp_path, sys=tmp_path, fi_info=lambda: None).name == "h-0f"


def test_libfabric_without_efa_is_told_apart_from_no_libfabric():
    assert provider_in("fi_getinfo: -61 (No data available)\n") == ""


def test_metadata_that_does_not_answer_is_not_taken_for_none(tmp_path):
    class Silent:
        def read(self, path):
            raise ImdsUnavailable(path)

    with pytest.raises(ImdsUnavailable):
        read_host(Silent(), proc=tmp_path, sys=tmp_path, fi_info=lambda: None)


def test_room_on_this_machine_is_counted_in_bytes(tmp_path):
    assert 1 << 20 < memory_free_bytes() < sys.maxsize
    assert disk_free_bytes(tmp_path) > 1 << 20
    assert disk_free_bytes(tmp_path / "nowhere") is None
    assert memory_free_bytes(tmp_path) is None


DATED = {"ResponseMetadata": {"HTTPHeaders": {"date": "Mon, 30 Nov 2026 12:00:00 GMT"}}}
DATED_AT = 1796040000.0


@pytest.mark.parametrize(
    ("answered_after", "offset"), [(0.1, 0.0), (0.9, 0.0), (7.5, 7.0), (-6.5, -7.0)], ids=["in", "in too", "+7", "-7"]
)
def test_the_clock_is_compared_with_the_date_of_an_answer(answered_after, offset):
    answered_at = DATED_AT + answered_after
    assert offset_of(DATED, answered_at - 0.02, answered_at, 3.0) == offset


@pytest.mark.parametrize("answer", [{}, {"ResponseMetadata": {"HTTPHeaders": {"date": "soon"}}}])
def test_an_answer_without_a_date_or_a_slow_one_changes_nothing(answer):
    assert offset_of(answer, DATED_AT, DATED_AT, 3.0) == 3.0
    assert offset_of(DATED, DATED_AT, DATED_AT + 2.0, 3.0) == 3.0
