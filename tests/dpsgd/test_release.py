"""What a release is, who can make one, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.dpsgd import (
    ParameterLayout,
    PublicGradient,
    ReleasedGradient,
    mix,
    public_gradient,
    rank_slice,
    release_gradient,
)


class Noise:
    """Coordinate k of step s is k + s."""

    def gaussian(self, step: int, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop, dtype=np.float64) + step


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


LAYOUT = ParameterLayout.of(model())


def released(**changes: object) -> ReleasedGradient:
    given: dict[str, object] = {
        "step": 2,
        "noise_std": 0.5,
        "divisor": 4.0,
        "noise_source": Noise(),
        "layout": LAYOUT,
    }
    flat_sum = changes.pop("flat_sum", torch.ones(8))
    return release_gradient(flat_sum, **{**given, **changes})  # type: ignore[arg-type]


def public(value: float = 1.0) -> PublicGradient:
    return public_gradient(torch.full((8,), value), divisor=2.0, layout=LAYOUT, is_public=True)


def test_sum_plus_noise_over_the_divisor() -> None:
    flat_sum = torch.ones(8)
    gradient = released(flat_sum=flat_sum)
    expected = (1.0 + 0.5 * (torch.arange(8) + 2.0)) / 4.0
    assert torch.equal(gradient.flat, expected)
    assert gradient.flat.dtype == torch.float32
    assert gradient.step == 2
    assert gradient.noise_std_per_coordinate == 0.125
    assert torch.equal(flat_sum, torch.ones(8))


def test_assigned_in_place_of_a_gradient() -> None:
    house = model()
    gradient = released()
    gradient.assign(house)
    assert torch.equal(house.weight.grad, gradient.flat[:6].view(2, 3))
    assert torch.equal(house.bias.grad, gradient.flat[6:])
    with pytest.raises(ValueError, match="trainable parameters"):
        gradient.assign(nn.Linear(3, 2, bias=False))
    with pytest.raises(ValueError, match="trainable parameters"):
        gradient.assign(nn.Linear(2, 3))
    half = model().bfloat16()
    gradient.assign(half)
    assert half.weight.grad.dtype == torch.bfloat16


def test_nobody_else_can_make_a_released_gradient() -> None:
    with pytest.raises(ValueError, match=r"release_gradient\(...\) or mix"):
        ReleasedGradient(flat=torch.ones(8), step=0, noise_std_per_coordinate=1.0, layout=LAYOUT)


@pytest.mark.parametrize("is_public", [False, None, "yes", 1])
def test_a_public_gradient_needs_a_public_manifest(is_public: object) -> None:
    with pytest.raises(ValueError, match="marked public"):
        PublicGradient(flat=torch.ones(8), layout=LAYOUT, is_public=is_public)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="marked public"):
        public_gradient(torch.ones(8), divisor=1.0, layout=LAYOUT, is_public=is_public)  # type: ignore[arg-type]


def test_public_gradient_is_the_mean() -> None:
    gradient = public(3.0)
    assert torch.equal(gradient.flat, torch.full((8,), 1.5))
    house = model()
    gradient.assign(house)
    assert torch.equal(house.bias.grad, torch.full((2,), 1.5))


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_mix(alpha: float) -> None:
    mixed = mix(alpha, public(), released())
    expected = alpha * public().flat + (1 - alpha) * released().flat
    torch.testing.assert_close(mixed.flat, expected)
    assert math.isclose(mixed.noise_std_per_coordinate, (1 - alpha) * 0.125)
    assert mixed.step == 2


def test_bad_mixes_are_refused() -> None:
    for alpha in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="alpha"):
            mix(alpha, public(), released())
    other = ParameterLayout.of(nn.Linear(7, 1))
    stranger = public_gradient(torch.ones(8), divisor=1.0, layout=other, is_public=True)
    with pytest.raises(ValueError, match="different layouts"):
        mix(0.5, stranger, released())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_std": 0.0}, "noise_std"),
        ({"noise_std": math.inf}, "noise_std"),
        ({"divisor": 0.0}, "divisor"),
        ({"divisor": math.nan}, "divisor"),
        ({"step": -1}, "step"),
        ({"flat_sum": torch.ones(9)}, r"\(8,\)"),
        ({"flat_sum": torch.tensor([1.0] * 7 + [math.nan])}, "not finite"),
        ({"flat_sum": torch.tensor([1.0] * 7 + [math.inf])}, "not finite"),
    ],
)
def test_bad_releases_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        released(**changes)


def test_a_step_is_released_once_per_noise_source() -> None:
    noise = Noise()
    released(noise_source=noise, step=4)
    released(noise_source=noise, step=7)
    for step in (7, 5, 4):
        with pytest.raises(ValueError, match=f"step {step} was already used"):
            released(noise_source=noise, step=step)
    released(noise_source=Noise(), step=4)


def test_one_process_holds_the_whole_slice() -> None:
    assert rank_slice(8) == (0, 8)
