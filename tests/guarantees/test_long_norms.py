"""Pitfall 14: norms of long gradients are not too small."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pipeline.dpsgd import ClippedGradientSum, FlatClipping
from pipeline.dpsgd.per_image import staged_squares


@pytest.mark.parametrize("num_values", [1, 1023, 1024, 1025, 2**20 + 3, 2**25])
def test_staged_squares_equal_float64(num_values: int) -> None:
    """Equal and random numbers; one running fp32 sum of 2^25 equal squares stops growing."""
    generator = torch.Generator().manual_seed(0)
    for values in (
        torch.full((1, num_values), 0.1),
        torch.rand(1, num_values, generator=generator),
    ):
        exact = values.double().square().sum().item()
        assert math.isclose(staged_squares(values).item(), exact, rel_tol=3e-6)


def test_a_long_gradient_is_clipped_to_the_bound() -> None:
    """16 million equal coordinates, of one embedding-like parameter that is added to the images."""
    model = nn.ParameterDict({"position": nn.Parameter(torch.zeros(1, 4096, 4096))})
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    images = torch.full((1, 1, 1), 0.1)

    engine.accumulate(lambda: 0.1 * (images + model["position"]).sum((1, 2)))
    length = engine.flat_sum.double().square().sum().sqrt().item()
    assert 1 - 2**-12 - 1e-5 < length <= 1.0
