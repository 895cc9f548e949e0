"""The ranks as one: process groups, the sharded or replicated model, and its optimizer state by name.

No `from __future__ import annotations` here: DDP compares a hook's annotations with classes, so it refuses text (torch
2.13).
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from trainer.config import Config
from trainer.endings import UserError
from trainer.llama import Weights
from trainer.model import Decoder, initial_value, is_adapter
from trainer.timing import StepTimes, time_sharding

START_TIMEOUT = timedelta(seconds=300)
STEP_TIMEOUT = timedelta(seconds=90)
# Ranks wait in this group for the slowest download or write; a peer that dies is seen at once whatever the timeout.
SAVE_TIMEOUT = timedelta(minutes=30)
BETAS = (0.9, 0.95)
STATE_BYTES = 16  # a trained parameter: fp32 weight, gradient and two moments
FROZEN_BYTES = 4


@dataclass(frozen=True)
class Ranks:
    """This rank, its device, and the groups apart from the training's: one for saves, one for flags.

    A save on the training's own group hangs within a few all-reduces (torch 2.13, KempnerForge issue 104).
    """

    rank: int
    world_size: int
    device: torch.device
    saves: dist.ProcessGroup
    flags: dist.ProcessGroup

    def all_true(self, *facts: bool) -> tuple[bool, ...]:
        """Return, per fact, whether it holds on every rank."""
        votes = torch.tensor(facts, dtype=torch.int64)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self.saves)
        return tuple(bool(vote) for vote in votes.tolist())

    def collect(self, item: object) -> list[object]:
        """Return every rank's item, in the order of the ranks."""
        items: list[object] = [None] * self.world_size
        dist.all_gather_object(items, item, group=self.saves)
        return items

    def require_same(self, name: str, text: str) -> None:
        """Raise UserError unless `text` is the same on every rank."""
        different = sorted({str(item) for item in self.collect(text)})
        if len(different) > 1:
            raise UserError(f"{name} differs between the ranks: {', '.join(item[:12] for item in different)}")


