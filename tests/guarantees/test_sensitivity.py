"""Pitfalls 11 and 33: what one image adds is never longer than the clipper's sensitivity.

Measured on what is really added to the buffer, in float64, whatever precision computed it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from dpsgd_small_mae import batch, losses_of, small_mae
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.dpsgd import (
    AutomaticClipping,
    ClippedGradientSum,
    Clipping,
    FlatClipping,
    GlobalClipping,
    UnsupportedOperationError,
)

PRECISIONS = ("fp32", "low_products", "bf16")
CLIPPINGS = (
    FlatClipping(1.0),
    FlatClipping(0.1),
    AutomaticClipping(1.0),
    AutomaticClipping(0.3, gamma=1e-6),
    GlobalClipping(1.0),
)


@contextmanager
def precision(name: str) -> Iterator[None]:
    """fp32; products of fp32 numbers in TF32 (GPU) or bf16 (CPU); bf16 autocast."""
    before = torch.get_float32_matmul_precision()
    if name == "low_products":
        torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def added_norm(engine: ClippedGradientSum) -> float:
    """The float64 norm of what is in the buffer."""
    return engine.flat_sum.double().square().sum().sqrt().item()


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("mode", ["auto", "ghost", "direct"])
def test_no_image_adds_more(name: str, clipping: Clipping, mode: str) -> None:
    """Also among others (weight 0 there), so that the microbatch does not share one clip."""
    model, inputs = small_mae(torch.float32), batch(4, torch.float32)
    inputs[0][1] *= 30.0
    inputs[0][2] *= 1e-3
    engine = ClippedGradientSum(model, clipping, mode=mode)
    for image in range(4):
        weights = torch.zeros(4)
        weights[image] = 1.0
        engine.zero_()
        with precision(name):
            per_image = engine.accumulate(losses_of(model, inputs), weights)
        assert added_norm(engine) <= clipping.sensitivity
        if not isinstance(clipping, GlobalClipping) and per_image.norms_M[image] > 1.0:
            assert added_norm(engine) > 0.97 * clipping.sensitivity  # and not much less


class Tokens(nn.Module):
    """One linear layer whose per-image gradient is sum_t g_t a_t', with g and a chosen freely."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, activations: Tensor, gradients: Tensor) -> Tensor:
        return (self.linear(activations) * gradients).sum((1, 2))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_positions=st.integers(1, 24),
    width=st.sampled_from([1, 3, 32, 96]),
    level=st.floats(-8, 8),
    common=st.floats(-4, 1),
    cancellation=st.floats(-8, 0),
    has_equal_entries=st.booleans(),
    name=st.sampled_from(PRECISIONS),
    mode=st.sampled_from(["ghost", "direct"]),
    clipping=st.sampled_from(CLIPPINGS),
)
def test_no_gradient_adds_more(
    *,
    seed: int,
    num_positions: int,
    width: int,
    level: float,
    common: float,
    cancellation: float,
    has_equal_entries: bool,
    name: str,
    mode: str,
    clipping: Clipping,
) -> None:
    """Large, tiny, coherent, cancelling and equal entries (whose roundings all point one way)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, num_positions, width)
    activations = torch.randn(shape, generator=generator)
    gradients = torch.randn(shape, generator=generator)
    if has_equal_entries:
        activations = activations[:, :1, :1].expand(shape)
        gradients = gradients[:, :1, :1].expand(shape)
    activations = 10.0**level * (activations * 10.0**common + activations[:, :1])
    if num_positions > 1:  # gradients of neighbours cancel up to a small rest
        signs = 1.0 - 2.0 * (torch.arange(num_positions) % 2)
        rest = 10.0**cancellation * torch.randn(shape, generator=generator)
        gradients = gradients[:, :1] * signs.view(1, -1, 1) + rest
    model = Tokens(width)
    engine = ClippedGradientSum(model, clipping, mode=mode)
    for image in range(2):
        engine.zero_()
        with precision(name):
            engine.accumulate(
                lambda: model(activations, gradients).float(), torch.eye(2)[image].contiguous()
            )
        assert added_norm(engine) <= clipping.sensitivity


@pytest.mark.parametrize("rest", [1e-1, 1e-2, 1e-3, 1e-4, 1e-6])
def test_gradients_that_almost_cancel(rest: float) -> None:
    """Gram matrices lose what cancels: at 1e-3 a tenth of the norm, at 1e-4 all of it."""
    clipping = FlatClipping(1.0)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(2, 1, 16, 96, generator=generator)
        signs = (1.0 - 2.0 * (torch.arange(16) % 2)).view(1, -1, 1)
        activations = 100 * (1.0 + rest * noise[0])
        gradients = 100 * (signs + rest * noise[1])
        model = Tokens(96)
        engine = ClippedGradientSum(model, clipping, mode="ghost")
        per_image = engine.accumulate(lambda: model(activations, gradients))  # noqa: B023
        assert per_image.factors_M.item() > 0
        assert added_norm(engine) <= clipping.sensitivity


class Shared(nn.Module):
    """The same weight four times, once transposed, and a bias shared with another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, tokens: Tensor) -> Tensor:
        for _ in range(3):
            tokens = self.linear(tokens).tanh() * self.scale + self.linear.bias
        return (tokens @ self.linear.weight).square().sum((1, 2))


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("clipping", CLIPPINGS[:3])
def test_no_image_adds_more_through_reused_weights(name: str, clipping: Clipping) -> None:
    torch.manual_seed(3)
    model, tokens = Shared(), 5 * torch.randn(3, 7, 12)
    engine = ClippedGradientSum(model, clipping)
    for image in range(3):
        engine.zero_()
        with precision(name):
            engine.accumulate(lambda: model(tokens).float(), torch.eye(3)[image].contiguous())
        assert 0.97 * clipping.sensitivity < added_norm(engine) <= clipping.sensitivity


