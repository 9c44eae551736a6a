"""How many floating-point operations a machine does while it moves one byte: measured, not assumed.

The engine weighs Gram matrices (operations) against kept gradients (bytes) with this number.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.dpsgd.per_image import exact_products

MATRIX_SIDE = 1024
MOVED_NUMBERS = 2**25
"""128 MiB in fp32: more than a cache holds."""


def measured_flops_per_byte(device: torch.device | str = "cpu", rounds: int = 5) -> float:
    """The balance of this device in fp32, from its fastest of some matrix products and copies.

        clipped = ClippedGradientSum(
            model, clipping, flops_per_byte=measured_flops_per_byte(device)
        )

    Takes about a second of a CPU core. Two measurements differ a little, and with them, where a
    layer stands on the border, the last bits of its norm; so it is not done by default.

    Args:
        device: where the model will train.
        rounds: how often each is tried, >= 1.

    Returns:
        Floating-point operations of a product per byte read or written by a copy; > 0.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, not {rounds}")
    device = torch.device(device)
    left, right = torch.ones(2, MATRIX_SIDE, MATRIX_SIDE, device=device)
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
