"""Pitfall 10: a NaN or infinity in one image adds exactly 0 and touches nobody else."""

from __future__ import annotations

import math

import pytest
import torch
from dpsgd_seeded_noise import SeededNoise
from dpsgd_small_mae import batch, loss_of, losses_of, small_mae
from torch import Tensor, nn

from pipeline.dpsgd import (
    AutomaticClipping,
    ClippedGradientSum,
    Clipping,
    FlatClipping,
    reference_clipped_sum,
    release_gradient,
)

CLIPPINGS = [FlatClipping(0.05), AutomaticClipping(0.05), FlatClipping(math.inf)]


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("mode", ["ghost", "direct", "two backwards"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e300])
def test_a_poisoned_image_adds_nothing(clipping: Clipping, mode: str, poison: float) -> None:
    """1e300 overflows inside the model: the loss itself becomes infinite or NaN."""
    model, inputs = small_mae(), batch(5)
    options = {"two_backwards": True} if mode == "two backwards" else {"mode": mode}
    engine = ClippedGradientSum(model, clipping, **options)
    engine.accumulate(losses_of(model, tuple(each[[0, 1, 3, 4]] for each in inputs)))
    clean = engine.flat_sum.clone()
    inputs[0][2, 1, 5, 7] = poison
    engine.zero_()
    per_image = engine.accumulate(losses_of(model, inputs))
    assert per_image.factors_M[2] == 0
    torch.testing.assert_close(engine.flat_sum, clean, rtol=1e-12, atol=1e-15)
    expected = reference_clipped_sum(model, loss_of(model, inputs), 5, clipping)
    torch.testing.assert_close(engine.flat_sum, expected.flat_sum_P, rtol=1e-10, atol=1e-13)


class SquareRoot(nn.Module):
    """A finite loss with an infinite gradient: sqrt at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2, bias=False).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs).square().sum(1).sqrt()


@pytest.mark.parametrize("is_padding", [False, True])
def test_a_finite_loss_with_an_infinite_gradient(is_padding: bool) -> None:
    torch.manual_seed(0)
    model = SquareRoot()
    inputs = torch.randn(4, 3, dtype=torch.float64)
    inputs[1] = 0.0
    weights = torch.ones(4)
    weights[1] = 0.0 if is_padding else 1.0
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    per_image = engine.accumulate(lambda: model(inputs), weights)
    assert torch.isfinite(per_image.losses_M).all()
    assert per_image.factors_M[1] == 0
    others = ClippedGradientSum(model, FlatClipping(1.0))
    others.accumulate(lambda: model(inputs[[0, 2, 3]]))
    torch.testing.assert_close(engine.flat_sum, others.flat_sum, rtol=1e-12, atol=0)


def test_padding_alone_and_poison_alone_add_exactly_zero_and_noise_is_still_released() -> None:
    model, inputs = small_mae(torch.float32), batch(3, torch.float32)
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    engine.accumulate(losses_of(model, inputs), torch.zeros(3))
    inputs[0][:] = math.nan
    engine.accumulate(losses_of(model, inputs))
    assert engine.flat_sum.count_nonzero() == 0
    released = release_gradient(
        engine.flat_sum,
        step=0,
        noise_std=1.0,
        divisor=1.0,
        noise_source=SeededNoise(),
        layout=engine.layout,
    )
    assert abs(released.flat.std().item() - 1) < 0.05


def test_selected_out_on_a_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way taken on devices, where the host may not wait: zeros in place of gathered rows."""
    from pipeline.dpsgd import per_image as forms

    as_it_is = forms.ImageWeights.of

    def without_gathering(factors_M: Tensor, is_kept_M: Tensor, **_: bool) -> forms.ImageWeights:
        return as_it_is(factors_M, is_kept_M, gathers=False)

    model, inputs = small_mae(), batch(5)
    inputs[0][2] = math.nan
    engine = ClippedGradientSum(model, FlatClipping(0.05))
    engine.accumulate(losses_of(model, inputs))
    gathered = engine.flat_sum.clone()
    monkeypatch.setattr(forms.ImageWeights, "of", without_gathering)
    engine.zero_()
    engine.accumulate(losses_of(model, inputs))
    torch.testing.assert_close(engine.flat_sum, gathered, rtol=1e-12, atol=1e-15)


def test_a_piece_of_padding_alone_in_bfloat16() -> None:
    """Gradients of large matrices are kept in pieces; all images of one may be left out."""
    model = nn.Linear(2100, 2100, bias=False)  # one image a piece
    engine = ClippedGradientSum(model, FlatClipping(1.0), mode="direct")
    inputs = torch.randn(2, 2, 2100)

    def losses() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs).float().square().mean(dim=(1, 2))

    engine.accumulate(losses, torch.tensor([1.0, 0.0]))
    assert 0 < engine.flat_sum.double().norm().item() <= 1.0
