"""Pitfall 13: no trainable parameter escapes: each is clipped exactly, or the model is refused."""

from __future__ import annotations

import re
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


class Model(nn.Module):
    """Whatever `body` computes from the module and tokens [M, T, 6]; one loss per image."""

    def __init__(self, body: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.vector = nn.Parameter(torch.rand(6) + 0.5)
        self.inside = nn.Sequential(nn.ModuleList([nn.Linear(6, 6)])[0], nn.LayerNorm(6))
        self.register_buffer("statistics", torch.zeros(6))
        self.queue = [torch.zeros(6, dtype=torch.float64)]
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self, tokens).square().mean((1, 2))


class OwnFunction(torch.autograd.Function):
    """What a fused kernel looks like from outside."""

    @staticmethod
    def forward(ctx: object, inputs: Tensor, scale: Tensor) -> Tensor:
        return inputs.detach().clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.sum((0, 1))


class OwnLayerNorm(nn.LayerNorm):
    """A subclass with its own arithmetic."""

    def forward(self, inputs: Tensor) -> Tensor:
        centred = inputs - inputs.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.weight


def made_before(model: Model, tokens: Tensor) -> Tensor:
    return tokens * model.made_before


def ema(model: Model, tokens: Tensor) -> Tensor:
    outputs = model.inside(tokens)
    with torch.no_grad():
        model.statistics.mul_(0.9).add_(outputs.mean((0, 1)))
    return outputs


def replaced_buffer(model: Model, tokens: Tensor) -> Tensor:
    model.statistics = tokens.mean((0, 1))
    return model.inside(tokens)


