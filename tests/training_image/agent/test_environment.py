"""The rendered environment: each variable with its reason, and none of those that samples still carry along."""

from pathlib import Path

import pytest

from agent.environment import OBSOLETE, environment_for
from agent.ranks import Seats, rank_environment

MACHINES = [
    ("c7i.large", 0, 0, 2), ("p4d.24xlarge", 8, 4, 2), ("p5.48xlarge", 8, 32, 16), ("p5.4xlarge", 1, 1, 1),
    ("p6-b200.48xlarge", 8, 8, 4), ("g5.48xlarge", 8, 1, 2), ("g6.12xlarge", 4, 1, 2), ("trn1.32xlarge", 0, 8, 2),
    ("trn2.48xlarge", 0, 16, 2),
]  # fmt: skip


def rendered(instance_type, gpus=0, efas=0, nodes=1):
    return environment_for(
        instance_type,
        gpus=gpus,
        efas=efas,
        nodes=nodes,
        interface="ens32",
        logs=Path("/run/logs"),
        leader="10.0.1.10:29500",
        node_rank=1,
    )


@pytest.mark.parametrize(("instance_type", "gpus", "efas", "nodes"), MACHINES)
def test_every_variable_has_a_value_and_a_reason_and_none_is_obsolete(instance_type, gpus, efas, nodes):
    settings = rendered(instance_type, gpus, efas, nodes)
    assert all(value and len(why) > 10 for value, why in settings.values())
    assert not settings.keys() & OBSOLETE.keys()


def test_the_obsolete_ones_are_these():
    assert set(OBSOLETE) == {
        "FI_EFA_USE_DEVICE_RDMA", "FI_EFA_FORK_SAFE", "RDMAV_FORK_SAFE", "FI_EFA_ENABLE_SHM_TRANSFER",
        "FI_EFA_SET_CUDA_SYNC_MEMOPS", "NCCL_PROTO", "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_MIN_CHANNELS",
        "NCCL_LAUNCH_MODE", "NCCL_TIMEOUT", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_TRACE_BUFFER_SIZE", "PYTORCH_CUDA_ALLOC_CONF",
    }  # fmt: skip


def test_a_cpu_node_gets_the_interface_of_gloo_and_nothing_of_gpus():
    assert {name: value for name, (value, _) in rendered("c7i.large", nodes=2).items()} == {
        "GLOO_SOCKET_IFNAME": "ens32"
    }


def test_efa_is_asserted_where_it_was_bought_and_a_gang_needs_it():
    assert rendered("p5.48xlarge", 8, 32, nodes=2)["FI_PROVIDER"][0] == "efa"
    assert "FI_PROVIDER" not in rendered("p5.48xlarge", 8, 32, nodes=1)
    assert "FI_PROVIDER" not in rendered("g6.2xlarge", 1, 0, nodes=2)


def test_gpus_without_nvlink_copy_through_shared_memory():
    assert "NCCL_SHM_USE_CUDA_MEMCPY" in rendered("g5.48xlarge", 8, 1, nodes=2)
    assert "NCCL_SHM_USE_CUDA_MEMCPY" not in rendered("p5.48xlarge", 8, 32, nodes=2)


def test_trainium_is_rendered_by_core_and_node():
    settings = rendered("trn1.32xlarge", 0, 8, nodes=2)
    assert settings["NEURON_PJRT_PROCESSES_NUM_DEVICES"][0] == "32,32"
    assert settings["NEURON_RT_ROOT_COMM_ID"][0] == "10.0.1.10:29500"
    assert not [name for name in settings if "NCCL" in name]


SEATS = Seats(
    job="j", attempt=1, node_rank=0, nodes=1, ranks_per_node=1, leader_ip="10.0.1.10", leader_port=1, interface="lo"
)


def test_the_jobs_own_variables_win_over_the_machines_and_the_agents_over_both():
    machine = {"NCCL_DEBUG": "INFO", "RANK": "9", "NCCL_SOCKET_IFNAME": "=ens32"}
    found = rank_environment({"NCCL_DEBUG": "OFF"}, SEATS, 0, Path("/n"), {"NCCL_DEBUG": "WARN"}, machine)
    assert (found["NCCL_DEBUG"], found["RANK"], found["NCCL_SOCKET_IFNAME"]) == ("WARN", "0", "=ens32")
