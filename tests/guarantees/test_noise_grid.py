"""Pitfall 18: sum and noise are rounded once to a power-of-two grid that depends on neither."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dpsgd_seeded_noise import SeededNoise

from pipeline.dpsgd import ParameterLayout, ReleasedGradient, release_gradient
from pipeline.dpsgd.release import noise_grid

NUM = 5_000


def layout_of(num_coordinates: int) -> ParameterLayout:
    return ParameterLayout(
        names=("weight",),
        shapes=(torch.Size([num_coordinates]),),
        offsets=(0,),
        num_coordinates=num_coordinates,
    )


def release(flat_sum: torch.Tensor, noise_std: float, divisor: float = 1.0) -> ReleasedGradient:
    return release_gradient(
        flat_sum,
        step=3,
        noise_std=noise_std,
        divisor=divisor,
        noise_source=SeededNoise(),
        layout=layout_of(len(flat_sum)),
    )


@pytest.mark.parametrize(
    ("noise_std", "exponent"),
    [(1.0, -20), (0.999999, -21), (1.5, -20), (2.0, -19), (0.048, -25), (1e-9, -50), (3e8, 8)],
)
def test_the_grid_is_two_to_the_floor_of_log2_less_20(noise_std: float, exponent: int) -> None:
    assert noise_grid(noise_std) == 2.0**exponent == 2.0 ** (math.floor(math.log2(noise_std)) - 20)


@pytest.mark.parametrize("noise_std", [1.0, 0.048, 3.7e-3, 1e5])
@pytest.mark.parametrize("level", [0.0, 1.0, 100.0, 1e6])
def test_every_released_number_is_a_multiple_of_the_grid(noise_std: float, level: float) -> None:
    """Sums far beyond 2^24 grid points included: fp32 is then the coarser grid."""
    flat_sum = level * noise_std * torch.randn(NUM, generator=torch.Generator().manual_seed(0))
    grid = noise_grid(noise_std)
    multiples = release(flat_sum, noise_std).flat.double() / grid
    assert torch.equal(multiples, multiples.round())


def test_rounded_once_from_float64() -> None:
    """Rounding sum or noise to fp32 first would move some numbers by a grid point."""
    flat_sum = torch.randn(NUM, generator=torch.Generator().manual_seed(0))
    noise = SeededNoise().gaussian(3, 0, NUM)
    grid = noise_grid(0.7)
    expected = np.rint((flat_sum.double().numpy() + 0.7 * noise) / grid) * grid
    np.testing.assert_array_equal(release(flat_sum, 0.7).flat.double().numpy(), expected)


def test_division_follows_the_grid() -> None:
    flat_sum = torch.randn(NUM, generator=torch.Generator().manual_seed(0))
    whole, divided = release(flat_sum, 1.0), release(flat_sum, 1.0, divisor=98_304.0)
    assert torch.equal(divided.flat, whole.flat / 98_304.0)
    assert divided.noise_std_per_coordinate == 1.0 / 98_304.0


def test_a_noise_std_whose_grid_is_no_fp32_number_is_refused() -> None:
    for noise_std in (0.0, -1.0, math.nan, math.inf, 1e-40):
        with pytest.raises(ValueError, match="noise_std"):
            release(torch.zeros(4), noise_std)