def in_place(model: Model, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        model.vector.mul_(tokens.mean())
    return tokens * model.vector


def behind_data(model: Model, tokens: Tensor) -> Tensor:
    outputs = model.inside(tokens)
    model.statistics.data.add_(outputs.detach().mean((0, 1)))
    return outputs


def parameter_behind_data(model: Model, tokens: Tensor) -> Tensor:
    outputs = tokens * model.vector
    model.vector.data[0] = outputs.detach().mean()
    return outputs


def written_as_out(model: Model, tokens: Tensor) -> Tensor:
    torch.mean(tokens, (0, 1), out=model.statistics.data)
    return model.inside(tokens)


def remembers(model: Model, tokens: Tensor) -> Tensor:
    model.last = tokens.mean((0, 1))
    return model.inside(tokens)


def remembers_in_a_list(model: Model, tokens: Tensor) -> Tensor:
    model.queue[0] = model.queue[0] + tokens.mean((0, 1))
    return model.inside(tokens)


def remembers_in_place(model: Model, tokens: Tensor) -> Tensor:
    model.queue[0].add_(tokens.mean((0, 1)))
    return model.inside(tokens)


def scripted(model: Model, tokens: Tensor) -> Tensor:
    return model.inside(tokens) * model.scripted(tokens)


REFUSED: dict[str, tuple[Callable[[Model, Tensor], Tensor], str]] = {
    "einsum": (
        lambda m, x: torch.einsum("mti,oi->mto", x, m.weight),
        "einsum with trainable parameter 'weight'",
    ),
    "prelu": (
        lambda m, x: F.prelu(x.transpose(1, 2), m.vector),
        "prelu with trainable parameter 'vector'",
    ),
    "bilinear": (
        lambda m, x: F.bilinear(x, x, m.weight[None].expand(6, 6, 6)),
        "bilinear with trainable parameter 'weight'",
    ),
    "setitem": (
        lambda m, x: x.clone().index_put((torch.tensor([0]),), m.vector),
        "index_put with trainable parameter 'vector'",
    ),
    "own function": (
        lambda m, x: OwnFunction.apply(m.inside(x), m.vector),
        "'vector' past every rule",
    ),
    "in place": (in_place, "mul_ with trainable parameter 'vector': it changes the parameter"),
    "running statistics": (ema, "'statistics'"),
    "replaced buffer": (replaced_buffer, "'statistics'"),
    "buffer behind .data": (behind_data, "changed 'statistics'"),
    "parameter behind .data": (parameter_behind_data, "changed 'vector'"),
    "buffer as out": (written_as_out, "changed 'statistics'"),
    "attribute": (remembers, "attribute 'last' of a Model"),
    "list": (remembers_in_a_list, "attribute 'queue' of a Model"),
    "list in place": (remembers_in_place, "attribute 'queue' of a Model"),
    "batch norm": (
        lambda m, x: F.batch_norm(m.inside(x).transpose(1, 2), None, None, training=True),
        "batch_norm.*eval",
    ),
    "reentrant checkpoint": (
        lambda m, x: torch.utils.checkpoint.checkpoint(
            m.inside, x.requires_grad_(), use_reentrant=True
        ),
        "use_reentrant=False",
    ),
    "join along images": (
        lambda m, x: torch.cat([x, m.weight[None, :4]]),
        "cat.*'weight'.*image dimension",
    ),
    "gradient inside": (
        lambda m, x: torch.autograd.grad(m.inside(x.requires_grad_()).sum(), x)[0] * m.vector,
        "inside the loss",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_use_without_a_rule_is_refused_by_name(case: str) -> None:
    body, message = REFUSED[case]
    model = Model(body)
    tokens = torch.randn(3, 4, 6, dtype=torch.float64)
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    with pytest.raises(UnsupportedOperationError, match=re.compile(message, re.DOTALL)):
        engine.accumulate(lambda: model(tokens))
    assert engine.flat_sum.count_nonzero() == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_tensor_computed_before_the_forward_is_refused() -> None:
    model = Model(made_before)
    model.made_before = model.vector * 2.0
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    with pytest.raises(UnsupportedOperationError, match="'vector' past every rule"):
        engine.accumulate(lambda: model(torch.randn(3, 4, 6, dtype=torch.float64)))
    assert engine.flat_sum.count_nonzero() == 0
    assert model.vector.grad is None


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_module_is_refused() -> None:
    model = Model(scripted)
    model.scripted = torch.jit.script(nn.Linear(6, 6).double())
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    with pytest.raises(UnsupportedOperationError, match=r"'scripted\.(weight|bias)'"):
        engine.accumulate(lambda: model(torch.randn(3, 4, 6, dtype=torch.float64)))
    assert engine.flat_sum.count_nonzero() == 0


def test_a_trainable_parameter_of_another_model_is_refused() -> None:
    """The backward would leave its gradient, without clipping or noise, in `.grad`."""
    model, other = Model(ACCEPTED["nested containers"]), nn.Linear(6, 6).double()
    tokens = torch.randn(3, 4, 6, dtype=torch.float64)
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    with pytest.raises(
        UnsupportedOperationError, match=r"linear uses .* shape \(6, 6\) that is not"
    ):
        engine.accumulate(lambda: model(other(tokens)))
    assert other.weight.grad is None and engine.flat_sum.count_nonzero() == 0
    other.requires_grad_(False)
    engine.accumulate(lambda: model(other(tokens)))
    assert engine.flat_sum.count_nonzero() > 0


def cached(model: Model, tokens: Tensor) -> Tensor:
    """Constants that are made once, as position tables are."""
    if not hasattr(model, "angles"):
        model.angles = torch.arange(6, dtype=torch.float64).sin()
    return model.inside(tokens) * model.angles


ACCEPTED: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "nested containers": lambda m, x: m.inside(x),
    "raw parameter": lambda m, x: (x @ m.weight.T).relu() * m.vector + m.weight[2],
    "left product": lambda m, x: m.weight[:4, :4] @ x,
    "plain number of a parameter": lambda m, x: x * m.vector * float(m.vector.detach().sum()),
    "no gradient": lambda m, x: m.inside(x) + m.weight.detach()[0],
    "penalty": lambda m, x: m.inside(x) + m.weight.square().mean(),
    "cached constants": cached,
    "in-place sum": lambda m, x: m.inside(x).mul_(2.0).add_(m.vector),
    "where": lambda m, x: torch.where(x > 0, m.inside(x), m.vector),
    "chosen per image": lambda m, x: x + m.weight[(x[:, :, 0] > 0).long()],
    "stacked": lambda m, x: torch.stack([m.inside(x), m.vector.expand_as(x)], 1).flatten(1, 2),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_is_accepted_is_exact(case: str) -> None:
    model = Model(ACCEPTED[case])
    tokens = torch.randn(3, 4, 6, dtype=torch.float64)
    clipping = FlatClipping(0.05)
    engine = ClippedGradientSum(model, clipping)
    engine.accumulate(lambda: model(tokens))
    expected = reference_clipped_sum(model, lambda i: model(tokens[i : i + 1])[0], 3, clipping)
    assert expected.flat_sum_P.count_nonzero() > 0
    torch.testing.assert_close(engine.flat_sum, expected.flat_sum_P, rtol=1e-10, atol=1e-13)


def test_a_layer_norm_subclass_is_exact() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), OwnLayerNorm(6, bias=False)).double()
    tokens = torch.randn(3, 4, 6, dtype=torch.float64)
    clipping = FlatClipping(0.05)
    engine = ClippedGradientSum(model, clipping)
    engine.accumulate(lambda: model(tokens).exp().mean((1, 2)))
    expected = reference_clipped_sum(
        model, lambda i: model(tokens[i : i + 1]).exp().mean(), 3, clipping
    )
    torch.testing.assert_close(engine.flat_sum, expected.flat_sum_P, rtol=1e-10, atol=1e-13)


def test_a_changed_set_of_parameters_is_refused() -> None:
    model = Model(ACCEPTED["nested containers"])
    tokens = torch.randn(3, 4, 6, dtype=torch.float64)
    engine = ClippedGradientSum(model, FlatClipping(1.0))
    model.inside[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="set of trainable parameters changed"):
        engine.accumulate(lambda: model(tokens))
    model.inside[0].weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="set of trainable parameters changed"):
        engine.accumulate(lambda: model(tokens))
    assert engine.flat_sum.count_nonzero() == 0
