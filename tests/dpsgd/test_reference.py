"""The specification itself, against torch.func and against a gradient written down by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pipeline.dpsgd import AutomaticClipping, FlatClipping, reference_clipped_sum
from pipeline.dpsgd.clipping import MARGIN


def test_equals_torch_func() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3)).double()
    inputs = torch.randn(6, 4, 5, dtype=torch.float64)
    weights = torch.tensor([1.0, 0.5, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    parameters = {name: each.detach() for name, each in model.named_parameters()}

    def loss(values: dict[str, Tensor], image: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (image,)).square().mean()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, inputs)
    flat = torch.cat([gradients[name].flatten(1) for name in parameters], dim=1)
    norms = flat.norm(dim=1)
    for clipping in (FlatClipping(0.1), AutomaticClipping(0.1)):
        expected = ((clipping.factors(norms) * weights)[:, None] * flat).sum(0)
        found = reference_clipped_sum(
            model, lambda i: model(inputs[i]).square().mean(), 6, clipping, weights
        )
        torch.testing.assert_close(found.flat_sum_P, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found.norms_M, norms, rtol=1e-12, atol=0)


def test_by_hand() -> None:
    """Loss w . x has gradient x: (3, 4) has norm 5, (0.3, 0.4) norm 0.5, and NaN adds nothing."""
    weight = nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.float64))
    inputs = torch.tensor([[3.0, 4.0], [0.3, 0.4], [math.nan, 1.0]], dtype=torch.float64)
    found = reference_clipped_sum(
        [("weight", weight)], lambda i: weight @ inputs[i], 3, FlatClipping(1.0)
    )
    expected = MARGIN / 5 * inputs[0] + inputs[1]
    torch.testing.assert_close(found.flat_sum_P, expected, rtol=1e-14, atol=0)
    assert found.factors_M.tolist() == [MARGIN / 5, 1.0, 0.0]
    assert found.losses_M[:2].tolist() == (inputs[:2] @ weight).tolist()
