"""The environment that a machine's type calls for, each variable with its reason. The job's own variables win over it.

Today's NCCL and aws-ofi-nccl choose protocol, topology and tuning by themselves; what is set by hand only defeats them.
Sources: AWS's EFA cheatsheet, aws-ofi-nccl's platform-aws.cpp, torch 2.13's ProcessGroupNCCL.hpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Settings = Mapping[str, tuple[str, str]]
"""By variable: value, and why."""

OBSOLETE: Mapping[str, str] = {
    "FI_EFA_USE_DEVICE_RDMA": "the default since libfabric 1.18; wrong on g5",
    "FI_EFA_FORK_SAFE": "libfabric is fork-safe by itself",
    "RDMAV_FORK_SAFE": "harmful: it registers memory page by page",
    "FI_EFA_ENABLE_SHM_TRANSFER": "NCCL does not use libfabric inside a node",
    "FI_EFA_SET_CUDA_SYNC_MEMOPS": "handled since EFA installer 1.29.1",
    "NCCL_PROTO": "the plugin chooses by type",
    "NCCL_ALGO": "the plugin's tuner chooses by size",
    "NCCL_BUFFSIZE": "the plugin sets it by type",
    "NCCL_MIN_CHANNELS": "the plugin sets it by type",
    "NCCL_LAUNCH_MODE": "with one rank a process NCCL does the same",
    "NCCL_TIMEOUT": "no variable of NCCL's; the timeout is the process group's",
    "NCCL_ASYNC_ERROR_HANDLING": "renamed with the prefix TORCH_, whose default is right",
    "NCCL_BLOCKING_WAIT": "renamed, and it turns the watchdog off",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "renamed TORCH_FR_BUFFER_SIZE",
    "PYTORCH_CUDA_ALLOC_CONF": "renamed PYTORCH_ALLOC_CONF",
}
"""Variables that samples still set, and why none of them is set here."""

COPY_BY_DRIVER = ("g5", "g6")
TRAINIUM = ("trn1", "trn1n", "trn2", "trn2u")
CORES = {"trn1": 32, "trn1n": 32, "trn2": 128, "trn2u": 128}
"""NeuronCores a node, two a chip of Trainium and eight a chip of Trainium2."""


def environment_for(
    instance_type: str, *, gpus: int, efas: int, nodes: int, interface: str, logs: Path, leader: str, node_rank: int
) -> Settings:
    """Return what the ranks of one node are to have. `leader` is address:port of the first node."""
    family = instance_type.partition(".")[0]
    if family in TRAINIUM:
        return _trainium(family, efas=efas, nodes=nodes, leader=leader, node_rank=node_rank)
    found: dict[str, tuple[str, str]] = {
        "GLOO_SOCKET_IFNAME": (interface, "gloo must bind to the address that the roster names"),
    }
    if not gpus:
        return found
    found |= {
        "CUDA_DEVICE_ORDER": ("PCI_BUS_ID", "local rank n is the n-th GPU of the map that the node reports"),
        "NCCL_SOCKET_IFNAME": (f"={interface}", "NCCL's bootstrap must use the address that the roster names"),
        "NCCL_DEBUG": ("INFO", "the log says which network NCCL chose"),
        "NCCL_DEBUG_SUBSYS": ("INIT,NET", "no more of it than that"),
        "NCCL_DEBUG_FILE": (f"{logs}/nccl.%h.%p", "apart from the rank's own log"),
        "PYTORCH_ALLOC_CONF": ("expandable_segments:True", "less memory is lost between blocks"),
        "TORCH_FR_BUFFER_SIZE": ("2000", "the flight recorder keeps the last collectives"),
        "TORCH_FR_DUMP_TEMP_FILE": (f"{logs}/flight-", "and writes them beside the rank's log"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": ("1", "when a collective times out"),
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": (
            "120",
            "a stuck watchdog ends the rank before a notice is over, not in 8 min",
        ),
    }
    if efas and nodes > 1:
        found["FI_PROVIDER"] = ("efa", "without EFA the ranks fail at once, instead of talking over TCP")
    if family in COPY_BY_DRIVER:
        found["NCCL_SHM_USE_CUDA_MEMCPY"] = ("1", "GPUs without NVLink copy through shared memory twice as fast")
    return found


def _trainium(family: str, *, efas: int, nodes: int, leader: str, node_rank: int) -> Settings:
    """Rendered only: this release has no trainer for it."""
    cores = CORES[family]
    found = {
        "NEURON_RT_ROOT_COMM_ID": (leader, "where the collectives of the Neuron runtime meet"),
        "NEURON_PJRT_PROCESSES_NUM_DEVICES": (",".join([str(cores)] * nodes), "NeuronCores of each node"),
        "NEURON_PJRT_PROCESS_INDEX": (str(node_rank), "which of them is this node"),
    }
    if efas and nodes > 1:
        found["FI_PROVIDER"] = ("efa", "without EFA the ranks fail at once, instead of talking over TCP")
    return found
