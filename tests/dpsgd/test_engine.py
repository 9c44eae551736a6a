"""The engine equals the specification, and refuses what it must before it adds anything."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pipeline.dpsgd import (
    AutomaticClipping,
    ClippedGradientSum,
    Clipping,
    FlatClipping,
    GlobalClipping,
    PerImage,
    measured_flops_per_byte,
    reference_clipped_sum,
)

LABELS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3])


def transformer(**options: object) -> VisionTransformer:
    """A timm transformer with layer scale, class token and trained positions, all weights busy."""
    torch.manual_seed(0)
    given = {"embed_dim": 16, "depth": 2, "num_heads": 2, "init_values": 0.5, **options}
    model = VisionTransformer(img_size=16, patch_size=4, num_classes=4, **given).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def images_of(num_images: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_images, 3, 16, 16, dtype=torch.float64, generator=generator)


def losses_of(model: nn.Module, images: Tensor) -> Callable[[], Tensor]:
    labels = LABELS[: len(images)]
    return lambda: F.cross_entropy(model(images), labels, reduction="none")


def loss_of(model: nn.Module, images: Tensor) -> Callable[[int], Tensor]:
    return lambda i: F.cross_entropy(model(images[i : i + 1]), LABELS[i : i + 1])


def assert_equals_reference(
    model: nn.Module,
    engine: ClippedGradientSum,
    images: Tensor,
    per_image: PerImage,
    weights: Tensor | None = None,
) -> None:
    expected = reference_clipped_sum(
        model, loss_of(model, images), len(images), engine.clipping, weights
    )
    torch.testing.assert_close(engine.flat_sum, expected.flat_sum_P, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(per_image.factors_M, expected.factors_M, rtol=1e-10, atol=0)
    torch.testing.assert_close(per_image.losses_M, expected.losses_M, rtol=1e-10, atol=0)
    used = expected.factors_M > 0
    torch.testing.assert_close(per_image.norms_M[used], expected.norms_M[used], rtol=1e-10, atol=0)


@pytest.mark.parametrize("two_backwards", [False, True])
@pytest.mark.parametrize("mode", ["auto", "ghost", "direct"])
@pytest.mark.parametrize(
    "clipping", [FlatClipping(3.0), AutomaticClipping(0.3), GlobalClipping(6.0)]
)
def test_equals_the_reference(clipping: Clipping, mode: str, two_backwards: bool) -> None:
    model, images = transformer(), images_of(6)
    weights = torch.tensor([1.0, 0.25, 0.0, 1.0, 1.0, 0.0])
    engine = ClippedGradientSum(model, clipping, mode=mode, two_backwards=two_backwards)
    per_image = engine.accumulate(losses_of(model, images), weights)
    assert len(set(per_image.factors_M.tolist())) > 2
    assert_equals_reference(model, engine, images, per_image, weights)


@pytest.mark.parametrize("microbatch", [1, 4, 16])
def test_any_cut_into_microbatches_gives_the_same_sum(microbatch: int) -> None:
    model, images = transformer(), images_of(16)
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    whole = ClippedGradientSum(model, FlatClipping(1.0))
    whole.accumulate(losses_of(model, images))
    for start in range(0, 16, microbatch):
        rows, labels = images[start : start + microbatch], LABELS[start : start + microbatch]
        engine.accumulate(
            lambda rows=rows, labels=labels: F.cross_entropy(model(rows), labels, reduction="none")
        )
    torch.testing.assert_close(engine.flat_sum, whole.flat_sum, rtol=1e-10, atol=1e-13)


def test_padding_rows_add_nothing_whatever_they_hold() -> None:
    model, images = transformer(), images_of(6)
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    engine.accumulate(losses_of(model, images[:4]))
    unpadded = engine.flat_sum.clone()
    weights = torch.tensor([1.0, 1, 1, 1, 0, 0])
    for padding in (0.0, 1e3, math.nan):
        images[4:] = padding
        engine.zero_()
        per_image = engine.accumulate(losses_of(model, images), weights)
        assert per_image.factors_M[4:].tolist() == [0.0, 0.0]
        torch.testing.assert_close(engine.flat_sum, unpadded, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("trained", ["head", "norm", "bias", "gamma", "weight", "pos_embed"])
def test_partly_frozen_models(trained: str) -> None:
    model, images = transformer(), images_of(3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    engine = ClippedGradientSum(model, FlatClipping(0.5))
    assert 0 < len(engine.layout.names) < len(list(model.parameters()))
    per_image = engine.accumulate(losses_of(model, images))
    assert_equals_reference(model, engine, images, per_image)


def test_from_named_parameters_alone() -> None:
    """Parameters that are not given must be frozen, and are constants."""
    model, images = transformer(), images_of(3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    pairs = [(name, each) for name, each in model.named_parameters() if "mlp" in name]
    engine = ClippedGradientSum(pairs, FlatClipping(0.5))
    engine.accumulate(losses_of(model, images))
    expected = reference_clipped_sum(pairs, loss_of(model, images), 3, engine.clipping)
    torch.testing.assert_close(engine.flat_sum, expected.flat_sum_P, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("two_backwards", [False, True])
@pytest.mark.parametrize("mode", ["ghost", "direct"])
@pytest.mark.parametrize("segment", ["timm", "with reuse", "ends in a linear layer"])
def test_activation_checkpointing_is_exact(segment: str, mode: str, two_backwards: bool) -> None:
    layer_scale = None if segment == "ends in a linear layer" else 0.5
    model, images = transformer(init_values=layer_scale), images_of(4)
    if segment == "with reuse":  # block 0 again, in a segment of its own

        class Again(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model.norm

            def forward(self, tokens: Tensor) -> Tensor:
                again = torch.utils.checkpoint.checkpoint(
                    model.blocks[0], tokens + model.pos_embed, use_reentrant=False
                )
                return self.inner(again)

        model.norm = Again()
    plain = ClippedGradientSum(model, FlatClipping(1.0), mode=mode)
    plain.accumulate(losses_of(model, images))
    model.set_grad_checkpointing()
    engine = ClippedGradientSum(model, FlatClipping(1.0), mode=mode, two_backwards=two_backwards)
    per_image = engine.accumulate(losses_of(model, images))
    torch.testing.assert_close(engine.flat_sum, plain.flat_sum, rtol=1e-12, atol=1e-15)
    assert_equals_reference(model, engine, images, per_image)


def test_dropout_and_drop_path_are_exact() -> None:
    """With the same random state, the batched loss and the engine drop the same numbers."""
    model, images = transformer(drop_rate=0.2, drop_path_rate=0.3, attn_drop_rate=0.1), images_of(4)
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    torch.manual_seed(5)
    engine.accumulate(losses_of(model, images))
    torch.manual_seed(5)
    losses = losses_of(model, images)()
    parameters = list(model.parameters())
    expected = torch.zeros_like(engine.flat_sum)
    for loss in losses:
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        expected += engine.clipping.factors(flat.norm()[None]) * flat
    torch.testing.assert_close(engine.flat_sum, expected, rtol=1e-10, atol=1e-13)


def test_the_model_is_left_as_it_was() -> None:
    """No .grad, no hook, no changed module: a plain step afterwards is a plain step."""
    model, images = transformer(), images_of(3)
    losses_of(model, images)().sum().backward()
    plain = {name: each.grad.clone() for name, each in model.named_parameters()}
    before = {name: each.clone() for name, each in model.state_dict().items()}
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    engine.accumulate(losses_of(model, images))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain[name])
        assert not parameter._backward_hooks
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    model.zero_grad()
    losses_of(model, images)().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain[name])


def test_zero_starts_again() -> None:
    model, images = transformer(), images_of(3)
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    engine.accumulate(losses_of(model, images))
    once = engine.flat_sum.clone()
    engine.zero_()
    assert engine.flat_sum.count_nonzero() == 0
    engine.accumulate(losses_of(model, images))
    assert torch.equal(engine.flat_sum, once)


def test_the_independence_check_changes_nothing() -> None:
    """The extra backward of a model's first microbatch leaves no trace in the sum."""
    model, images = transformer(), images_of(5)
    sums = []
    for checks in (True, False):
        engine = ClippedGradientSum(model, FlatClipping(1.0), checks_independence=checks)
        engine.accumulate(losses_of(model, images))
        sums.append(engine.flat_sum)
    assert torch.equal(*sums)


