"""A Llama-like decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shape letters: B sequences, T tokens of a sequence, D model width, H query heads, K key/value heads, E width of a head,
F width of the feed-forward part, V vocabulary.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from job_contract.spec import LoraSpec, ModelSpec
from trainer.config import TARGETS

INIT_STD = 0.02
NORM_EPS = 1e-5

# Selective checkpointing keeps what is dear to compute again: products of matrices, and attention on each device.
KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)


class RMSNorm(nn.Module):
    """Scales each token to unit root mean square."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, (x_BTD.shape[-1],), self.weight, NORM_EPS)


class AdaptedLinear(nn.Linear):
    """A frozen matrix, and beside it two narrow ones whose product counts `scale` times (LoRA, Hu et al. 2021)."""

    def __init__(self, frozen: nn.Linear, lora: LoraSpec) -> None:
        super().__init__(frozen.in_features, frozen.out_features, bias=False)
        self.adapter_in = nn.Parameter(torch.empty(lora.rank, frozen.in_features))
        self.adapter_out = nn.Parameter(torch.empty(frozen.out_features, lora.rank))
        self.scale = lora.alpha / lora.rank

    def forward(self, x_BTD: Tensor) -> Tensor:
        adapted = F.linear(F.linear(x_BTD, self.adapter_in), self.adapter_out)
        return super().forward(x_BTD) + adapted * self.scale


class Attention(nn.Module):
    """Causal attention; K key/value heads are shared by H query heads."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.dim // spec.heads
        self.dropout = spec.dropout
        self.query = nn.Linear(spec.dim, spec.heads * self.head_dim, bias=False)
        self.key = nn.Linear(spec.dim, spec.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(spec.dim, spec.kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(spec.heads * self.head_dim, spec.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        query_BHTE = rotate(self._split(self.query(x_BTD), self.heads), cos_TE, sin_TE)
        key_BKTE = rotate(self._split(self.key(x_BTD), self.kv_heads), cos_TE, sin_TE)
        value_BKTE = self._split(self.value(x_BTD), self.kv_heads)
        mixed_BHTE = F.scaled_dot_product_attention(
            query_BHTE,
            key_BKTE,
            value_BKTE,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.kv_heads != self.heads,
        )
        return self.output(mixed_BHTE.transpose(1, 2).flatten(2))

    def _split(self, x_BTD: Tensor, heads: int) -> Tensor:
        return x_BTD.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: a gated two-layer part."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
        self.up = nn.Linear(spec.dim, spec.ffn_dim, bias=False)
        self.output = nn.Linear(spec.ffn_dim, spec.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gated_BTF = F.silu(self.gate(x_BTD)) * self.up(x_BTD)
        return self.output(gated_BTF)


class Block(nn.Module):
    """One layer: attention and feed-forward, each on a normed copy and added back."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(spec.dim), Attention(spec)
        self.feed_forward_norm, self.feed_forward = RMSNorm(spec.dim), FeedForward(spec)
        self.dropout = nn.Dropout(spec.dropout)
        self.checkpointing = "none"

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        if self.checkpointing == "none" or not self.training:
            return self._mixed(x_BTD, cos_TE, sin_TE)
        kept: dict[str, Any] = {}
        if self.checkpointing == "selective":
            kept["context_fn"] = partial(create_selective_checkpoint_contexts, _kept)
        return checkpoint(
            self._mixed,
            x_BTD,
            cos_TE,
            sin_TE,
            use_reentrant=False,
            preserve_rng_state=self.dropout.p > 0,
            **kept,
        )

    def _mixed(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), cos_TE, sin_TE))
        return x_BTD + self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))


class Decoder(nn.Module):
    """The whole model: tokens in, logits of the next token out."""

    cos_TE: Tensor
    sin_TE: Tensor

    def __init__(self, spec: ModelSpec, sequence_length: int, lora: LoraSpec | None = None) -> None:
        super().__init__()
        self.spec, self.sequence_length = spec, sequence_length
        self.embedding = nn.Embedding(spec.vocab, spec.dim)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.dim)
        self.head = nn.Linear(spec.dim, spec.vocab, bias=False)
        shape_TE = (sequence_length, spec.dim // spec.heads)
        self.register_buffer("cos_TE", torch.empty(shape_TE), persistent=False)
        self.register_buffer("sin_TE", torch.empty(shape_TE), persistent=False)
        if lora is not None:
            self._adapt(lora)

    def _adapt(self, lora: LoraSpec) -> None:
        for block in self.blocks:
            for target in lora.targets:
                owner, _, name = TARGETS[target].partition(".")
                part = block.get_submodule(owner)
                setattr(part, name, AdaptedLinear(part.get_submodule(name), lora))  # type: ignore[arg-type]
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(is_adapter(name))

    def fill_rotations(self) -> None:
        """The rotary tables hold their values; `to_empty` had left them undefined."""
        half = self.cos_TE.shape[1] // 2
        frequencies = self.spec.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(self.sequence_length, dtype=torch.float64), frequencies).repeat(1, 2)
        self.cos_TE.copy_(angles.cos())
        self.sin_TE.copy_(angles.sin())

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        x_BTD = self.embedding(tokens_BT)
        cos_TE, sin_TE = self.cos_TE[:length].to(x_BTD.dtype), self.sin_TE[:length].to(x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TE, sin_TE)
        return self.head(self.norm(x_BTD))


def _kept(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def rotate(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Return the heads with each pair (first half, second half) turned by its position's angle."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat((-second, first), dim=-1) * sin_TE


def is_adapter(name: str) -> bool:
    """Return whether the parameter of this name lies beside a frozen one."""
    return name.endswith((".adapter_in", ".adapter_out"))


def initial_value(name: str, shape: torch.Size, spec: ModelSpec, seed: int) -> Tensor:
    """Return a parameter's whole first value: a function of name and seed, so equal for every world size."""
    if len(shape) == 1:
        return torch.ones(shape)
    if name.endswith("adapter_out"):
        return torch.zeros(shape)
    std = INIT_STD / (2 * spec.layers) ** 0.5 if name.endswith("output.weight") else INIT_STD
    if name.endswith("adapter_in"):
        std = shape[1] ** -0.5
    number = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")
    return torch.empty(shape).normal_(0.0, std, generator=torch.Generator().manual_seed(number))
