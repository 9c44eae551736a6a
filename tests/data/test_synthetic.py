"""synthetic.py: deterministic by (family, seed, index, size), in colour, any size, varied."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.data.synthetic import FAMILIES, generate_batch, generate_image


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [8, 33, 100])
def test_an_image_is_the_same_in_any_batch(family: str, size: int) -> None:
    batch = generate_batch(family, 3, 10, 25, size)
    assert batch.shape == (25, size, size, 3) and batch.dtype == np.uint8
    assert (generate_batch(family, 3, 17, 5, size) == batch[7:12]).all()
    assert (generate_image(family, 3, 34, size) == batch[24]).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_images_differ_and_have_colour_and_structure(family: str) -> None:
    batch = generate_batch(family, 0, 0, 64, 32).astype(float)
    other = generate_batch(family, 1, 0, 64, 32).astype(float)
    flat = batch.reshape(64, -1)
    assert len(np.unique(flat, axis=0)) == 64
    assert (flat != other.reshape(64, -1)).mean() > 0.9
    assert np.ptp(batch, axis=3).mean() > 10, "colour"
    assert np.median(batch.std(axis=(1, 2)).mean(1)) > 10, "structure"


def test_families_are_unrelated_and_at_least_three() -> None:
    assert len(FAMILIES) >= 3
    images = [generate_image(family, 0, 0, 32) for family in FAMILIES]
    assert len({image.tobytes() for image in images}) == len(FAMILIES)


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="clouds"):
        generate_batch("clouds", 0, 0, 1, 32)
    with pytest.raises(ValueError, match="size=7"):
        generate_batch("textures", 0, 0, 1, 7)
    assert generate_batch("textures", 0, 5, 0, 32).shape == (0, 32, 32, 3)
