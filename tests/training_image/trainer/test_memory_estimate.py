"""The supervisor's estimate of activations stands on the bundled model: it is a bound from below, and a near one."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.domain.estimate import activation_bytes, parameters
from holdfast.messages.job_request import PRESETS
from job_contract.spec import ModelSpec
from trainer.model import KEPT, Decoder

MODELS = [
    (ModelSpec(dim=256, layers=4, heads=8, kv_heads=4, ffn_dim=768, vocab=260), 256, 2),
    (ModelSpec(dim=256, layers=8, heads=8, kv_heads=8, ffn_dim=1024, vocab=4000), 512, 1),
]


def kept_bytes(model, length, sequences, half, checkpointing="none"):
    """Bytes of distinct storages that autograd keeps for the backward pass, weights apart."""
    net = Decoder(model, length)
    net.fill_rotations()
    for block in net.blocks:
        block.checkpointing = checkpointing
    net = net.to(torch.bfloat16) if half else net
    own = {tensor.untyped_storage().data_ptr() for tensor in (*net.parameters(), *net.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor
        return tensor

    rows = torch.zeros((sequences, length + 1), dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = net(rows[:, :-1]).float()
        cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(("model", "length", "sequences"), MODELS)
@pytest.mark.parametrize("half", [False, True])
def test_the_estimate_of_activations_is_a_near_bound(model, length, sequences, half):
    measured = kept_bytes(model, length, sequences, half)
    estimated = activation_bytes(model, length, sequences, half=half)
    assert 0.7 * measured <= estimated <= measured


class Products(TorchDispatchMode):
    """Counts the bytes of what selective checkpointing keeps, which autograd's hooks do not see."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        result = operator(*arguments, **(options or {}))
        if operator in KEPT:
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, torch.Tensor):
                    self.kept[id(tensor)] = tensor.nbytes
        return result


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_the_estimate_knows_what_checkpointing_keeps_and_the_layer_that_is_whole_again(checkpointing):
    model, length, sequences = ModelSpec(dim=128, layers=6, heads=4, kv_heads=4, ffn_dim=512, vocab=260), 256, 1
    with Products() as products:
        kept = kept_bytes(model, length, sequences, False, checkpointing)
    kept += sum(products.kept.values()) if checkpointing == "selective" else 0
    bare = kept_bytes(replace(model, layers=1), length, sequences, False, "full")
    one_layer = kept_bytes(replace(model, layers=1), length, sequences, False) - bare
    estimated = activation_bytes(model, length, sequences, half=False, checkpointing=checkpointing)
    assert 0.7 * (kept + one_layer) <= estimated <= kept + one_layer
    assert estimated < activation_bytes(model, length, sequences, half=False)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_as_many_parameters_as_the_supervisor_counts(preset):
    with torch.device("meta"):
        net = Decoder(PRESETS[preset], 128)
    assert sum(weights.numel() for weights in net.parameters()) == parameters(PRESETS[preset])
