"""Pitfall 1: the private phase must train the loss that the model defines, and nothing else."""

from __future__ import annotations

import math

import torch
from dpsgd_seeded_noise import SeededNoise
from dpsgd_small_mae import batch, losses_of, small_mae

from pipeline.dpsgd import ClippedGradientSum, FlatClipping, release_gradient


def test_without_clipping_the_sum_is_autograds_gradient() -> None:
    model, inputs = small_mae(), batch(6)
    engine = ClippedGradientSum(model, FlatClipping(math.inf))
    per_image = engine.accumulate(losses_of(model, inputs))
    losses = model(*inputs)
    torch.testing.assert_close(per_image.losses_M, losses.detach(), rtol=1e-12, atol=0)
    losses.sum().backward()
    for name, view in engine.layout.views(engine.flat_sum).items():
        expected = model.get_parameter(name).grad
        expected = torch.zeros_like(view) if expected is None else expected
        torch.testing.assert_close(view, expected, rtol=1e-10, atol=1e-12)


def test_without_noise_the_released_gradient_is_the_mean_over_the_expected_batch() -> None:
    """Also after the release: 6 images, B = 8, and the optimizer sees (sum of gradients) / 8."""
    model, inputs = small_mae(torch.float32), batch(6, torch.float32)
    engine = ClippedGradientSum(model, FlatClipping(math.inf))
    engine.accumulate(losses_of(model, inputs))
    released = release_gradient(
        engine.flat_sum,
        step=0,
        noise_std=1e-9,  # only sets the grid: the noise itself is zero
        divisor=8.0,
        noise_source=SeededNoise(scale=0.0),
        layout=engine.layout,
    )
    released.assign(model)
    given = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    (model(*inputs).sum() / 8.0).backward()
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(given[name], expected, rtol=1e-4, atol=1e-6)
