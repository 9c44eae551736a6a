"""Noise of std sigma C in every step, and a sum whose low bits tell nothing (PITFALLS 16, 18)."""

import numpy as np
import pytest

from pipeline.dpsgd.noise import noise_grid
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.mechanism import Mechanism
from pipeline.privacy.noise import KeyedNoise

MECHANISM = Mechanism(
    num_records=1_000,
    expected_batch_size=100,
    sampling_probability=0.1,
    noise_multiplier=0.4566,
    max_grad_norm=0.1,
    num_steps=10,
    delta=1e-5,
)
NOISE = KeyedNoise(noise_key=AttemptKey.seeded(3).noise_key())
NUM_COORDINATES = 400_000  # the std is known to 0.11 %: 1 % is nine standard errors


@pytest.mark.parametrize("step", [0, 1, 9])
def test_noise_std_in_every_step(step: int) -> None:
    noise = MECHANISM.noise_std * NOISE.gaussian(step, 0, NUM_COORDINATES)
    assert abs(noise.std() / (0.4566 * 0.1) - 1) < 0.005


def test_short_vectors_are_not_under_noised() -> None:
    """Every step of a vector of three coordinates, not just the long ones or the first."""
    values = np.stack([NOISE.gaussian(step, 0, 3) for step in range(800)])
    assert abs(values.std() - 1) < 0.07
    assert np.abs(values.mean(axis=0)).max() < 0.16
    assert len(np.unique(values)) == values.size


@pytest.mark.parametrize("noise_std", [0.04566, 1.0, 655.0])
def test_released_sums_lie_on_the_grid(noise_std: float) -> None:
    grid = noise_grid(noise_std)
    rng = np.random.default_rng(0)
    sums = (rng.standard_normal(NUM_COORDINATES) * 30 * noise_std).astype(np.float32)
    noisy = sums.astype(np.float64) + noise_std * NOISE.gaussian(0, 0, NUM_COORDINATES)
    released = (np.rint(noisy / grid) * grid).astype(np.float32)
    multiples = released.astype(np.float64) / grid
    np.testing.assert_array_equal(multiples, np.rint(multiples))
    # Rounding moves nothing that matters: half a millionth of a standard deviation.
    assert np.abs(released - noisy).max() < 33 * 4 * noise_std * 2.0**-24 + grid
    # Two neighbouring sums leave the same set of possible outputs: every multiple of the grid.
    small = np.abs(multiples) < 2**22
    assert set(np.unique(multiples[small] % 2)) == {0.0, 1.0}
