"""Pitfall 6: fixed positions were trained after all, in released code."""

from __future__ import annotations

import copy

import pytest
import torch

from pipeline.models.mae import MaskedAutoencoder
from pipeline.models.sizes import SIZES

POSITIONS = ("encoder.pos_embed", "decoder_positions")


def test_positions_are_bit_identical_after_training() -> None:
    """Guarantee 2 of MaskedAutoencoder, with every way in that a training loop has."""
    model = MaskedAutoencoder(SIZES["micro"], image_size=12, patch_size=3)
    model.requires_grad_(True)  # what a careless fine-tuning script does
    before = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 12, 12), torch.rand(4, 16)).mean().backward()
        optimizer.step()
    for name in POSITIONS:
        assert torch.equal(model.get_buffer(name), before.get_buffer(name)), name
    changed = [
        n for n, p in model.named_parameters() if not torch.equal(p, before.get_parameter(n))
    ]
    assert len(changed) == len(list(model.parameters()))


@pytest.mark.parametrize("name", POSITIONS)
def test_no_parameter_list_holds_positions(name: str) -> None:
    model = MaskedAutoencoder(SIZES["micro"], image_size=12, patch_size=3)
    assert name not in dict(model.named_parameters())
    assert not model.get_buffer(name).requires_grad
