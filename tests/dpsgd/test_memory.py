"""What a microbatch read is let go of: nothing outlives `accumulate`."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.dpsgd import engine
from pipeline.dpsgd.clipping import FlatClipping
from pipeline.dpsgd.engine import ClippedGradientSum


def test_no_activation_outlives_the_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations, autograd nodes and the tape form a cycle that the garbage collector misses."""
    tapes: list[weakref.ref[Any]] = []
    original = engine.Tape

    def remember(**fields: Any) -> Any:
        tape = original(**fields)
        tapes.append(weakref.ref(tape))
        return tape

    monkeypatch.setattr(engine, "Tape", remember)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))
    clipped = ClippedGradientSum(model, FlatClipping(1.0))
    images = torch.ones(5, 3)
    for _ in range(3):
        clipped.accumulate(lambda: model(images).square().sum(dim=1))
    gc.collect()
    assert len(tapes) == 3
    assert not [tape for tape in tapes if tape() is not None]
