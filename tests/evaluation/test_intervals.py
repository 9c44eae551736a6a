"""Intervals against published values."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.evaluation.intervals import mean_interval, wilson_interval


def test_wilson_interval_known_values() -> None:
    # Newcombe (1998), table I: 81 of 263 and 15 of 148.
    np.testing.assert_allclose(wilson_interval(81, 263), (0.2553, 0.3662), atol=5e-5)
    np.testing.assert_allclose(wilson_interval(15, 148), (0.0624, 0.1605), atol=5e-5)
    assert wilson_interval(0, 20)[0] == 0.0
    assert wilson_interval(20, 20)[1] == 1.0


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (4, 2.7764), (9, 2.2622), (10, 2.2281), (30, 2.0423)]
)
def test_mean_interval_uses_students_quantiles(freedom: int, quantile: float) -> None:
    values = [0.0, 1.0] * ((freedom + 1) // 2) + [0.5] * ((freedom + 1) % 2)
    low, high = mean_interval(values)
    half = quantile * np.std(values, ddof=1) / np.sqrt(len(values))
    np.testing.assert_allclose((low, high), (0.5 - half, 0.5 + half), rtol=1e-4, atol=1e-4)
    assert mean_interval([0.5]) is None
