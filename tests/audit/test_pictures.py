"""Canaries' pictures: what is read off the pixels is the record."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.audit.pictures import MAX_PICTURES, SIDE, canary_store, numbers_of
from pipeline.data.shards import ShardStore
from pipeline.data.stream import StreamConfig, thread_pool_units
from pipeline.models.mae import normalise_images
from pipeline.privacy.sampling import PoissonPlan


def test_pictures_show_their_record() -> None:
    """Of every record, after prepare, JPEG, the stream and normalisation."""
    num = 700
    config = StreamConfig(
        plan=PoissonPlan(key=bytes(32), num_records=num, sampling_probability=1.0),
        store_root=canary_store(num),
        augmentation_key=bytes(32),
        world_size=1,
        microbatch_size=num,
        microbatches_per_unit=1,
        image_size=SIDE,
        num_steps=1,
        is_private=True,
        augment=False,
    )
    (unit,) = thread_pool_units(config, 0, 1)
    images = torch.from_numpy(unit.images)
    for numbers in (
        numbers_of(images, threshold=127.5),
        numbers_of(normalise_images(images), threshold=0.0),
    ):
        assert np.array_equal(numbers, unit.record_ids)
    assert sorted(unit.record_ids) == list(range(num))


def test_the_pictures_are_public_and_made_once() -> None:
    assert canary_store(9) == canary_store(9)
    manifest = ShardStore(canary_store(9)).manifest
    assert manifest.visibility == "public" and manifest.num_records == 9


@pytest.mark.parametrize("num", [0, MAX_PICTURES + 1])
def test_more_canaries_than_numbers_are_refused(num: int) -> None:
    with pytest.raises(ValueError, match=f"num_canaries={num}"):
        canary_store(num)
