"""Pitfall 15: sums in fp32 and noise in float64, whatever precision computes the gradients."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from dpsgd_seeded_noise import SeededNoise
from dpsgd_small_mae import SmallMae, batch, loss_of, losses_of, small_mae

from pipeline.dpsgd import (
    ClippedGradientSum,
    FlatClipping,
    reference_clipped_sum,
    release_gradient,
)
from pipeline.models.mae import MaskedAutoencoder
from pipeline.models.sizes import SIZES


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("mode", ["ghost", "direct"])
def test_fp32_equals_float64(mode: str) -> None:
    model, inputs, clipping = small_mae(), batch(6), FlatClipping(0.1)
    expected = reference_clipped_sum(model, loss_of(model, inputs), 6, clipping)
    model = model.float()
    engine = ClippedGradientSum(model, clipping, mode=mode)
    images, order, counts = inputs
    per_image = engine.accumulate(losses_of(model, (images.float(), order, counts.float())))
    assert relative_error(engine.flat_sum, expected.flat_sum_P) < 1e-5
    torch.testing.assert_close(per_image.norms_M.double(), expected.norms_M, rtol=1e-5, atol=0)


def test_fp32_equals_float64_at_a_hundred_million_parameters() -> None:
    """The float64 engine is held to the reference elsewhere; here long sums are the danger."""
    model = MaskedAutoencoder(SIZES["base"], image_size=96, patch_size=16)
    model.initialise(torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, 96, 96, generator=generator)
    uniforms = torch.rand(2, model.num_patches, generator=generator)
    found = []
    for dtype in (torch.float32, torch.float64):
        rows = images.to(dtype)
        model.to(dtype)
        engine = ClippedGradientSum(model, FlatClipping(0.1))
        per_image = engine.accumulate(partial(model, rows, uniforms))
        found.append((engine.flat_sum, per_image.norms_M.double()))
    assert len(found[0][0]) > 99_000_000
    assert relative_error(found[0][0], found[1][0]) < 1e-5
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("mode", ["ghost", "direct"])
def test_bf16_autocast_is_as_good_as_a_plain_bf16_step(mode: str) -> None:
    """Compared with the gradient that plain autocast training gets, each against float64."""
    inputs = batch(6)
    exact = small_mae()
    exact(*inputs).sum().backward()
    layout = ClippedGradientSum(exact, FlatClipping(float("inf"))).layout
    expected = layout.flatten(gradients(exact), torch.float64)

    images, order, counts = inputs
    inputs32 = (images.float(), order, counts.float())
    model = small_mae(torch.float32)
    engine = ClippedGradientSum(model, FlatClipping(float("inf")), mode=mode)
    with torch.autocast("cpu", torch.bfloat16):
        engine.accumulate(losses_of(model, inputs32))
        losses = model(*inputs32)
    losses.sum().backward()
    plain = relative_error(layout.flatten(gradients(model)), expected)
    assert engine.flat_sum.dtype == torch.float32
    assert relative_error(engine.flat_sum, expected) < 1.2 * plain < 0.05


def gradients(model: SmallMae) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


def test_many_small_images_do_not_vanish_in_the_sum() -> None:
    """A sum kept in bf16 would lose a part in 256 at every addition."""
    model, inputs = small_mae(torch.float32), batch(1, torch.float32)
    engine = ClippedGradientSum(model, FlatClipping(0.01))
    with torch.autocast("cpu", torch.bfloat16):
        engine.accumulate(losses_of(model, inputs))
        once = engine.flat_sum.clone()
        for _ in range(49):
            engine.accumulate(losses_of(model, inputs))
    assert relative_error(engine.flat_sum, 50 * once.double()) < 1e-5


class Float32Noise(SeededNoise):
    """A noise source of the wrong precision."""

    def gaussian(self, step: int, start: int, stop: int) -> np.ndarray:
        return super().gaussian(step, start, stop).astype(np.float32)


def test_noise_of_lower_precision_is_refused() -> None:
    engine = ClippedGradientSum(small_mae(torch.float32), FlatClipping(1.0))
    with pytest.raises(ValueError, match="float64"):
        release_gradient(
            engine.flat_sum,
            step=0,
            noise_std=1.0,
            divisor=1.0,
            noise_source=Float32Noise(),
            layout=engine.layout,
        )


def test_no_image_can_make_a_step_be_skipped() -> None:
    """A gradient that overflows everywhere still gives a noisy step, as a loss scaler would not."""
    model, inputs = small_mae(torch.float32), batch(2, torch.float32)
    inputs[0].mul_(1e30)
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    engine.accumulate(losses_of(model, inputs))
    noise = SeededNoise()
    released = release_gradient(
        engine.flat_sum,
        step=0,
        noise_std=2.0,
        divisor=4.0,
        noise_source=noise,
        layout=engine.layout,
    )
    expected = 0.5 * noise.gaussian(0, 0, engine.layout.num_coordinates)
    np.testing.assert_allclose(released.flat.numpy(), expected, atol=1e-5)
