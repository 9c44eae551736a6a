"""Keyed noise: the right law, the right bits, the right grid."""

import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from pipeline.dpsgd.noise import noise_grid
from pipeline.privacy.keys import derive
from pipeline.privacy.noise import CHUNK, KeyedNoise, _Scratch

KEY = bytes(range(32))
NOISE = KeyedNoise(noise_key=KEY)


def reference_chunk(key: bytes, step: int, chunk: int) -> np.ndarray:
    """The same chunk written plainly from the docstring, with cosine and sine."""
    counter = (chunk << 64).to_bytes(16, "big")
    cipher = Cipher(algorithms.AES(derive(key, b"step", step)), modes.CTR(counter)).encryptor()
    words = np.frombuffer(cipher.update(bytes(8 * CHUNK)), dtype="<u8")
    radius_words, angle_words = words[: CHUNK // 2], words[CHUNK // 2 :]
    low = (angle_words & np.uint64(2047)).astype(np.float64)
    uniform = (radius_words.astype(np.float64) + (low + 0.5) / 2048) / 2.0**64
    angle = 2 * math.pi * ((angle_words >> np.uint64(11)) * 2.0**-53 - 0.5)
    radius = np.sqrt(-2 * np.log(uniform))
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])


@pytest.mark.parametrize(("step", "chunk"), [(0, 0), (3, 0), (0, 5), (6_000, 1_525)])
def test_equal_to_the_plain_formula(step: int, chunk: int) -> None:
    drawn = NOISE.gaussian(step, chunk * CHUNK, (chunk + 1) * CHUNK)
    np.testing.assert_allclose(drawn, reference_chunk(KEY, step, chunk), rtol=0, atol=1e-13)


def test_noise_std_per_chunk() -> None:
    # Power: the std of 65,536 values has a standard error of 0.28 %, so 1.2 % is 4.3 of them;
    # a noise scaled by 0.97 fails on every chunk.
    values = NOISE.gaussian(0, 0, 30 * CHUNK).reshape(30, CHUNK)
    assert np.all(np.abs(values.std(axis=1) - 1) < 0.012)
    assert np.all(np.abs(values.mean(axis=1)) < 4.5 / math.sqrt(CHUNK))
    assert abs(values.std() - 1) < 4.5 / math.sqrt(2 * values.size)


def test_noise_is_gaussian_up_to_the_tails() -> None:
    values = NOISE.gaussian(1, 0, 30 * CHUNK)
    assert stats.kstest(values, "norm").pvalue > 1e-3
    for threshold in (2.0, 3.0, 4.0):
        expected = values.size * stats.norm.sf(threshold)
        for tail in (values > threshold, values < -threshold):
            assert abs(tail.sum() - expected) < 4.5 * math.sqrt(expected)


def test_noise_streams_are_independent() -> None:
    other = KeyedNoise(noise_key=bytes(32))
    streams = np.stack(
        [
            NOISE.gaussian(0, 0, CHUNK),
            NOISE.gaussian(1, 0, CHUNK),
            NOISE.gaussian(0, CHUNK, 2 * CHUNK),
            NOISE.gaussian(1, CHUNK, 2 * CHUNK),
            other.gaussian(0, 0, CHUNK),
        ]
    )
    # The two halves of a chunk share their radii: they must be independent all the same.
    halves = streams[0].reshape(2, -1)
    for values in (streams, streams**2, halves, halves**2):
        correlation = np.corrcoef(values) - np.eye(len(values))
        assert np.abs(correlation).max() < 4.5 / math.sqrt(values.shape[1])


def test_extreme_words_give_finite_values() -> None:
    scratch = _Scratch()
    values = np.empty(CHUNK)
    ones = np.uint64(2**64 - 1)
    for radius in (np.uint64(0), ones):
        for angle in (np.uint64(0), np.uint64(2**63), ones):
            scratch.words[: CHUNK // 2], scratch.words[CHUNK // 2 :] = radius, angle
            scratch.box_muller(values)
            assert np.all(np.isfinite(values))
            assert np.abs(values).max() <= 10.27
    # All radius bits zero: the largest value there is, 2^-76 in the uniform.
    scratch.words[: CHUNK // 2], scratch.words[CHUNK // 2 :] = np.uint64(0), np.uint64(0)
    scratch.box_muller(values)
    assert abs(np.abs(values).max() - math.sqrt(2 * 76 * math.log(2))) < 1e-9


def test_out_is_filled_and_checked() -> None:
    out = np.full(100, np.nan)
    assert NOISE.gaussian(2, CHUNK - 50, CHUNK + 50, out) is out
    np.testing.assert_array_equal(out, NOISE.gaussian(2, CHUNK - 50, CHUNK + 50))
    for wrong in (np.empty(99), np.empty(100, np.float32), np.empty(200)[::2]):
        with pytest.raises(ValueError, match="contiguous float64"):
            NOISE.gaussian(2, 0, 100, wrong)


def test_bad_coordinates_are_refused() -> None:
    for step, start, stop in ((-1, 0, 1), (0, -1, 1), (0, 2, 1)):
        with pytest.raises(ValueError, match="absolute coordinates"):
            NOISE.gaussian(step, start, stop)
    assert NOISE.gaussian(0, 7, 7).shape == (0,)


def test_key_is_hidden_and_checked() -> None:
    assert "noise_key" not in repr(NOISE)
    with pytest.raises(ValueError, match="32 bytes"):
        KeyedNoise(noise_key=b"short")


@pytest.mark.parametrize(
    ("noise_std", "exponent"),
    [(1.0, -20), (1.9999, -20), (2.0, -19), (0.5, -21), (0.048, -25), (4566e-5, -25)],
)
def test_noise_grid(noise_std: float, exponent: int) -> None:
    assert noise_grid(noise_std) == 2.0**exponent


@pytest.mark.parametrize("noise_std", [0.0, -1.0, math.nan, math.inf, 1e-39])
def test_noise_grid_refuses(noise_std: float) -> None:
    with pytest.raises(ValueError, match="noise_std"):
        noise_grid(noise_std)
