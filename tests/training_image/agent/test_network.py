"""What the first collective showed: the network that carried it, in the words of several NCCL releases."""

import pytest

from agent.network import provider_in, silent_peers
from job_contract.node_files import NetworkCheck, write_message
from job_contract.orders import Leader, Roster, RosterNode

OLD = "ip-10-0-1-10:99:99 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)\n"
NEW = "ip-10-0-1-10:99:99 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 16 nics)\n"
PLUGIN = "ip-10-0-1-10:99:99 [0] NCCL INFO Using network AWS Libfabric\n"
SOCKET = """ip-10-0-1-10:99:99 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
ip-10-0-1-10:99:99 [0] NCCL INFO NET/Socket : Using [0]ens32:10.0.1.10<0>
ip-10-0-1-10:99:99 [0] NCCL INFO Using network Socket
"""
TCP_PROVIDER = "x NCCL INFO NET/OFI Selected Provider is tcp;ofi_rxm (found 1 nics)\n"


@pytest.mark.parametrize(
    ("log", "provider"),
    [
        (OLD, "efa"),
        (NEW, "efa"),
        (PLUGIN, "efa"),
        (SOCKET, "tcp"),
        (SOCKET.upper(), "tcp"),
        (TCP_PROVIDER + PLUGIN, "tcp;ofi_rxm"),
        ("x NCCL INFO Using network IB\n", "ib"),
        ("", ""),
    ],
)
def test_the_network_is_read_from_the_log_of_nccl_whatever_its_release(log, provider):
    assert provider_in(log) == provider


def test_each_node_of_a_gang_tells_once_what_carried_the_first_collective(start_node, play):
    node = start_node()
    node.orders.value = play.seen("run", 3, nodes=2)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    write_message(
        node.run_dir / "network.json", NetworkCheck(backend="gloo", world_size=2, seconds=0.2, bandwidth_gbps=9.0)
    )
    told = node.wait_for("network_checked")
    node.wait_for("progress")
    assert (told.provider, told.seconds, told.bandwidth_gbps) == ("gloo", 0.2, None)
    assert len(node.heard("network_checked")) == 1


def test_with_nccl_the_bandwidth_counts_and_the_provider_comes_from_its_log(start_node, play):
    node = start_node()
    node.orders.value = play.seen("run", 3, nodes=2)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    (node.run_dir / "logs/nccl.host.1").write_text(NEW)
    write_message(
        node.run_dir / "network.json", NetworkCheck(backend="nccl", world_size=16, seconds=4.0, bandwidth_gbps=2400.0)
    )
    told = node.wait_for("network_checked")
    assert (told.provider, told.bandwidth_gbps) == ("efa", 2400.0)


def test_a_node_alone_has_no_network_to_check(start_node, play):
    node = start_node()
    node.orders.value = play.seen("run", 3)
    play.until(lambda: (node.run_dir / "progress.json").exists(), node)
    write_message(
        node.run_dir / "network.json", NetworkCheck(backend="gloo", world_size=8, seconds=0.2, bandwidth_gbps=9.0)
    )
    for _ in range(3):
        node.wait_for("progress")
    assert node.heard("network_checked") == []


GANG = Roster(
    job="j",
    attempt=1,
    roster_id="r",
    nodes=tuple(RosterNode(node_rank=n, instance=f"i-{n}", ip=f"10.0.1.1{n}") for n in range(4)),
    leader=Leader(ip="10.0.1.10", port=29500),
)


@pytest.mark.parametrize(
    ("log", "peers"),
    [
        ("connect [10.0.1.12]:4911: No route to host", ("i-2",)),
        ("client socket has timed out after 60000ms while trying to connect to (10.0.1.10, 29500).", ("i-0",)),
        ("at 10.0.1.11, which is this node, and 10.0.1.130", ()),
    ],
)
def test_the_other_end_of_a_broken_way_is_named_by_its_address(log, peers):
    assert silent_peers(log, GANG, node_rank=1) == peers


def test_ranks_that_reach_nobody_are_a_failure_of_the_network(start_node, play):
    node = start_node()
    node.orders.value = play.seen("run", 3, nodes=2, behaviour="exit:75")
    failed = node.wait_for("failed")
    assert (failed.failure, "no way to a node that it does not name" in failed.reason) == ("network", True)
