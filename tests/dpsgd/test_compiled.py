"""The compiled step is the engine's: equal, as safe, and refused where it could not be."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pipeline.dpsgd import (
    AutomaticClipping,
    ClippedGradientSum,
    Clipping,
    CompiledGradientSum,
    FlatClipping,
    GlobalClipping,
    UnsupportedOperationError,
    make_blocks,
)
from pipeline.models.mae import MaskedAutoencoder
from pipeline.models.sizes import ModelSize

SIZE = ModelSize(
    name="some",
    width=16,
    depth=1,
    num_heads=2,
    decoder_width=16,
    decoder_depth=1,
    decoder_num_heads=2,
)
needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None,
    reason="Inductor needs a C++ compiler on the CPU: install g++",
)


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> None:
    torch._dynamo.reset()


def mae(dtype: torch.dtype = torch.float64) -> MaskedAutoencoder:
    model = MaskedAutoencoder(SIZE, image_size=16, patch_size=4)
    model.initialise(torch.Generator().manual_seed(3))
    return model.to(dtype)


def mae_batch(num_images: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(num_images, 3, 16, 16, generator=generator)
    return images.to(dtype), torch.rand(num_images, 16, generator=generator)


def classifier() -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=8, patch_size=4, num_classes=3, embed_dim=8, depth=1, num_heads=2, init_values=0.5
    ).double()
    images, labels = torch.randn(4, 3, 8, 8).double(), torch.tensor([0, 2, 1, 1])

    def losses(images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(images), labels, reduction="none")

    return model, losses, (images, labels)


def compiled_of(
    model: nn.Module, losses: Callable[..., Tensor], clipping: Clipping, backend: Any = "eager"
) -> tuple[CompiledGradientSum, ClippedGradientSum]:
    clipped = ClippedGradientSum(model, clipping)
    return CompiledGradientSum(clipped, losses, backend=backend), clipped


def assert_equal(
    found: ClippedGradientSum, expected: ClippedGradientSum, rtol: float = 1e-10
) -> None:
    size = expected.flat_sum.abs().max().item()
    torch.testing.assert_close(
        found.flat_sum, expected.flat_sum, rtol=rtol, atol=rtol * max(size, 1e-300)
    )


@pytest.mark.parametrize(
    ("clipping", "style", "backend"),
    [
        (FlatClipping(0.1), "all-layer", "aot_eager"),
        (AutomaticClipping(0.1), "per-layer", "eager"),
        (GlobalClipping(0.5), "all-layer", "eager"),
    ],
    ids=lambda each: getattr(each, "name", None) or type(each).__name__,
)
@pytest.mark.parametrize("kind", ["mae", "vit"])
def test_equals_the_engine(kind: str, clipping: Clipping, style: str, backend: str) -> None:
    """In float64; the second microbatch is the compiled one, with other images and weights."""
    model, losses, batch = classifier() if kind == "vit" else (mae(), None, mae_batch())
    losses = losses or model
    blocks = make_blocks(style, model)
    clipped = ClippedGradientSum(model, clipping, blocks=blocks)
    expected = ClippedGradientSum(model, clipping, blocks=blocks)
    compiled = CompiledGradientSum(clipped, losses, backend=backend)
    weights = torch.tensor([1.0, 0.25, 0.0, 1.0])
    other = (batch[0].flip(3).contiguous(), *batch[1:])
    for rows in (batch, other):
        found = compiled.accumulate(rows, weights)
        wanted = expected.accumulate(lambda rows=rows: losses(*rows), weights)
        torch.testing.assert_close(found.block_norms_MK, wanted.block_norms_MK, rtol=1e-10, atol=0)
        torch.testing.assert_close(found.losses_M, wanted.losses_M, rtol=1e-10, atol=0)
        torch.testing.assert_close(found.block_factors_MK, wanted.block_factors_MK)
    assert_equal(clipped, expected)


def test_what_changes_between_microbatches_is_seen() -> None:
    """Parameters, by an optimizer in place and by new data; a buffer; images; weights."""
    model, clipping = mae(), FlatClipping(0.1)
    compiled, clipped = compiled_of(model, model, clipping)
    images, uniforms = mae_batch()
    for _ in range(2):
        compiled.accumulate((images, uniforms))
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            if place % 2:
                parameter.mul_(1.1)
            else:
                parameter.data = parameter.data * 0.9
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.add_(0.01)
    weights = torch.tensor([0.5, 1.0, 1.0, 0.0])
    clipped.zero_()
    compiled.accumulate((images + 1, uniforms), weights)
    expected = ClippedGradientSum(model, clipping)
    expected.accumulate(lambda: model(images + 1, uniforms), weights)
    assert_equal(clipped, expected)


def test_another_shape_is_recorded_anew() -> None:
    model, clipping = mae(), FlatClipping(0.1)
    compiled, clipped = compiled_of(model, model, clipping)
    expected = ClippedGradientSum(model, clipping)
    for num_images in (4, 3, 4, 3):
        batch = mae_batch(num_images)
        compiled.accumulate(batch)
        expected.accumulate(lambda batch=batch: model(*batch))
    assert_equal(clipped, expected)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_image_and_padding_add_nothing(poison: float) -> None:
    model, clipping = mae(), AutomaticClipping(0.1)
    compiled, clipped = compiled_of(model, model, clipping)
    images, uniforms = mae_batch()
    compiled.accumulate((images, uniforms))
    poisoned = images.clone()
    poisoned[1] = poison
    clipped.zero_()
    found = compiled.accumulate((poisoned, uniforms))
    assert found.factors_M[1] == 0
    others = torch.tensor([1.0, 0.0, 1.0, 1.0])
    expected = ClippedGradientSum(model, clipping)
    expected.accumulate(lambda: model(images, uniforms), others)
    assert_equal(clipped, expected)
    before = clipped.flat_sum.clone()
    compiled.accumulate((poisoned, uniforms), torch.zeros(4))
    assert torch.equal(clipped.flat_sum, before)


def test_norms_and_sums_read_the_same_numbers() -> None:
    """A compiler that changes what the first graph hands over changes both: the bound stays."""
    num_graphs = 0

    def careless(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        nonlocal num_graphs
        num_graphs += 1
        if num_graphs > 1:
            return graph.forward

        def run(*inputs: Tensor) -> Any:
            return tuple(
                each * 1.5 if each.is_floating_point() else each for each in graph(*inputs)
            )

        return run

    model, clipping = mae(), AutomaticClipping(0.1)
    compiled, clipped = compiled_of(model, model, clipping, careless)
    batch = mae_batch()
    compiled.accumulate(batch)
    honest = clipped.flat_sum.clone()
    for image in range(4):
        clipped.zero_()
        compiled.accumulate(batch, torch.eye(4)[image].contiguous())
        assert 0.09 < clipped.flat_sum.norm().item() <= clipping.sensitivity
    assert num_graphs == 2 and not torch.allclose(clipped.flat_sum, honest)


@needs_compiler
@pytest.mark.parametrize("is_bf16", [False, True], ids=["float32", "bfloat16"])
def test_no_image_adds_more_than_the_sensitivity(is_bf16: bool) -> None:
    """Through Inductor, as on a GPU."""
    model, clipping = mae(torch.float32), FlatClipping(0.05)

    def losses(images: Tensor, uniforms: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_bf16):
            return model(images, uniforms)

    compiled, clipped = compiled_of(model, losses, clipping, "inductor")
    batch = mae_batch(dtype=torch.float32)
    expected = ClippedGradientSum(copy.deepcopy(model).double(), clipping)
    expected.accumulate(lambda: expected.model(batch[0].double(), batch[1]))
    compiled.accumulate(batch)
    for image in range(4):
        clipped.zero_()
        compiled.accumulate(batch, torch.eye(4)[image].contiguous())
        assert 0.9 * 0.05 < clipped.flat_sum.double().norm().item() <= clipping.sensitivity
    clipped.zero_()
    compiled.accumulate(batch)
    error = (clipped.flat_sum.double() - expected.flat_sum).norm() / expected.flat_sum.norm()
    assert error < (0.05 if is_bf16 else 1e-5)


def test_a_tensor_from_outside_is_refused() -> None:
    """It could be the images, and would be the same in every microbatch."""
    model = mae()
    images, uniforms = mae_batch()
    compiled, clipped = compiled_of(
        model, lambda uniforms: model(images, uniforms), FlatClipping(1.0)
    )
    with pytest.raises(UnsupportedOperationError, match=r"shape \(4, 3, 16, 16\) .* an input"):
        compiled.accumulate((uniforms,))
    assert clipped.flat_sum.count_nonzero() == 0


def test_what_the_forward_makes_itself_is_not() -> None:
    model = mae()
    compiled, clipped = compiled_of(
        model, lambda *batch: model(*batch) * torch.tensor(2.0).double(), FlatClipping(0.1)
    )
    expected = ClippedGradientSum(model, FlatClipping(0.1))
    for _ in range(2):
        compiled.accumulate(mae_batch())
        expected.accumulate(lambda: 2 * model(*mae_batch()))
    assert_equal(clipped, expected)


def test_dropout_drops_anew() -> None:
    model, losses, batch = classifier()
    model.pos_drop.p = 0.5
    compiled, clipped = compiled_of(model, losses, AutomaticClipping(1.0))
    sums = []
    for _ in range(3):
        clipped.zero_()
        compiled.accumulate(batch)
        sums.append(clipped.flat_sum.clone())
    assert not torch.equal(sums[1], sums[2])


def test_what_depends_on_the_numbers_is_refused() -> None:
    model = mae()

    def losses(images: Tensor, uniforms: Tensor) -> Tensor:
        return model(images if images.mean() > -1e9 else -images, uniforms)

    compiled, clipped = compiled_of(model, losses, FlatClipping(1.0))
    with pytest.raises(UnsupportedOperationError, match="without compiling"):
        compiled.accumulate(mae_batch())
    assert clipped.flat_sum.count_nonzero() == 0


def test_bad_input_is_refused() -> None:
    model = mae()
    compiled, clipped = compiled_of(model, model, FlatClipping(1.0))
    images, uniforms = mae_batch()
    with pytest.raises(ValueError, match=r"inputs\[0\] must be a tensor that needs no gradient"):
        compiled.accumulate((images.requires_grad_(), uniforms))
    batch = (images.detach(), uniforms)
    scalar, _ = compiled_of(model, lambda *batch: model(*batch).mean(), FlatClipping(1.0))
    with pytest.raises(ValueError, match="one loss per image"):
        scalar.accumulate(batch)
    compiled.accumulate(batch)
    before = clipped.flat_sum.clone()
    for weights in (torch.tensor([1.0, -1.0, 1.0, 1.0]), torch.ones(3)):
        with pytest.raises(ValueError, match="weights must"):
            compiled.accumulate(batch, weights)
    assert torch.equal(clipped.flat_sum, before)
    next(model.parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match="set of trainable parameters changed"):
        compiled.accumulate(batch)
    twice = ClippedGradientSum(mae(), FlatClipping(1.0), two_backwards=True)
    with pytest.raises(ValueError, match="two_backwards is True"):
        CompiledGradientSum(twice, model)
