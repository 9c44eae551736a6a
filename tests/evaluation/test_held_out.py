"""The held-out loss: fixed masks, its interval, its subset."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pipeline.evaluation.held_out import held_out_loss
from pipeline.models.mae import MaskedAutoencoder
from pipeline.models.sizes import SIZES
from tests.evaluation.fake_store import make_store


def make_model() -> MaskedAutoencoder:
    model = MaskedAutoencoder(SIZES["micro"], image_size=12, patch_size=3)
    model.initialise(torch.Generator().manual_seed(1))
    return model


def test_held_out_masks_depend_on_the_record_alone() -> None:
    store, model = make_store(40, seed=5), make_model()
    whole = held_out_loss(model, store)
    losses: list[float] = []
    for position in range(0, 40, 2):
        two = make_store(40, seed=5)
        for other in set(range(40)) - {position, position + 1}:
            two.contents[other] = b"not an image"
        pair = held_out_loss(model, two)
        apart = (pair.interval[1] - pair.loss) / 1.95996  # half the distance of the two losses
        losses += [pair.loss - apart, pair.loss + apart]
    assert whole.loss == pytest.approx(math.fsum(losses) / 40, rel=1e-5)
    half = 1.95996 * np.std(losses, ddof=1) / math.sqrt(40)
    np.testing.assert_allclose(whole.interval, (whole.loss - half, whole.loss + half), rtol=1e-4)


def test_held_out_loss_of_a_subset() -> None:
    store, model = make_store(40, seed=5), make_model()
    part = held_out_loss(model, store, max_images=10, seed=1)
    assert part.num_images == 10
    assert part == held_out_loss(model, store, max_images=10, seed=1)
    assert part.loss != held_out_loss(model, store, max_images=10, seed=2).loss


def test_a_set_without_readable_images_is_refused() -> None:
    broken = make_store(12, seed=1, name="broken")
    broken.contents = [bytes([i]) for i in range(12)]
    with pytest.raises(ValueError, match="'broken' has 0 readable"):
        held_out_loss(make_model(), broken)
