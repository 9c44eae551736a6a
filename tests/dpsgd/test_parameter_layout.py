"""The flat vector: order, places, and what cannot be laid out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.dpsgd import ClippedGradientSum, ParameterLayout


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))


def test_in_the_order_of_named_parameters() -> None:
    layout = ParameterLayout.of(model())
    assert layout.names == ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight")
    assert layout.offsets == (0, 12, 16, 20, 24)
    assert layout.num_coordinates == 32
    assert layout.shapes[0] == (4, 3)


def test_frozen_and_tied_parameters_take_no_second_place() -> None:
    house = model()
    house[0].bias.requires_grad_(False)
    house.append(nn.Linear(4, 2, bias=False))
    house[3].weight = house[2].weight
    assert ParameterLayout.of(house).names == ("0.weight", "1.weight", "1.bias", "2.weight")


def test_views_share_memory_and_flatten_is_their_inverse() -> None:
    house = model()
    layout = ParameterLayout.of(house)
    flat = layout.flatten(dict(house.named_parameters()))
    for name, view in layout.views(flat).items():
        assert torch.equal(view, house.get_parameter(name))
    layout.views(flat)["1.bias"].fill_(7.0)
    assert flat[20:24].tolist() == [7.0] * 4
    with pytest.raises(ValueError, match=r"\(32,\), not \(31,\)"):
        layout.views(flat[:-1])
    with pytest.raises(ValueError, match=r"differ in \['1.bias'\]"):
        layout.flatten({name: p for name, p in house.named_parameters() if name != "1.bias"})


def test_equal_whether_from_a_module_or_from_pairs() -> None:
    house = model()
    assert ParameterLayout.of(house) == ParameterLayout.of(house.named_parameters())


@pytest.mark.parametrize("make", [ParameterLayout.of, lambda m: ClippedGradientSum(m, None)])
def test_models_that_cannot_be_laid_out(make: object) -> None:
    assert callable(make)
    frozen = model().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        make(frozen)
    mixed = model()
    mixed[2].double()
    with pytest.raises(ValueError, match="share one dtype"):
        make(mixed)
    elsewhere = model()
    elsewhere[2].to("meta")
    with pytest.raises(ValueError, match="share one device"):
        make(elsewhere)
    with pytest.raises(ValueError, match="'w' must be a real floating-point leaf"):
        make([("w", torch.ones(2, requires_grad=True) * 2)])
    with pytest.raises(ValueError, match="two different parameters are named 'w'"):
        make([("w", nn.Parameter(torch.ones(2))), ("w", nn.Parameter(torch.ones(2)))])
