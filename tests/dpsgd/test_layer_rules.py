"""Every operation with a rule, in each of its forms, equals the specification in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.dpsgd import (
    ClippedGradientSum,
    FlatClipping,
    UnsupportedOperationError,
    reference_clipped_sum,
)

M = 3


class Case(nn.Module):
    """Named parameters of given shapes, and a body that uses them on images [M, ...]."""

    def __init__(self, body: Callable[[Case, Tensor], Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            value = torch.randn(shape, dtype=torch.float64, generator=generator)
            setattr(self, name, nn.Parameter(value))
        table = torch.arange(16).view(4, 4) % 5
        self.register_buffer("places", table)
        self.body = body

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.body(self, images)
        return outputs.flatten(1).tanh().square().mean(1)


def tokens() -> Tensor:
    return torch.randn(M, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def pictures() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(M, 4, 9, 8, dtype=torch.float64, generator=generator)


def ids() -> Tensor:
    return torch.tensor([[0, 1, 1, 4], [2, 2, 2, 2], [3, 0, 4, 3]])


def check(model: nn.Module, images: Tensor) -> None:
    """Equal to the reference with ghost and with direct norms, with images grad on and off."""
    clipping = FlatClipping(0.01)
    for needs_gradient in (False, True):
        if needs_gradient and not images.is_floating_point():
            continue
        images = images.detach().requires_grad_(needs_gradient)
        expected = reference_clipped_sum(
            model, lambda i, images=images: model(images[i : i + 1])[0], len(images), clipping
        )
        assert (expected.factors_M < 1).any()
        for mode in ("ghost", "direct", "auto"):
            engine = ClippedGradientSum(model, clipping, mode=mode)
            engine.accumulate(lambda images=images: model(images))
            torch.testing.assert_close(engine.flat_sum, expected.flat_sum_P, rtol=1e-10, atol=1e-13)


LINEAR: dict[str, Case] = {
    "tokens": Case(lambda m, x: F.linear(x, m.w, m.b), w=(5, 6), b=(5,)),
    "vectors": Case(lambda m, x: F.linear(x[:, 0], m.w, m.b), w=(5, 6), b=(5,)),
    "no bias": Case(lambda m, x: F.linear(x, m.w), w=(5, 6)),
    "bias alone": Case(lambda m, x: F.linear(x, torch.eye(6).double()[:5], m.b), b=(5,)),
    "4 dimensions": Case(lambda m, x: F.linear(x[:, :, None].expand(-1, -1, 2, -1), m.w), w=(5, 6)),
    "over tokens": Case(lambda m, x: F.linear(x.transpose(1, 2), m.w, m.b), w=(3, 4), b=(3,)),
    "windows": Case(lambda m, x: F.linear(x.reshape(-1, 2, 6), m.w).reshape(len(x), -1), w=(5, 6)),
    "flattened": Case(lambda m, x: F.linear(x.flatten(0, 1), m.w).view(len(x), -1), w=(5, 6)),
    "cast weight": Case(lambda m, x: F.linear(x, m.w.to(x.dtype).contiguous()), w=(5, 6)),
    "transposed weight": Case(lambda m, x: F.linear(x, m.w.t()), w=(6, 5)),
    "sliced weight": Case(lambda m, x: F.linear(x, m.w[:5], m.b[1:6]), w=(7, 6), b=(7,)),
    "joined bias": Case(
        lambda m, x: F.linear(x, m.w, torch.cat([m.b, torch.zeros(3).double(), m.b])),
        w=(7, 6),
        b=(2,),
    ),
    "matmul": Case(lambda m, x: x @ m.w, w=(6, 5)),
    "matmul of vectors": Case(lambda m, x: torch.matmul(x[:, 0], m.w), w=(6, 5)),
    "mm": Case(lambda m, x: torch.mm(x[:, 0], m.w), w=(6, 5)),
    "left matmul": Case(lambda m, x: m.w @ x, w=(5, 4)),
    "matmul with a batch of one": Case(lambda m, x: x @ m.w, w=(1, 6, 5)),
    "query": Case(
        lambda m, x: F.scaled_dot_product_attention(m.q.expand(len(x), -1, -1), x, x), q=(1, 2, 6)
    ),
    "weight norm": Case(
        lambda m, x: F.linear(x, m.v * (m.g / m.v.norm(dim=1, keepdim=True))), v=(5, 6), g=(5, 1)
    ),
}

BARE: dict[str, Case] = {
    "class token": Case(
        lambda m, x: torch.cat([m.p.expand(len(x), -1, -1), x.sin()], 1), p=(1, 1, 6)
    ),
    "repeated": Case(lambda m, x: torch.cat([x, m.p.repeat(len(x), 2, 1)], dim=1), p=(1, 1, 6)),
    "expanded and cast": Case(
        lambda m, x: torch.cat([m.p.expand(len(x), 3, -1).to(x.dtype), x], 1), p=(1, 1, 6)
    ),
    "expanded vector": Case(lambda m, x: torch.stack([x, m.p.expand_as(x)], 2), p=(6,)),
    "sum then expanded": Case(
        lambda m, x: torch.cat([(m.p + m.q).expand(len(x), -1, -1), x], 1), p=(1, 1, 6), q=(6,)
    ),
    "expanded then scaled": Case(
        lambda m, x: torch.cat([2 * m.p.expand(len(x), 2, -1), x], 1), p=(1, 1, 6)
    ),
    "positions": Case(lambda m, x: x + m.p, p=(1, 4, 6)),
    "positions, no batch": Case(lambda m, x: m.p + x, p=(4, 6)),
    "some positions": Case(lambda m, x: x[:, 1:] + m.p[:, 1:], p=(1, 4, 6)),
    "layer scale": Case(lambda m, x: x.sin() * m.p, p=(6,)),
    "layer scale in place": Case(lambda m, x: x.sin().mul_(m.p), p=(6,)),
    "scalar": Case(lambda m, x: x * m.p.exp(), p=()),
    "per token": Case(lambda m, x: x / (1 + m.p.square()), p=(4, 1)),
    "difference": Case(lambda m, x: (1 - m.p) - x, p=(6,)),
    "product of two": Case(lambda m, x: x * m.p * m.q, p=(6,), q=(4, 1)),
    "mixed": Case(lambda m, x: torch.lerp(x, m.p, m.q.sigmoid()), p=(6,), q=(4, 1)),
    "where": Case(lambda m, x: torch.where(x > 0, m.p, x * m.p), p=(6,)),
    "mask token": Case(
        lambda m, x: (mask := (x[..., :1] > 0).double()) * m.p + (1 - mask) * x, p=(1, 1, 6)
    ),
    "row": Case(lambda m, x: x + m.p[2], p=(5, 6)),
    "indexed by a buffer": Case(lambda m, x: x[..., :4] + m.p[m.places], p=(5,)),
    "relative positions": Case(
        lambda m, x: F.scaled_dot_product_attention(
            *[x[:, None].expand(-1, 2, -1, -1)] * 3, m.p[m.places].permute(2, 0, 1)[None]
        ),
        p=(5, 2),
    ),
    "indexed by the image": Case(lambda m, x: x + m.p[(x[..., 0] > 0).long()], p=(2, 6)),
    "gathered by the image": Case(
        lambda m, x: x * m.p.index_select(0, (x[:, 0, 0] > 0).long())[:, None], p=(2, 6)
    ),
    "reshaped": Case(lambda m, x: x + m.p.view(1, 4, 6).flatten(1).unflatten(1, (4, 6)), p=(24,)),
    "transposed": Case(lambda m, x: x + m.p.T.contiguous(), p=(6, 4)),
    "small network on positions": Case(
        lambda m, x: x + F.linear(m.places.double(), m.w, m.b).relu(), w=(6, 4), b=(6,)
    ),
    "expanded and transformed": Case(
        lambda m, x: x * m.p[None].expand(len(x), -1, -1).relu(), p=(4, 6)
    ),
}

CONVOLUTION: dict[str, Case] = {
    "patches": Case(lambda m, x: F.conv2d(x, m.w, m.b, stride=3), w=(5, 4, 3, 3), b=(5,)),
    "patches, cropped": Case(lambda m, x: F.conv2d(x, m.w, stride=(2, 3)), w=(5, 4, 2, 3)),
    "1 x 1": Case(lambda m, x: F.conv2d(x, m.w, m.b), w=(5, 4, 1, 1), b=(5,)),
    "overlapping": Case(lambda m, x: F.conv2d(x, m.w, m.b, 2, 1), w=(5, 4, 3, 2), b=(5,)),
    "dilated": Case(lambda m, x: F.conv2d(x, m.w, m.b, 1, 2, 2), w=(5, 4, 3, 3), b=(5,)),
    "same": Case(lambda m, x: F.conv2d(x, m.w, padding="same"), w=(5, 4, 3, 5)),
    "valid": Case(lambda m, x: F.conv2d(x, m.w, padding="valid"), w=(5, 4, 3, 2)),
    "groups": Case(lambda m, x: F.conv2d(x, m.w, m.b, 2, 1, 1, 2), w=(6, 2, 3, 3), b=(6,)),
    "depthwise": Case(lambda m, x: F.conv2d(x, m.w, m.b, 1, 2, 2, 4), w=(4, 1, 3, 3), b=(4,)),
    "bias alone": Case(lambda m, x: F.conv2d(x, torch.ones(5, 4, 2, 2).double(), m.b), b=(5,)),
    "two images' rows": Case(
        lambda m, x: F.conv2d(x.reshape(-1, 2, 9, 8), m.w, padding=1).flatten(1).view(len(x), -1),
        w=(3, 2, 3, 3),
    ),
    "standardised": Case(
        lambda m, x: F.conv2d(x, m.w - m.w.mean((1, 2, 3), keepdim=True)), w=(5, 4, 3, 3)
    ),
    "1-D": Case(lambda m, x: F.conv1d(x[:, 0], m.w, m.b, 2, 1), w=(5, 9, 3), b=(5,)),
    "1-D, groups": Case(
        lambda m, x: F.conv1d(x[:, 0], m.w, m.b, 1, "same", 1, 3), w=(6, 3, 3), b=(6,)
    ),
    "1-D, same, even": Case(lambda m, x: F.conv1d(x[:, 0], m.w, None, 1, "same"), w=(5, 9, 4)),
    "group norm": Case(lambda m, x: F.group_norm(x, 2, m.w, m.b), w=(4,), b=(4,)),
    "group norm, weight alone": Case(lambda m, x: F.group_norm(x, 1, m.w), w=(4,)),
    "batch norm with fixed statistics": Case(
        lambda m, x: F.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double(), m.w, m.b),
        w=(4,),
        b=(4,),
    ),
    "layer norm of channels": Case(
        lambda m, x: F.layer_norm(x.permute(0, 2, 3, 1), (4,), m.w, m.b), w=(4,), b=(4,)
    ),
    "layer norm of pictures": Case(
        lambda m, x: F.layer_norm(x, (9, 8), m.w, m.b), w=(9, 8), b=(9, 8)
    ),
}

NORMS: dict[str, Case] = {
    "layer norm": Case(lambda m, x: F.layer_norm(x, (6,), m.w, m.b), w=(6,), b=(6,)),
    "layer norm of vectors": Case(
        lambda m, x: F.layer_norm(x[:, 0], (6,), m.w, m.b), w=(6,), b=(6,)
    ),
    "layer norm, weight alone": Case(lambda m, x: F.layer_norm(x, (6,), m.w), w=(6,)),
    "layer norm, bias alone": Case(lambda m, x: F.layer_norm(x, (6,), bias=m.b), b=(6,)),
    "torch.layer_norm": Case(lambda m, x: torch.layer_norm(x, (6,), m.w, m.b), w=(6,), b=(6,)),
    "layer norm of a transpose": Case(
        lambda m, x: F.layer_norm(x.transpose(1, 2), (4,), m.w, m.b), w=(4,), b=(4,)
    ),
    "root mean square norm": Case(lambda m, x: F.rms_norm(x, (6,), m.w, 1e-6), w=(6,)),
}

EMBEDDING: dict[str, Case] = {
    "table": Case(lambda m, x: F.embedding(x, m.t).sin(), t=(5, 6)),
    "padding row": Case(lambda m, x: F.embedding(x, m.t, padding_idx=2).sin(), t=(5, 6)),
    "negative padding row": Case(lambda m, x: F.embedding(x, m.t, padding_idx=-3), t=(5, 6)),
    "one id an image": Case(lambda m, x: F.embedding(x[:, 0], m.t), t=(5, 6)),
    "changed in place": Case(lambda m, x: F.embedding(x, m.t).add_(m.p), t=(5, 6), p=(6,)),
    "places and ids": Case(
        lambda m, x: F.embedding(x, m.t) + F.embedding(torch.arange(4), m.p), t=(5, 6), p=(4, 6)
    ),
}


@pytest.mark.parametrize("case", LINEAR)
def test_linear(case: str) -> None:
    check(LINEAR[case], tokens())


@pytest.mark.parametrize("case", BARE)
def test_bare_parameters(case: str) -> None:
    check(BARE[case], tokens())


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", CONVOLUTION)
def test_convolution_and_norms_of_pictures(case: str) -> None:
    check(CONVOLUTION[case], pictures())


@pytest.mark.parametrize("case", NORMS)
def test_norms(case: str) -> None:
    check(NORMS[case], tokens())


@pytest.mark.parametrize("case", EMBEDDING)
def test_embedding(case: str) -> None:
    check(EMBEDDING[case], ids())


REFUSED: dict[str, tuple[Case, Callable[[], Tensor], str]] = {
    "renormalised table": (
        Case(lambda m, x: F.embedding(x, m.t, max_norm=1.0), t=(5, 6)),
        ids,
        "max_norm",
    ),
    "frequency": (
        Case(lambda m, x: F.embedding(x, m.t, scale_grad_by_freq=True), t=(5, 6)),
        ids,
        "freq",
    ),
    "one picture": (
        Case(lambda m, x: F.conv2d(x[0], m.w)[None], w=(5, 4, 3, 3)),
        pictures,
        "must be a batch",
    ),
    "transposed convolution": (
        Case(lambda m, x: F.conv_transpose2d(x, m.w), w=(4, 5, 3, 3)),
        pictures,
        "conv_transpose2d",
    ),
    "instance norm with statistics": (
        Case(
            lambda m, x: F.instance_norm(
                x + m.w, torch.zeros(4).double(), torch.ones(4).double(), use_input_stats=True
            ),
            w=(4, 1, 1),
        ),
        pictures,
        "track_running_stats",
    ),
    "out": (Case(lambda m, x: torch.add(x, m.w, out=x.clone()), w=(6,)), tokens, "new tensor"),
    "a matrix of images": (
        Case(lambda m, x: (m.w @ x[:, 0])[None].expand(3, -1, -1), w=(2, 3)),
        tokens,
        "product",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    model, make_images, message = REFUSED[case]
    images = make_images()
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    with pytest.raises(UnsupportedOperationError, match=message):
        engine.accumulate(lambda: model(images))
    assert engine.flat_sum.count_nonzero() == 0
