"""From norms to factors: the edge tables of the docstrings, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.dpsgd import AutomaticClipping, FlatClipping, GlobalClipping, make_clipping
from pipeline.dpsgd.clipping import MARGIN

NORMS = torch.tensor([0.0, 1e-30, 0.5, 2.0, 8.0, 1e30, math.inf, math.nan])


def test_flat_factors() -> None:
    factors = FlatClipping(2.0).factors(NORMS)
    expected = torch.tensor([1.0, 1.0, 1.0, MARGIN, MARGIN / 4, 2e-30 * MARGIN, 0.0, 0.0])
    torch.testing.assert_close(factors, expected)


def test_automatic_factors() -> None:
    factors = AutomaticClipping(2.0, gamma=0.5).factors(NORMS)
    expected = 2 * MARGIN / torch.tensor([0.5, 0.5, 1.0, 2.5, 8.5, 1e30, math.inf, math.inf])
    torch.testing.assert_close(factors, expected)


def test_global_factors() -> None:
    factors = GlobalClipping(2.0).factors(NORMS)
    torch.testing.assert_close(factors, torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 0]))


def test_infinite_flat_clipping_leaves_everything_finite_alone() -> None:
    factors = FlatClipping(math.inf).factors(NORMS)
    torch.testing.assert_close(factors, torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 0]))


@given(
    norm=st.floats(0, 2.0**123, width=32),
    bound=st.floats(2.0**-20, 2.0**20, width=32),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_factor_times_norm_stays_within_the_sensitivity(
    norm: float, bound: float, dtype: torch.dtype
) -> None:
    norms = torch.tensor([norm], dtype=dtype)
    for clipping in (FlatClipping(bound), AutomaticClipping(bound), GlobalClipping(bound)):
        factors = clipping.factors(norms)
        assert factors.dtype == dtype
        assert norm * factors.item() <= clipping.sensitivity == bound


def test_made_by_name() -> None:
    assert make_clipping("flat", 1.0) == FlatClipping(1.0)
    assert make_clipping("automatic", 1.0, gamma=0.1) == AutomaticClipping(1.0, 0.1)
    assert make_clipping("global", 1.0) == GlobalClipping(1.0)
    with pytest.raises(ValueError, match="'flat', 'automatic' or 'global', not 'layerwise'"):
        make_clipping("layerwise", 1.0)


@pytest.mark.parametrize("bound", [0.0, 1e-12, -1.0, math.nan])
@pytest.mark.parametrize("name", ["flat", "automatic", "global"])
def test_a_bound_that_is_none_is_refused(name: str, bound: float) -> None:
    with pytest.raises(ValueError, match="max_grad_norm"):
        make_clipping(name, bound)


def test_other_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        AutomaticClipping(math.inf)
    for gamma in (0.0, 1e-12):
        with pytest.raises(ValueError, match="gamma must be at least"):
            AutomaticClipping(1.0, gamma=gamma)
