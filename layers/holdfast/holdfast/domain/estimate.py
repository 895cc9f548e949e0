"""What a model needs, worked out from its sizes: memory, bytes of a save, seconds to write it, seconds to train.

Estimates that refuse a request are bounds: memory without reserve, compute at a rate that nobody has published yet.
Those that only warn or inform are typical values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from job_contract.spec import LoraSpec, ModelSpec

GIB = 1024**3

STATE_BYTES = 16
"""Bytes a parameter while training: fp32 weight, gradient and AdamW's two moments, 4 each.

The same sum as in ZeRO (Rajbhandari et al. 2020, section 3.1: 16 bytes a parameter), there with half-precision copies.
"""

FROZEN_BYTES = 4
"""Bytes a parameter that is not trained: its fp32 weight."""

SAVED_BYTES = 12
"""Bytes a trained parameter in a save: weight and two moments; gradients and frozen weights are not saved."""

ROOT_FREE_BYTES = 140 * 10**9
"""Of the 200 GB root volume of the launch template, after system and image."""

SAVES_ON_DISK = 3
"""The committed save, the one in flight, and the one that is restored."""

HOST_RESERVE_BYTES = 2 * GIB
"""System, agent and interpreter of a GPU node; on a node without GPUs a quarter of the memory, at most this."""

PEAK_FLOPS: Mapping[str, float] = {
    "A10G": 70e12,
    "L4": 121e12,
    "L40S": 362e12,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "B300": 2250e12,
}
"""Dense bf16 operations a second of one GPU, by EC2's name for it; EC2 itself does not say."""

CPU_FLOPS_PER_VCPU = 96e9
"""Two AVX-512 units of 16 fp32 lanes, multiply and add, at 3 GHz; a vCPU is half a core."""

BEST_USE = 0.60
"""Nobody has published more: MegaScale 55 %, Llama 3 405B 38-43 % of the peak."""

TYPICAL_USE, TYPICAL_CPU_USE = 0.40, 0.15
SLOW_USE = 0.10
LARGE_PARAMETERS = 10**9
"""From here on a GPU is kept busy enough for `SLOW_USE` to be a bound; below, a step may be all overhead."""

NETWORK_USE = 0.5
"""Share of the network's rate that an upload reaches; measured rates replace it once a job runs."""

NOTICE_USABLE_S = 90.0
"""Of a spot notice of 120 s: less the poll, the step under way, the copy to the host, the commit, the clocks."""


def parameters(model: ModelSpec) -> int:
    """Return the weights of the decoder: untied embeddings, two norms a layer and one at the end, no biases."""
    return model.layers * layer_parameters(model) + 2 * model.vocab * model.dim + model.dim


def layer_parameters(model: ModelSpec) -> int:
    kv_dim = model.dim // model.heads * model.kv_heads
    return 2 * model.dim * (model.dim + kv_dim) + 3 * model.dim * model.ffn_dim + 2 * model.dim


def trained_parameters(model: ModelSpec, lora: LoraSpec | None) -> int:
    """Return what has gradients and moments: everything, or two narrow matrices beside each target of each layer."""
    if lora is None:
        return parameters(model)
    kv_dim = model.dim // model.heads * model.kv_heads
    sides = {
        "q_proj": 2 * model.dim,
        "k_proj": model.dim + kv_dim,
        "v_proj": model.dim + kv_dim,
        "o_proj": 2 * model.dim,
        "gate_proj": model.dim + model.ffn_dim,
        "up_proj": model.dim + model.ffn_dim,
        "down_proj": model.dim + model.ffn_dim,
    }
    return model.layers * lora.rank * sum(sides[target] for target in lora.targets)


def flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """Return operations forward and backward: 6 a weight that multiplies, and causal attention (PaLM, appendix B)."""
    multiplying = parameters(model) - model.vocab * model.dim
    return 6.0 * multiplying + 6.0 * model.layers * model.dim * sequence_length


def state_bytes(model: ModelSpec, parallel: str, ranks: int, *, half: bool, trained: int | None = None) -> int:
    """Return bytes on one rank that do not depend on the batch: its state, and what stands gathered at once.

    `ranks` share one replica: all of them with FSDP, those of one node with HSDP. DDP holds everything, and with bf16
    the cast weights. FSDP and HSDP hold their part, and one unit gathered with its gradient; the largest unit is a
    layer or the two embeddings, which are one unit.
    """
    weights = parameters(model)
    state = STATE_BYTES * weights if trained is None else FROZEN_BYTES * weights + STATE_BYTES * trained
    if parallel == "ddp":
        return state + (2 * weights if half else 0)
    unit = max(layer_parameters(model), 2 * model.vocab * model.dim)
    return state // ranks + (2 if ranks > 1 else 0) * (2 if half else 4) * unit


def activation_bytes(
    model: ModelSpec, sequence_length: int, sequences: int, *, half: bool, checkpointing: str = "none"
) -> int:
    """Return bytes kept for the backward pass of one micro-batch.

    Elements a token and layer: six of the width (norms, queries, attention in and out), two of the keys' and values'
    width, four of the feed-forward width; the attention matrix is never stored. At the end the logits, with their
    gradient, in fp32. Full checkpointing keeps the layer's input alone; selective keeps that and the products: of the
    width queries, attention and the two outputs, keys and values, and two of the feed-forward width. One layer at a
    time is whole again while its gradient is computed; the logits are gone by then.
    """
    kv_dim = model.dim // model.heads * model.kv_heads
    whole = 6 * model.dim + 2 * kv_dim + 4 * model.ffn_dim
    kept = {"none": whole, "full": model.dim, "selective": 5 * model.dim + 2 * kv_dim + 2 * model.ffn_dim}[
        checkpointing
    ]
    element, again = (2 if half else 4), whole - kept
    return sequence_length * sequences * (model.layers * kept * element + max(again * element, 8 * model.vocab))


def save_bytes_per_node(trained: int, nodes: int) -> int:
    """Return what one node writes of a save: every mode deals the state out evenly."""
    return -(-SAVED_BYTES * trained // nodes)


def staged_bytes_per_node(trained: int, parallel: str, nodes: int) -> int:
    """Return what a node copies into host memory at most, so that training goes on while a save is written.

    A node with a whole replica may have to write all of it: when the others are about to end.
    """
    return save_bytes_per_node(trained, 1 if parallel in ("ddp", "hsdp") else nodes)


@dataclass(frozen=True)
class Pace:
    """Operations a second of a whole gang: the bound, what is usual, and the slowest that is plausible."""

    best: float
    usual: float
    slow: float


def pace(*, vcpus: int, gpus: int, gpu_name: str, nodes: int) -> Pace | None:
    """Return how fast the gang computes, None for a GPU whose peak is not known."""
    if gpus:
        peak = PEAK_FLOPS.get(gpu_name)
        return Pace(*(peak * gpus * nodes * use for use in (BEST_USE, TYPICAL_USE, SLOW_USE))) if peak else None
    peak = CPU_FLOPS_PER_VCPU * vcpus * nodes
    return Pace(peak, peak * TYPICAL_CPU_USE, peak * TYPICAL_CPU_USE / 10)
