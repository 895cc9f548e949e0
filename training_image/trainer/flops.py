"""Model FLOPs utilization: how much of the devices' peak the training uses."""

from __future__ import annotations

from job_contract.spec import ModelSpec

# Dense bf16 FLOP/s of one GPU, from the vendor's data sheets.
PEAKS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "L4": 121e12,
    "L40S": 362e12,
    "A10G": 70e12,
}


def peak_of(device_name: str) -> float | None:
    """Return the peak of a GPU by the name that CUDA has for it, None for one that is not listed."""
    words = device_name.replace("-", " ").split()
    return next((peak for name, peak in PEAKS.items() if name in words), None)


def flops_per_token(parameters: int, model: ModelSpec, sequence_length: int) -> float:
    """Return 6 N + 12 L D T: forward and backward through N parameters, and attention over T tokens.

    N leaves the embedding out, which multiplies nothing. L layers, D their width.
    """
    return 6 * parameters + 12 * model.layers * model.dim * sequence_length


def mfu(tokens_per_s: float, per_token: float, world_size: int, peak: float | None) -> float | None:
    """Return the share of the peak, None where the peak is not known (CPUs)."""
    if peak is None or not tokens_per_s:
        return None
    return round(tokens_per_s * per_token / (world_size * peak), 4)
