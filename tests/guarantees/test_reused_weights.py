"""Pitfall 12: tied and reused weights give the gradient of the whole use, or are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.dpsgd import ClippedGradientSum, FlatClipping, reference_clipped_sum


class Tied(nn.Module):
    """An embedding that is also the output layer, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.hidden = nn.Linear(6, 6)
        self.output = nn.Linear(6, 9, bias=False)
        self.output.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.output(self.hidden(self.table(ids)).tanh())
        return F.cross_entropy(scores.transpose(1, 2), ids, reduction="none").mean(1)


class Recurrent(nn.Module):
    """One layer used five times, with different numbers of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(5, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        for _ in range(4):
            tokens = self.step(tokens).tanh()
        return self.step(tokens.mean(1)).square().sum(1)


class Autoencoder(nn.Module):
    """Decoder = transposed encoder, which also shares a bias with a third layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(7, 4)
        self.other = nn.Linear(4, 4)
        self.other.bias = self.encode.bias
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: Tensor) -> Tensor:
        code = self.norm(self.other(self.encode(tokens)))
        by_linear = F.linear(self.norm(code), self.encode.weight.t())
        by_product = code @ self.encode.weight
        return (by_linear - by_product + tokens).square().mean((1, 2))


class TwoConvolutions(nn.Module):
    """One kernel at two strides, and as a linear layer on flattened patches."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 2)

    def forward(self, images: Tensor) -> Tensor:
        weight, bias = self.convolution.weight, self.convolution.bias
        fine = self.convolution(images)
        coarse = F.conv2d(images, weight, bias, stride=2)
        linear = F.linear(images[:, :, :2, :2].flatten(1), weight.flatten(1), bias)
        return fine.square().mean((1, 2, 3)) + coarse.mean((1, 2, 3)) + linear.square().sum(1)


def ids() -> Tensor:
    return torch.tensor([[1, 2, 3, 1], [4, 4, 4, 4], [0, 8, 7, 8]])


CASES: list[tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = [
    (Tied, ids),
    (Recurrent, lambda: torch.randn(3, 6, 5, dtype=torch.float64)),
    (Autoencoder, lambda: torch.randn(3, 6, 7, dtype=torch.float64)),
    (TwoConvolutions, lambda: torch.randn(3, 2, 5, 5, dtype=torch.float64)),
]


@pytest.mark.parametrize("mode", ["auto", "ghost", "direct"])
@pytest.mark.parametrize(("make_model", "make_inputs"), CASES)
def test_equal_to_the_reference(
    make_model: Callable[[], nn.Module], make_inputs: Callable[[], Tensor], mode: str
) -> None:
    torch.manual_seed(0)
    model, inputs = make_model().double(), make_inputs()
    clipping = FlatClipping(0.05)
    engine = ClippedGradientSum(model, clipping, mode=mode)
    engine.accumulate(lambda: model(inputs))
    expected = reference_clipped_sum(model, lambda i: model(inputs[i : i + 1])[0], 3, clipping)
    assert (expected.factors_M < 1).any()
    torch.testing.assert_close(engine.flat_sum, expected.flat_sum_P, rtol=1e-10, atol=1e-12)
