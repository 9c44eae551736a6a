"""Pitfall 19: what one image adds does not depend on the other images of its microbatch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from dpsgd_small_mae import batch, losses_of, small_mae
from torch import Tensor, nn

from pipeline.dpsgd import (
    ClippedGradientSum,
    FlatClipping,
    UnsupportedOperationError,
    reference_clipped_sum,
)


@pytest.mark.parametrize("mode", ["ghost", "direct"])
def test_changing_one_image_leaves_the_others_bit_identical(mode: str) -> None:
    model = small_mae(torch.float32)
    engine = ClippedGradientSum(model, FlatClipping(0.1), mode=mode)
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0])  # what all but image 2 add
    sums = []
    for change in (0.0, 1.0, 1e4, float("nan")):
        images, order, counts = batch(4, torch.float32)
        images[2] += change
        engine.zero_()
        engine.accumulate(losses_of(model, (images, order, counts)), weights)
        sums.append(engine.flat_sum.clone())
    for changed in sums[1:]:
        assert torch.equal(changed, sums[0])


@pytest.mark.parametrize("num_views", [1, 2, 4])
def test_views_of_one_image_are_averaged_before_the_clip(num_views: int) -> None:
    """K augmented views are one image: one clipped gradient, of the mean of their losses."""
    model = small_mae()
    inputs = batch(3 * num_views)
    clipping = FlatClipping(0.05)

    def loss_per_image() -> Tensor:
        return model(*inputs).view(3, num_views).mean(1)

    def loss_of_image(image: int) -> Tensor:
        rows = slice(image * num_views, (image + 1) * num_views)
        return model(*(each[rows] for each in inputs)).mean()

    engine = ClippedGradientSum(model, clipping)
    per_image = engine.accumulate(loss_per_image)
    expected = reference_clipped_sum(model, loss_of_image, 3, clipping)
    torch.testing.assert_close(per_image.norms_M, expected.norms_M, rtol=1e-10, atol=0)
    torch.testing.assert_close(engine.flat_sum, expected.flat_sum_P, rtol=1e-10, atol=1e-13)


class Coupled(nn.Module):
    """Models whose images see each other."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.attention = nn.Linear(6, 18)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.kind == "batch norm of the images":
            tokens = F.batch_norm(tokens.transpose(1, 2), None, None, training=True).transpose(1, 2)
        outputs = self.linear(tokens)
        if self.kind == "batch norm of the images":
            return outputs.square().mean((1, 2))
        if self.kind == "batch norm":
            return self.norm(outputs.transpose(1, 2)).square().mean((1, 2))
        if self.kind == "contrastive":
            means = F.normalize(outputs.mean(1), dim=1)
            return F.cross_entropy(means @ means.T, torch.arange(len(means)), reduction="none")
        if self.kind == "centred":
            return (outputs - outputs.mean(0)).square().mean((1, 2))
        if self.kind == "images second":
            return self.linear(tokens.transpose(0, 1)).square().mean((0, 2))
        query, key, value = self.attention(tokens.transpose(0, 1)).chunk(3, dim=2)
        mixed = F.scaled_dot_product_attention(query, key, value)  # over images, not tokens
        return mixed.transpose(0, 1).square().mean((1, 2))


@pytest.mark.parametrize("num_tokens", [4, 8])
@pytest.mark.parametrize(
    "kind",
    [
        "batch norm",
        "batch norm of the images",  # where no gradient passes: refused by name
        "contrastive",
        "centred",
        "images second",
        "attention over images",
    ],
)
def test_coupled_images_are_refused(kind: str, num_tokens: int) -> None:
    model = Coupled(kind)
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    tokens = torch.randn(4, num_tokens, 6)
    with pytest.raises(UnsupportedOperationError, match="imag"):
        engine.accumulate(lambda: model(tokens))
    assert engine.flat_sum.count_nonzero() == 0


def test_the_same_layers_uncoupled_are_accepted() -> None:
    """The refusal comes from the coupling and not from the layers."""
    model = Coupled("batch norm").eval()
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    tokens = torch.randn(4, 8, 6)
    engine.accumulate(lambda: model(tokens))
    assert engine.flat_sum.count_nonzero() > 0


def test_the_check_is_made_again_for_another_shape() -> None:
    """With one image nothing can be coupled; with two it can."""
    model = Coupled("contrastive")
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    engine.accumulate(lambda: model(torch.ones(1, 4, 6)))
    with pytest.raises(UnsupportedOperationError, match="couples"):
        engine.accumulate(lambda: model(torch.randn(2, 4, 6)))


