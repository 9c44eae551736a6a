"""How many floating-point operations a machine does while it moves one byte: usual, or measured.

The engine weighs Gram matrices (operations) against kept gradients (bytes) with this number.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.dpsgd.products import exact_products

MATRIX_SIDE = 1024
MOVED_NUMBERS = 2**25
"""128 MiB in fp32: more than a cache holds."""


USUAL = {
    ("cpu", torch.float32): 8.0,
    ("cpu", torch.bfloat16): 8.0,
    ("cuda", torch.float32): 14.0,
    ("cuda", torch.bfloat16): 200.0,
}
"""By device and dtype. CPU: 3 (measured, one core of an AMD EPYC with AVX-512) to 10 and more (many
cores that share the memory). CUDA, from data sheets: 13 and 156 on an A100 SXM 80 GB (19.5 and 312
TFLOP/s over 2.0 TB/s), 14 and 206 on an H200 (67 and 989 over 4.8)."""


def usual_flops_per_byte(device_type: str, dtype: torch.dtype) -> float:
    """The balance of machines of this kind, so that the choice is the same on all of them."""
    return USUAL.get((device_type, dtype), USUAL["cpu", torch.float32])


def measured_flops_per_byte(
    device: torch.device | str = "cpu", rounds: int = 5, dtype: torch.dtype = torch.float32
) -> float:
    """The balance of this device, from its fastest of some matrix products and copies.

        clipped = ClippedGradientSum(
            model, clipping, flops_per_byte=measured_flops_per_byte(device)
        )

    Takes about a second of a CPU core. Two measurements differ a little, and with them, where a
    layer stands on the border, the last bits of its norm; so it is not done by default.

    Args:
        device: where the model will train.
        rounds: how often each is tried, >= 1.
        dtype: of the matrices: bfloat16 where the model computes in it.

    Returns:
        Floating-point operations of a product per byte read or written by a copy; > 0.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    device = torch.device(device)
    left, right = torch.ones(2, MATRIX_SIDE, MATRIX_SIDE, device=device, dtype=dtype)
    source = torch.ones(MOVED_NUMBERS, device=device)
    target = torch.empty_like(source)
    with torch.no_grad(), torch.autocast(device.type, enabled=False), exact_products():
        product_seconds = _fastest(lambda: left @ right, rounds, device)
        copy_seconds = _fastest(lambda: target.copy_(source), rounds, device)
    flops = 2 * MATRIX_SIDE**3 / product_seconds
    bytes_moved = 2 * source.nbytes / copy_seconds
    return flops / bytes_moved


def _fastest(work: Callable[[], Tensor], rounds: int, device: torch.device) -> float:
    """Seconds of the fastest of some rounds, after one that does not count."""
    seconds = []
    for _ in range(rounds + 1):
        _wait_for(device)
        start = time.perf_counter()
        work()
        _wait_for(device)
        seconds.append(time.perf_counter() - start)
    return max(min(seconds[1:]), 1e-9)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