def test_a_microbatch_adds_at_most_one_bound_per_image() -> None:
    model, inputs = small_mae(torch.float32), batch(8, torch.float32)
    engine = ClippedGradientSum(model, FlatClipping(0.01))
    engine.accumulate(losses_of(model, inputs), torch.tensor([1.0, 1, 0, 1, 0.5, 0, 1, 1]))
    assert 0 < added_norm(engine) <= 5.5 * 0.01


def test_clipped_over_all_parameters_and_not_layer_by_layer() -> None:
    """Per-layer clipping without R / sqrt(layers) would add sqrt(layers) times the bound."""
    model, inputs = small_mae(torch.float32), batch(1, torch.float32)
    engine = ClippedGradientSum(model, FlatClipping(1e-3))
    per_image = engine.accumulate(losses_of(model, inputs))
    views = engine.layout.views(engine.flat_sum)
    layers = [view.double().square().sum() for view in views.values() if view.any()]
    assert len(layers) > 30
    assert math.isclose(float(torch.stack(layers).sum().sqrt()), 1e-3, rel_tol=1e-3)
    assert per_image.norms_M.item() > 1e-3


class DropsAnew(nn.Module):
    """A checkpointed segment that drops other numbers whenever it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, rows: Tensor) -> Tensor:
        def segment(rows: Tensor) -> Tensor:
            return self.second(torch.nn.functional.dropout(self.first(rows).sin(), 0.5)).sin()

        return torch.utils.checkpoint.checkpoint(
            segment, rows, use_reentrant=False, preserve_rng_state=False
        ).sum(dim=1)


def test_both_backwards_drop_the_same() -> None:
    """Else the norm would be that of another gradient than what is added."""
    torch.manual_seed(0)
    model = DropsAnew()
    engine = ClippedGradientSum(
        model, FlatClipping(1e-3), two_backwards=True, checks_independence=False
    )
    for _ in range(20):
        engine.zero_()
        engine.accumulate(lambda: model(torch.randn(1, 6)))
        assert 0.99e-3 < engine.flat_sum.double().norm().item() <= 1e-3


@pytest.mark.parametrize("changed_first", [True, False])
def test_a_gradient_that_is_changed_after_it_was_measured_is_refused(changed_first: bool) -> None:
    """Two layers side by side are handed the same gradient tensor, the later one first."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)]).double()
    engine = ClippedGradientSum(layers, FlatClipping(1.0), checks_independence=False)
    images = torch.randn(2, 4).double()

    def losses() -> Tensor:
        earlier, later = layers[0](images), layers[1](images)
        changed = later if changed_first else earlier
        changed.register_hook(lambda gradient: gradient.mul_(1000))
        return (earlier + later).square().sum(dim=1)

    if changed_first:  # both are measured as they are then added
        engine.accumulate(losses)
        assert 0.9 < engine.flat_sum.norm().item() <= 2.0
    else:
        with pytest.raises(UnsupportedOperationError, match=r"'1\.weight'.* changed in place"):
            engine.accumulate(losses)
        assert engine.flat_sum.count_nonzero() == 0


@pytest.mark.parametrize("kind", ["numpy", "state"])
def test_a_second_backward_that_differs_is_refused(kind: str) -> None:
    """What it adds has norms that nobody has measured."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]).double()
    engine = ClippedGradientSum(
        layers, FlatClipping(1e-3), two_backwards=True, checks_independence=False
    )
    generator, backwards = np.random.default_rng(0), []

    def segment(rows: Tensor) -> Tensor:
        hidden = layers[0](rows)
        if kind == "numpy":
            hidden = hidden * torch.from_numpy(generator.integers(0, 9, hidden.shape))
        else:
            hidden.register_hook(lambda each: backwards.append(1) or each * 10.0 ** len(backwards))
        return layers[1](hidden.sin())

    def losses() -> Tensor:
        rows = torch.ones(2, 6).double()
        checkpoint = torch.utils.checkpoint.checkpoint
        return checkpoint(segment, rows, use_reentrant=False).square().sum(dim=1)

    with pytest.raises(UnsupportedOperationError, match="other gradients than the first"):
        for _ in range(20):
            engine.accumulate(losses)
    assert engine.flat_sum.count_nonzero() == 0