class Late(nn.Module):
    """Couples its images through layers whose gradient is zero, or absent, at first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 1)
        self.uses_all = True
        nn.init.zeros_(self.outer.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.inner(tokens)
        hidden = hidden - hidden.mean(0)
        if not self.uses_all:
            return self.outer(tokens).square().mean((1, 2))
        return self.outer(hidden).mean((1, 2)).exp()


def test_a_coupling_hidden_behind_zero_weights_is_found_once_they_move() -> None:
    model = Late()
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    tokens = torch.randn(4, 3, 6)
    engine.accumulate(lambda: model(tokens))  # no gradient passes the zero weights
    torch.nn.init.ones_(model.outer.weight)
    with pytest.raises(UnsupportedOperationError, match="couples the images"):
        engine.accumulate(lambda: model(tokens))


def test_a_coupling_that_padding_cannot_show_is_found_with_the_first_images() -> None:
    model = Coupled("contrastive")
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    engine.accumulate(lambda: model(torch.full((4, 3, 6), torch.nan)), torch.zeros(4))
    with pytest.raises(UnsupportedOperationError, match="couples"):
        engine.accumulate(lambda: model(torch.randn(4, 3, 6)))


def test_a_layer_that_joins_the_loss_later_is_checked_before_it_counts() -> None:
    model = Late()
    torch.nn.init.ones_(model.outer.weight)
    model.uses_all = False
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    tokens = torch.randn(4, 3, 6)
    engine.accumulate(lambda: model(tokens))
    before = engine.flat_sum.clone()
    model.uses_all = True
    for message in ("for the first time", "couples"):
        with pytest.raises(UnsupportedOperationError, match=message):
            engine.accumulate(lambda: model(tokens))
    assert torch.equal(engine.flat_sum, before)


def test_proven_once_is_checked_no_more() -> None:
    """The extra backward is for the first microbatch, not for every one."""
    model, inputs = small_mae(), batch(4)
    num_backwards = 0
    images = inputs[0].requires_grad_()

    def count(gradient: Tensor) -> None:
        nonlocal num_backwards
        num_backwards += 1

    images.register_hook(count)
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    for expected in (2, 3, 4):
        engine.accumulate(losses_of(model, (images, *inputs[1:])))
        assert num_backwards == expected


class Gated(nn.Module):
    """Adds what the images have in common, through a gate that is closed at first (ReZero)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.inner(tokens)
        return (hidden + self.gate.detach() * hidden.mean(0)).square().mean((1, 2))


def test_a_coupling_that_begins_in_training_is_found() -> None:
    """Proven with the first microbatch; asked again in logical batches 2, 4, 8, ..."""
    model = Gated()
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    tokens = torch.randn(4, 3, 6)
    for _ in range(3):  # batches 1, 2, 3: the gate is closed
        engine.zero_()
        engine.accumulate(lambda: model(tokens))
        assert engine.flat_sum.count_nonzero() > 0
    model.gate.data.fill_(0.5)
    engine.zero_()
    with pytest.raises(UnsupportedOperationError, match="couples the images"):
        engine.accumulate(lambda: model(tokens))
    assert engine.flat_sum.count_nonzero() == 0


def test_a_microbatch_of_another_size_is_checked_too() -> None:
    linear = nn.Linear(6, 6)

    def losses(tokens: Tensor) -> Tensor:
        hidden = linear(tokens)
        if len(tokens) > 4:  # a fast path for large batches
            hidden = hidden - hidden.mean(0)
        return hidden.square().mean((1, 2))

    engine = ClippedGradientSum(linear, FlatClipping(1.0))
    engine.accumulate(lambda: losses(torch.randn(4, 3, 6)))
    before = engine.flat_sum.clone()
    with pytest.raises(UnsupportedOperationError, match="couples the images"):
        engine.accumulate(lambda: losses(torch.randn(8, 3, 6)))
    assert torch.equal(engine.flat_sum, before)


class Normalised(torch.autograd.Function):
    """Divides the gradient by its norm over all images."""

    @staticmethod
    def forward(ctx: object, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


def by_tensor_hook(linear: nn.Linear, tokens: Tensor) -> Tensor:
    outputs = linear(tokens)
    outputs.register_hook(lambda gradient: gradient / gradient.norm())
    return outputs


def by_module_hook(linear: nn.Linear, tokens: Tensor) -> Tensor:
    if not linear._backward_pre_hooks:
        linear.register_full_backward_pre_hook(lambda _, gs: (gs[0] / gs[0].norm(),))
    return linear(tokens)


def by_function(linear: nn.Linear, tokens: Tensor) -> Tensor:
    return Normalised.apply(linear(tokens))


@pytest.mark.parametrize("two_backwards", [False, True])
@pytest.mark.parametrize("couple", [by_tensor_hook, by_module_hook, by_function])
def test_a_backward_that_couples_the_images_is_refused(
    couple: Callable[[nn.Linear, Tensor], Tensor], two_backwards: bool
) -> None:
    linear = nn.Linear(6, 6)
    engine = ClippedGradientSum(linear, FlatClipping(1.0), two_backwards=two_backwards)
    tokens = torch.randn(4, 3, 6)
    for _ in range(2):  # it does not pass for proven after the first refusal
        with pytest.raises(UnsupportedOperationError, match="depends on the losses of others"):
            engine.accumulate(lambda: couple(linear, tokens).square().mean((1, 2)))
        assert engine.flat_sum.count_nonzero() == 0


def test_a_backward_hook_that_keeps_the_images_apart_is_accepted() -> None:
    linear = nn.Linear(6, 6)
    engine = ClippedGradientSum(linear, FlatClipping(1.0))
    tokens = torch.randn(5, 3, 6)
    weights = torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0])
    tokens[2, 0, 0] = float("inf")

    def losses() -> Tensor:
        outputs = linear(tokens)
        outputs.register_hook(lambda gradient: gradient / gradient.norm(dim=(1, 2), keepdim=True))
        return outputs.square().mean((1, 2))

    engine.accumulate(losses, weights)
    assert engine.flat_sum.count_nonzero() > 0
