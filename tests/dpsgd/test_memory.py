"""What a microbatch read is let go of: nothing outlives `accumulate`."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from pipeline.dpsgd import engine
from pipeline.dpsgd.clipping import FlatClipping
from pipeline.dpsgd.engine import ClippedGradientSum


def test_no_activation_outlives_the_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations, autograd nodes and the tape form a cycle; waiting for the garbage collector
    would let gigabytes pile up, so the engine breaks it.
    """
    tapes: list[weakref.ref[Any]] = []
    original = engine.Tape

    def remember(**fields: Any) -> Any:
        tape = original(**fields)
        tapes.append(weakref.ref(tape))
        return tape

    monkeypatch.setattr(engine, "Tape", remember)
    model = VisionTransformer(
        img_size=8, patch_size=4, num_classes=2, embed_dim=8, depth=1, num_heads=2
    )
    clipped = ClippedGradientSum(model, FlatClipping(1.0))
    images = torch.ones(5, 3, 8, 8)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            clipped.accumulate(lambda: model(images).square().sum(dim=1))
        assert len(tapes) == 3
        assert not [tape for tape in tapes if tape() is not None]
    finally:
        gc.enable()
