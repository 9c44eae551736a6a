"""Noise is a function of the coordinate, not of the rank's slice (PITFALLS 32)."""

import numpy as np
import pytest

from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.noise import CHUNK, KeyedNoise

KEY = AttemptKey.seeded(4).noise_key()
NUM_COORDINATES = 3 * CHUNK + 12_345


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64])
def test_noise_by_absolute_coordinate(world_size: int) -> None:
    whole = KeyedNoise(noise_key=KEY).gaussian(5, 0, NUM_COORDINATES)
    slice_size = -(-NUM_COORDINATES // world_size)
    parts = []
    for rank in range(world_size):
        start = min(rank * slice_size, NUM_COORDINATES)
        stop = min(start + slice_size, NUM_COORDINATES)
        parts.append(KeyedNoise(noise_key=KEY).gaussian(5, start, stop))
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_slices_do_not_repeat_each_other() -> None:
    """The fault itself: noise keyed by the position within a slice is the same on every rank."""
    noise = KeyedNoise(noise_key=KEY)
    first, second = noise.gaussian(0, 0, CHUNK), noise.gaussian(0, CHUNK, 2 * CHUNK)
    assert not np.any(first == second)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02


def test_single_coordinates() -> None:
    noise = KeyedNoise(noise_key=KEY)
    whole = noise.gaussian(1, 0, 2 * CHUNK)
    for index in (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1):
        assert noise.gaussian(1, index, index + 1)[0] == whole[index]
