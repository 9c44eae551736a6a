"""How much more a private step computes than a plain one: counted, so the same on every machine."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/step.py, whose counter knows products that torch's does not."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("step")


@pytest.mark.parametrize(("size", "most"), [("nano", 1.15), ("base", 1.10)])
def test_flops_of_the_private_step(step: Any, size: str, most: float) -> None:
    """At 224 px, over forward and backward of the plain step."""
    work = step.Workload(
        size=size, image_size=224, microbatch=2, logical_batch=2, vmap_chunk=1, device="cpu"
    )
    counted = {}
    for name in ("plain", "ours"):
        run = step.METHODS[name].make(work)
        run()  # the first step of ours proves besides that images are independent
        counted[name] = step.count_flops(run)
        assert step.count_flops(run) == counted[name]  # deterministic
    assert 1.0 < counted["ours"] / counted["plain"] <= most


LEFT_NK, RIGHT_KP, SUM_NP = torch.ones(3, 5), torch.ones(5, 7), torch.ones(3, 7)
HEADS = torch.ones(2, 4, 6, 8)  # images, heads, tokens, features of a head


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda: LEFT_NK @ RIGHT_KP, 2 * 3 * 5 * 7),
        (lambda: SUM_NP.clone().addmm_(LEFT_NK, RIGHT_KP), 2 * 3 * 5 * 7),
        (lambda: SUM_NP[None].clone().baddbmm_(LEFT_NK[None], RIGHT_KP[None]), 2 * 3 * 5 * 7),
        (lambda: LEFT_NK @ RIGHT_KP[:, 0], 2 * 3 * 5),
        (lambda: SUM_NP[:, 0].clone().addmv_(LEFT_NK, RIGHT_KP[:, 0]), 2 * 3 * 5),
        (
            lambda: torch.nn.functional.scaled_dot_product_attention(HEADS, HEADS, HEADS),
            2 * 2 * (2 * 4 * 6 * 6 * 8),
        ),
    ],
    ids=["mm", "addmm_", "baddbmm_", "mv", "addmv_", "attention"],
)
def test_every_product_is_counted(step: Any, compute: Callable[[], Tensor], expected: int) -> None:
    """Twice the number of multiplications."""
    assert step.count_flops(compute) == expected


def test_a_product_that_nobody_counts_is_refused(step: Any) -> None:
    """Else an engine that uses it would look cheaper than it is."""
    with pytest.raises(step.Unavailable, match=r"aten\.addbmm"):
        step.count_flops(lambda: SUM_NP.addbmm(LEFT_NK[None], RIGHT_KP[None]))
