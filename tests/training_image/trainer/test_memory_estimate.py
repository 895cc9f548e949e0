"""The supervisor's estimate of activations stands on the bundled model: it is a bound from below, and a near one."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from holdfast.domain.estimate import activation_bytes, parameters
from job_contract.spec import ModelSpec
from trainer.model import Decoder

MODELS = [
    (ModelSpec(dim=256, layers=4, heads=8, kv_heads=4, ffn_dim=768, vocab=260), 256, 2),
    (ModelSpec(dim=256, layers=8, heads=8, kv_heads=8, ffn_dim=1024, vocab=4000), 512, 1),
]


def kept_bytes(model, length, sequences, half):
    """Bytes of distinct storages that autograd keeps for the backward pass, weights apart."""
    net = Decoder(model, length)
    net.fill_rotations()
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


@pytest.mark.parametrize(("model", "length", "sequences"), MODELS)
def test_the_model_has_as_many_parameters_as_the_supervisor_counts(model, length, sequences):
    assert sum(weights.numel() for weights in Decoder(model, length).parameters()) == parameters(model)