def join() -> Ranks:
    """Return this rank's place once all ranks of torchrun's environment are connected."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=START_TIMEOUT)
    saves = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)
    flags = dist.new_group(backend="gloo", timeout=START_TIMEOUT)
    return Ranks(dist.get_rank(), dist.get_world_size(), device, saves, flags)


def shorten_timeouts(ranks: Ranks) -> None:
    """A collective of the loop that waits for 90 s fails from now on; the first step may take longer."""
    for group in (dist.group.WORLD, ranks.flags):
        dist.distributed_c10d._set_pg_timeout(STEP_TIMEOUT, group)


@contextmanager
def patient(ranks: Ranks, seconds: float) -> Iterator[None]:
    """Ranks that are done wait so long for one that still reads, if that is longer than they would."""
    longer = max(SAVE_TIMEOUT, timedelta(seconds=seconds))
    dist.distributed_c10d._set_pg_timeout(longer, ranks.saves)
    try:
        yield
    finally:
        dist.distributed_c10d._set_pg_timeout(SAVE_TIMEOUT, ranks.saves)


class Learner:
    """The model under its parallel mode, and AdamW. `tensors` is everything that a save holds."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.times = StepTimes(ranks.device)
        self.mesh, self.options = config.mesh(ranks.world_size), config.options(gpu=ranks.device.type == "cuda")
        with torch.device("meta"):
            self.model = Decoder(config.model, config.training.sequence_length, config.training.lora)
        self._prepare_blocks()
        bf16 = config.training.precision == "bf16" or (
            config.training.precision == "auto" and ranks.device.type == "cuda"
        )
        self.half = torch.bfloat16 if bf16 else None
        self.net = self._replicated() if config.training.parallel == "ddp" else self._sharded()
        everything = dict(self.model.named_parameters())
        self.parameters = {name: one for name, one in everything.items() if one.requires_grad}
        self.frozen = {name: one for name, one in everything.items() if not one.requires_grad}
        self.optimizer = self._adamw()
        self.reset()
        if ranks.rank == 0:
            print(self._told(), flush=True)

    @property
    def multiplying(self) -> int:
        """Return the number of parameters that multiply something: all but the embedding's."""
        everything = (self.parameters | self.frozen).items()
        return sum(one.numel() for name, one in everything if not name.startswith("embedding."))

    @property
    def weight_bytes(self) -> int:
        """Return the most bytes that a file of the weights to start from can have: 4 a parameter, adapters apart."""
        everything = (self.parameters | self.frozen).items()
        return sum(4 * one.numel() for name, one in everything if not is_adapter(name))

    def tensors(self) -> dict[str, Tensor]:
        """Return trained parameters and moments by name, equal in all modes; AdamW's step counters are left out."""
        named = {}
        for name, parameter in self.parameters.items():
            state = self.optimizer.state[parameter]
            named[f"parameter.{name}"] = parameter.detach()
            named[f"moment1.{name}"] = state["exp_avg"]
            named[f"moment2.{name}"] = state["exp_avg_sq"]
        return named

    @torch.no_grad()
    def reset(self) -> None:
        """Parameters and optimizer are as before the first step, a function of the seed alone; no gradient is left."""
        for name, parameter in (self.parameters | self.frozen).items():
            whole = initial_value(name, parameter.shape, self.config.model, self.config.training.seed).to(
                self.ranks.device
            )
            if isinstance(parameter, DTensor):
                # Without a source rank every rank cuts its own shard out of the same whole: no traffic.
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(whole)
            if name in self.frozen:
                continue
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=self.ranks.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.optimizer.zero_grad()

    @torch.no_grad()
    def start_from(self, weights: Weights) -> None:
        """The parameters, adapters apart, are the folder's; each rank has read its own part. Raises UserError."""
        for name, parameter in (self.parameters | self.frozen).items():
            if is_adapter(name):
                continue
            shape, part = tuple(parameter.shape), ()
            local = parameter
            if isinstance(parameter, DTensor):
                local = parameter.to_local()
                sizes, starts = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                part = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
                if not local.numel():
                    continue
            local.copy_(weights.read(name, shape, part))

    def set_step(self, step: int) -> None:
        """AdamW corrects its moments as after `step` steps."""
        for state in self.optimizer.state.values():
            state["step"].fill_(step)

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of a backward pass. DDP exchanges gradients in the last one of a step only.

        FSDP2 reduces in each, so that all there is to drop at an order are the sharded gradients.
        """
        if isinstance(self.net, DistributedDataParallel) and not last:
            return self.net.no_sync()
        return nullcontext()

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass: FSDP2 casts by its own policy, DDP needs this one for bfloat16."""
        if self.half is None or not isinstance(self.net, DistributedDataParallel):
            return nullcontext()
        return torch.autocast(self.ranks.device.type, dtype=self.half)

    def clip(self) -> float:
        """Return the norm of the gradient over all ranks, after scaling it down to `clip_norm`."""
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.config.training.clip_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def update(self, learning_rate: float) -> None:
        """The optimizer has taken one step, and the gradients are gone."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _replicated(self) -> nn.Module:
        self._materialize()
        on_gpu = self.ranks.device.type == "cuda"
        net = DistributedDataParallel(
            self.model, device_ids=[self.ranks.device.index] if on_gpu else None, init_sync=False
        )
        net.register_comm_hook(self.times, _sum_gradients)
        return net

    def _prepare_blocks(self) -> None:
        """Blocks recompute, then are compiled; sharding comes last, so that its hooks stay outside of both."""
        for block in self.model.blocks:
            block.checkpointing = self.options.checkpointing
            if self.options.compile:
                block.compile(fullgraph=True)

    def _sharded(self) -> nn.Module:
        names = ("replicate", "shard")[-len(self.mesh) :]
        mesh = init_device_mesh(self.ranks.device.type, self.mesh, mesh_dim_names=names)
        policy = MixedPrecisionPolicy(param_dtype=self.half, reduce_dtype=torch.float32 if self.half else None)
        for module in (*self.model.blocks, self.model):
            # The root's parameters are needed again at once, by the backward pass that starts with them.
            reshard = self.options.reshard and module is not self.model
            sharded = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
            # The loss is divided by the tokens of the global batch, so gradients are summed. gloo has no PREMUL_SUM.
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_gradient_divide_factor(1.0)
        self._gather_ahead()
        self._materialize()
        if self.ranks.device.type == "cpu":
            time_sharding(self.times)
        return self.model

    def _gather_ahead(self) -> None:
        blocks: list[FSDPModule] = list(self.model.blocks)  # type: ignore[arg-type]
        for index, block in enumerate(blocks if self.options.prefetch else ()):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + self.options.prefetch])
            first = max(0, index - self.options.prefetch)
            block.set_modules_to_backward_prefetch(blocks[first:index][::-1])

    def _told(self) -> str:
        def held(parameters: dict[str, nn.Parameter]) -> int:
            locals_ = (one.to_local() if isinstance(one, DTensor) else one for one in parameters.values())
            return sum(one.numel() for one in locals_)

        trained, frozen = (sum(one.numel() for one in part.values()) for part in (self.parameters, self.frozen))
        state = STATE_BYTES * held(self.parameters) + FROZEN_BYTES * held(self.frozen)
        return (
            f"{self.config.training.parallel} on a mesh of {' x '.join(map(str, self.mesh))}: {trained + frozen:,} "
            f"parameters, {trained:,} of them trained, {state / 1e9:.2f} GB of state a rank; {self.options}"
        )

    def _materialize(self) -> None:
        self.model.to_empty(device=self.ranks.device)
        self.model.fill_rotations()

    def _adamw(self) -> torch.optim.AdamW:
        matrices = [parameter for parameter in self.parameters.values() if parameter.dim() > 1]
        scales = [parameter for parameter in self.parameters.values() if parameter.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": self.config.training.weight_decay},
            {"params": scales, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.config.training.learning_rate, betas=BETAS, fused=True)


def _sum_gradients(times: StepTimes, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    if bucket.is_last():
        times.handed_over()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
