"""The yardstick of `bench.training`, frozen: a loop as one writes it by hand, with nothing but training in it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from job_contract.spec import TrainingSpec
from trainer.model import Decoder, initial_value


class PlainLoop:
    """The same model and optimizer under the same parallel mode; `step` trains one global batch."""

    def __init__(self, spec: TrainingSpec) -> None:
        self.spec, self.share = spec, spec.global_batch // dist.get_world_size()
        model = Decoder(spec.model, spec.sequence_length)
        model.fill_rotations()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(initial_value(name, parameter.shape, spec.model, spec.seed))
        self.net: nn.Module = model
        if spec.parallel == "ddp":
            self.net = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=spec.learning_rate, fused=True)
        self.tokens = torch.randint(0, spec.model.vocab, (64, self.share, spec.sequence_length + 1))

    def step(self, number: int) -> Tensor:
        rows = self.tokens[number % len(self.tokens)]
        logits = self.net(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), self.spec.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
