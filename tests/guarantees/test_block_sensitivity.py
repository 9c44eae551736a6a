"""Pitfall 11: clipped in K blocks, what one image adds is still within the stated sensitivity.

Measured on what is really added to the buffer, in float64, whatever precision computed it: over
random models, scales, styles, clippers, numbers of views and precisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.dpsgd import (
    AutomaticClipping,
    ClippedGradientSum,
    Clipping,
    FlatClipping,
    GlobalClipping,
    make_blocks,
    make_clipping,
)

PRECISIONS = ("fp32", "tf32", "bf16 products", "bf16")
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
STYLES = ("all-layer", "per-layer", "per-block")
NAMES = ("flat", "automatic", "global")


@contextmanager
def precision(name: str, device: str = "cpu") -> Iterator[None]:
    """fp32; fp32 products in TF32 or bf16 (where the machine has them); bf16 autocast."""
    backends = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    low = {"tf32": ("tf32", "tf32"), "bf16 products": ("tf32", "bf16")}.get(name)
    before = [getattr(backend, "fp32_precision", None) for backend in backends]
    medium = torch.get_float32_matmul_precision()
    try:
        if low is not None and None in before:  # torch < 2.9
            torch.set_float32_matmul_precision("medium" if name == "bf16 products" else "high")
        elif low is not None:
            for backend, value in zip(backends, low, strict=True):
                backend.fp32_precision = value
        with torch.autocast(device, torch.bfloat16, enabled=name == "bf16"):
            yield
    finally:
        if None in before:
            torch.set_float32_matmul_precision(medium)
        else:
            for backend, value in zip(backends, before, strict=True):
                backend.fp32_precision = value


class Chain(nn.Module):
    """A random chain of blocks; some share a weight or a bias with the stem, and a token."""

    def __init__(self, width: int, depth: int, *, shares: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
                for _ in range(depth)
            ]
        )
        if shares:
            for block in self.blocks:
                block[1].bias = self.stem.bias
            self.blocks[-1][1].weight = self.blocks[0][1].weight

    def forward(self, tokens: Tensor, scale_M: Tensor) -> Tensor:
        """tokens [M, T, width] -> losses [M]; the gradient of an image grows with its scale."""
        tokens = torch.cat([self.token.expand(len(tokens), -1, -1), self.stem(tokens)], dim=1)
        for block in self.blocks:
            tokens = tokens + block(tokens)
        return tokens.float().square().mean((1, 2)) * scale_M


def added_norm(engine: ClippedGradientSum) -> float:
    """The float64 norm of what is in the buffer."""
    return engine.flat_sum.double().square().sum().sqrt().item()


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    width=st.sampled_from([1, 4, 33, 64]),
    depth=st.integers(1, 4),
    num_positions=st.sampled_from([1, 5, 17]),
    num_views=st.sampled_from([1, 1, 3]),
    shares=st.booleans(),
    level=st.floats(-6, 8),
    bound=st.floats(1e-3, 1e3),
    relative=st.none() | st.floats(0.5, 2.0),
    gamma=st.sampled_from([1e-6, 0.01]),
    precision_name=st.sampled_from(PRECISIONS),
    device=st.sampled_from(DEVICES),
    mode=st.sampled_from(["auto", "ghost", "direct"]),
    two_backwards=st.booleans(),
    name=st.sampled_from(NAMES),
    style=st.sampled_from(STYLES),
)
def test_no_image_adds_more_than_the_sensitivity(
    *,
    seed: int,
    width: int,
    depth: int,
    num_positions: int,
    num_views: int,
    shares: bool,
    level: float,
    bound: float,
    relative: float | None,
    gamma: float,
    precision_name: str,
    device: str,
    mode: str,
    two_backwards: bool,
    name: str,
    style: str,
) -> None:
    torch.manual_seed(seed)
    model = Chain(width, depth, shares=shares).to(device)
    tokens = torch.randn(2 * num_views, num_positions, width).to(device)
    scale = 10.0**level * torch.rand(2 * num_views).to(device)

    def losses() -> Tensor:
        return model(tokens, scale).view(2, -1).mean(1)

    if relative is not None:  # a bound that is close to the norm
        unclipped = ClippedGradientSum(model, FlatClipping(math.inf))
        bound = relative * unclipped.accumulate(losses).norms_M[0].item()
    clipping = make_clipping(name, bound, gamma)
    assert clipping.sensitivity == bound
    blocks = make_blocks(style, model)
    engine = ClippedGradientSum(
        model, clipping, blocks=blocks, mode=mode, two_backwards=two_backwards
    )
    for image in range(2):
        engine.zero_()
        with precision(precision_name, device):
            engine.accumulate(losses, torch.eye(2)[image].contiguous())
        assert added_norm(engine) <= clipping.sensitivity


@pytest.mark.parametrize("precision_name", PRECISIONS)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("clipping", [FlatClipping(0.01), AutomaticClipping(0.01, gamma=1e-6)])
def test_the_bound_is_reached(clipping: Clipping, style: str, precision_name: str) -> None:
    """Where every block is too long each adds R / sqrt(K): together R, and not much less."""
    torch.manual_seed(0)
    model = Chain(24, 5, shares=True)
    blocks = make_blocks(style, model)
    engine = ClippedGradientSum(model, clipping, blocks=blocks)
    with precision(precision_name):
        found = engine.accumulate(lambda: model(torch.randn(1, 9, 24), torch.tensor([1e4])))
    assert (found.block_norms_MK > clipping.sensitivity).all()
    assert 0.98 * clipping.sensitivity < added_norm(engine) <= clipping.sensitivity


def test_global_reaches_its_bound_too() -> None:
    """Norms just below R / sqrt(K) are kept, just above dropped."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(7)])
    clipping = GlobalClipping(1.0)
    engine = ClippedGradientSum(model, clipping, blocks=make_blocks("per-layer", model))
    for relative, kept in ((0.999, 7), (1.001, 0)):
        engine.zero_()
        rows = torch.full((1, 1), relative / 7**0.5)
        found = engine.accumulate(lambda: sum(each(rows) for each in model)[:, 0])  # noqa: B023
        assert int(found.block_factors_MK.sum()) == kept
        assert added_norm(engine) <= 1.0


@pytest.mark.parametrize("rest", [1e-2, 1e-3, 1e-4])
def test_what_cancels_in_one_block_is_bounded_there(rest: float) -> None:
    """A Gram matrix loses what cancels; beside a long block the loss would look harmless."""
    clipping = FlatClipping(1.0)
    signs = (1.0 - 2.0 * (torch.arange(16) % 2)).view(1, -1, 1)
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(2, 1, 16, 96, generator=generator)
        activations = 100 * (1.0 + rest * noise[0])
        gradients = 100 * (signs + rest * noise[1])
        model = nn.ModuleList([nn.Linear(96, 96, bias=False) for _ in range(2)])
        blocks = make_blocks("per-layer", model)
        engine = ClippedGradientSum(model, clipping, blocks=blocks, mode="ghost")
        found = engine.accumulate(
            lambda: (
                (model[0](activations) * gradients).sum((1, 2))  # noqa: B023
                + 1e4 * model[1](activations).sum((1, 2))  # noqa: B023
            )
        )
        assert found.block_norms_MK[0, 1] > 1e6 > found.block_norms_MK[0, 0] > 0
        for view in engine.layout.views(engine.flat_sum).values():
            assert 0 < view.double().norm().item() <= clipping.sensitivity / 2**0.5
