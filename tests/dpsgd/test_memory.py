"""What a microbatch read is let go of: no activation outlives `accumulate`."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from pipeline.dpsgd.clipping import FlatClipping
from pipeline.dpsgd.engine import ClippedGradientSum


def test_no_activation_outlives_the_microbatch() -> None:
    """A cycle through autograd nodes is invisible to the garbage collector: it would pile up."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))
    clipped = ClippedGradientSum(model, FlatClipping(1.0))
    images = torch.ones(5, 3)
    seen: list[weakref.ref[Tensor]] = []

    def losses() -> Tensor:
        hidden = images
        for layer in model:
            hidden = layer(hidden)
            seen.append(weakref.ref(hidden))
        return hidden.square().sum(dim=1)

    clipped.accumulate(losses)
    assert len(seen) == 4
    assert not [activation for activation in seen if activation() is not None]