@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_losses_are_those_of_a_plain_autocast_forward(
    dtype: torch.dtype, mode: str
) -> None:
    model, images = transformer().float(), images_of(3).float()
    engine = ClippedGradientSum(model, FlatClipping(1.0), mode=mode)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        per_image = engine.accumulate(losses_of(model, images))
        plain = losses_of(model, images)()
    assert torch.equal(per_image.losses_M, plain)
    assert engine.flat_sum.dtype == torch.float32


BAD_LOSSES: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "a scalar": (lambda losses: losses.mean(), "one loss per image"),
    "one per token": (lambda losses: losses[:, None].expand(3, 5), "one loss per image"),
    "none": (lambda losses: losses[:0], "M >= 1"),
    "no tensor": (lambda losses: losses.tolist(), "floating-point tensor, not list"),
    "integers": (lambda losses: losses.long(), "floating-point tensor"),
    "detached": (lambda losses: losses.detach(), "do not depend on any trainable parameter"),
}


@pytest.mark.parametrize("case", BAD_LOSSES)
def test_bad_losses_are_refused(case: str) -> None:
    change, message = BAD_LOSSES[case]
    model, images = transformer(), images_of(3)
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    with pytest.raises(ValueError, match=message):
        engine.accumulate(lambda: change(losses_of(model, images)()))
    assert engine.flat_sum.count_nonzero() == 0


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(2), "one entry per loss"),
        (torch.ones(3, 1), "one entry per loss"),
        (torch.tensor([1.0, -0.5, 1.0]), r"\[0, 1\]"),
        (torch.tensor([1.0, 1.5, 1.0]), r"\[0, 1\]"),
        (torch.tensor([1.0, math.nan, 1.0]), r"\[0, 1\]"),
    ],
)
def test_bad_weights_are_refused(weights: Tensor, message: str) -> None:
    model, images = transformer(), images_of(3)
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    with pytest.raises(ValueError, match=message):
        engine.accumulate(losses_of(model, images), weights)
    assert engine.flat_sum.count_nonzero() == 0


def test_bad_options_are_refused() -> None:
    model = transformer()
    with pytest.raises(ValueError, match="mode must be 'auto', 'ghost' or 'direct', not 'fast'"):
        ClippedGradientSum(model, FlatClipping(1.0), mode="fast")
    with pytest.raises(ValueError, match="flops_per_byte"):
        ClippedGradientSum(model, FlatClipping(1.0), flops_per_byte=0.0)


def test_the_balance_of_this_machine_can_be_measured() -> None:
    """It is a ratio of two times, so only its use is exact: the sum stays what it is."""
    balance = measured_flops_per_byte("cpu", rounds=1)
    assert math.isfinite(balance) and balance > 0
    model, images = transformer(), images_of(3)
    sums = []
    for chosen in ({"flops_per_byte": balance, "room": math.inf}, {}):
        clipped = ClippedGradientSum(model, FlatClipping(0.5), **chosen)
        clipped.accumulate(lambda: model(images).square().sum(dim=1))
        sums.append(clipped.flat_sum)
    torch.testing.assert_close(*sums, rtol=1e-10, atol=1e-14)
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        measured_flops_per_byte("cpu", rounds=0)
