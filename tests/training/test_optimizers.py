"""The schedule is a pure function of the step; optimizer state survives and is reset as asked."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pipeline import recipe
from pipeline.training.optimizers import (
    learning_rate,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
    set_rate,
)

ADAMW = recipe.Optimizer(learning_rate=1e-2, weight_decay=0.1)
SGD = recipe.Optimizer(name="sgd", learning_rate=1e-2, weight_decay=0.1)


def trained(model: nn.Module, steps: int = 3) -> torch.optim.Optimizer:
    optimizer = make_optimizer(model.named_parameters(), ADAMW)
    set_rate(optimizer, 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    return optimizer


def test_schedule_of_the_paper() -> None:
    def at(step: int) -> float:
        return learning_rate(step, peak=2.0, num_steps=6000, warmup_steps=1000, schedule="cosine")

    assert at(0) == pytest.approx(2.0 / 1000)
    assert at(999) == pytest.approx(1 + math.cos(math.pi * 999 / 6000))
    assert at(3000) == pytest.approx(1.0)
    assert at(5999) < 1e-6
    flat = learning_rate(5, peak=2.0, num_steps=10, warmup_steps=0, schedule="constant")
    assert flat == 2.0


def test_weight_decay_spares_vectors() -> None:
    optimizer = make_optimizer(nn.Linear(3, 2).named_parameters(), ADAMW)
    decays = {g["params"][0].ndim: g["weight_decay"] for g in optimizer.param_groups}
    assert decays == {2: 0.1, 1: 0.0}


def test_state_survives_and_is_reset_as_asked() -> None:
    model = nn.Linear(3, 2)
    before = trained(model)
    saved = optimizer_tensors(before, model.named_parameters())
    for reset in ("none", "m", "all"):
        fresh = make_optimizer(model.named_parameters(), ADAMW)
        restore_optimizer(fresh, model.named_parameters(), saved, reset)  # type: ignore[arg-type]
        if reset == "all":
            assert not fresh.state
            continue
        state, old = fresh.state[model.weight], before.state[model.weight]
        assert torch.equal(state["exp_avg_sq"], old["exp_avg_sq"])
        assert state["step"] == old["step"] == 3
        is_kept = torch.equal(state["exp_avg"], old["exp_avg"])
        assert is_kept if reset == "none" else not state["exp_avg"].any()


def test_restored_optimizer_takes_the_same_step() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = trained(model)
    twin.load_state_dict(model.state_dict())
    other = make_optimizer(twin.named_parameters(), ADAMW)
    saved = optimizer_tensors(optimizer, model.named_parameters())
    restore_optimizer(other, twin.named_parameters(), saved)
    for each, opt in ((model, optimizer), (twin, other)):
        set_rate(opt, 1e-2)
        opt.zero_grad()
        each(torch.ones(2, 3)).square().sum().backward()
        opt.step()
    assert torch.equal(model.weight, twin.weight)


def test_state_of_another_shape_is_refused() -> None:
    saved = optimizer_tensors(trained(nn.Linear(3, 2)), nn.Linear(3, 2).named_parameters())
    model = nn.Linear(3, 2)
    saved = {f"{n}|exp_avg": torch.zeros(7, 7) for n, _ in model.named_parameters()}
    with pytest.raises(ValueError, match="reset_optimizer"):
        restore_optimizer(
            make_optimizer(model.named_parameters(), ADAMW), model.named_parameters(), saved
        )


@pytest.mark.parametrize("config", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_a_number_does_not_feel_where_its_tensor_is_cut(config: recipe.Optimizer) -> None:
    """So that shards of the state give the bits of the whole."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(7, 200_003, generator=generator)
    cuts = torch.randint(1, 2_000, (400,), generator=generator).cumsum(0)
    found = []
    for edges in ([], [100_001], [1, 2, 3], [edge for edge in cuts.tolist() if edge < len(start)]):
        parameters = [nn.Parameter(part.clone()[None]) for part in start.tensor_split(edges)]
        optimizer = make_optimizer([("w", each) for each in parameters], config)
        set_rate(optimizer, 1e-2)
        for gradient in gradients:
            for parameter, part in zip(parameters, gradient.tensor_split(edges), strict=True):
                parameter.grad = part.clone()[None]
            optimizer.step()
        found.append(torch.cat([each.detach()[0] for each in parameters]))
    assert all(torch.equal(each, found[0]) for each in found)
