"""How much a private step computes over a plain one, counted and not timed: the same anywhere."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(("size", "limit"), [("nano", 1.15), ("base", 1.10)])
def test_a_private_step_computes_hardly_more_than_a_plain_one(
    monkeypatch: pytest.MonkeyPatch, size: str, limit: float
) -> None:
    """Matrix products, convolutions and attentions of ours over plain, at 224 pixels."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    step = importlib.import_module("step")
    problem = step.make_problem(size, 2, "cpu", 2)
    plain, ours = (step.ready(name, problem).step for name in ("plain", "ours"))
    ratio = step.counted_flops(ours) / step.counted_flops(plain)
    assert 1.0 < ratio <= limit


def test_the_count_is_that_of_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain step of one linear layer, and products that torch's counter leaves out."""
    import torch

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    counted_flops = importlib.import_module("step").counted_flops
    left, right, total = torch.ones(3, 5), torch.ones(5, 7), torch.zeros(3, 7)
    vector = torch.ones(5)
    heads = [torch.ones(2, 4, 6, 8) for _ in range(3)]
    assert counted_flops(lambda: left @ right) == 2 * 3 * 5 * 7
    assert counted_flops(lambda: total.addmm_(left, right)) == 2 * 3 * 5 * 7
    assert counted_flops(lambda: torch.zeros(3).addmv_(left, vector)) == 2 * 3 * 5
    assert counted_flops(lambda: left.mv(vector)) == 2 * 3 * 5
    attention = torch.nn.functional.scaled_dot_product_attention
    assert counted_flops(lambda: attention(*heads)) == 2 * (2 * 2 * 4 * 6 * 6 * 8)
