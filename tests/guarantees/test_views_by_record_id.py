"""Pitfall 32: a view depends on (sub-key, step, record id, view), never on rank or position."""

from __future__ import annotations

import numpy as np

from pipeline.data.images import NUM_CROP_UNIFORMS, random_resized_crop_flip
from pipeline.data.shards import ShardStore
from pipeline.data.stream import StreamConfig, thread_pool_units
from pipeline.data.views import PixelReader
from pipeline.privacy.sampling import PoissonPlan, record_uniforms


def views_of(store: ShardStore, world_size: int = 1, key: bytes = b"a" * 32, **sizes: int) -> dict:
    """(step, record id) -> the bytes of its views, over all ranks."""
    num_views = sizes.get("views_per_image", 1)
    config = StreamConfig(
        plan=PoissonPlan(key=b"v" * 32, num_records=240, sampling_probability=0.2),
        store_root=str(store.root),
        augmentation_key=key,
        world_size=world_size,
        microbatch_size=sizes.get("microbatch_size", 8),
        microbatches_per_unit=sizes.get("microbatches_per_unit", 2),
        image_size=sizes.get("image_size", 24),
        num_steps=4,
        is_private=True,
        views_per_image=num_views,
    )
    return {
        (unit.step, record_id): unit.images[num_views * row : num_views * (row + 1)].tobytes()
        for rank in range(world_size)
        for unit in thread_pool_units(config, rank)
        for row, record_id in enumerate(unit.record_ids.tolist())
        if record_id >= 0
    }


def test_same_views_for_any_world_and_microbatch_size(private_store: ShardStore) -> None:
    expected = views_of(private_store)
    assert len(expected) > 100
    for world_size, sizes in (
        (2, {}),
        (3, {"microbatch_size": 5}),
        (8, {"microbatch_size": 1, "microbatches_per_unit": 1}),
    ):
        assert views_of(private_store, world_size, **sizes) == expected


def test_large_views_too(private_store: ShardStore) -> None:
    """Above 64 pixels another resize is used."""
    sizes = {"image_size": 70}
    assert views_of(private_store, 3, **sizes) == views_of(private_store, 1, **sizes)


def test_views_change_with_step_and_key(private_store: ShardStore) -> None:
    views = views_of(private_store)
    by_record: dict[int, set[bytes]] = {}
    for (_, record_id), view in views.items():
        by_record.setdefault(record_id, set()).add(view)
    times = np.bincount([record_id for _, record_id in views])
    assert sum(times >= 2) > 10
    assert sum(len(by_record[r]) == times[r] for r in by_record) > 0.95 * len(by_record)
    other = views_of(private_store, key=b"b" * 32)
    assert other.keys() == views.keys()
    assert sum(other[place] == views[place] for place in views) < 0.05 * len(views)


def test_several_views_of_an_image(private_store: ShardStore) -> None:
    """The first is the only one of a stream of one view; the others differ; none moves."""
    single = views_of(private_store)
    several = views_of(private_store, views_per_image=4)
    assert several.keys() == single.keys()
    length = len(next(iter(single.values())))
    num_distinct = 0
    for place, views in several.items():
        cut = [views[start : start + length] for start in range(0, 4 * length, length)]
        assert cut[0] == single[place]
        num_distinct += len(set(cut))
    assert num_distinct > 0.99 * 4 * len(several)
    for world_size, sizes in ((3, {"microbatch_size": 5}), (8, {"microbatch_size": 1})):
        assert views_of(private_store, world_size, views_per_image=4, **sizes) == several


def test_views_are_the_crops_of_their_own_uniforms(private_store: ShardStore) -> None:
    """Cropped here one by one: view v by the uniforms of (key, step, record id, v)."""
    found = views_of(private_store, views_per_image=3)
    for (step, record_id), views in list(found.items())[:20]:
        ids, expected = np.array([record_id]), b""
        (pixels,) = PixelReader(private_store).read(ids)
        for view in range(3):
            uniforms = record_uniforms(
                b"a" * 32, step, ids, "crop", num_values=NUM_CROP_UNIFORMS, view=view
            )
            expected += random_resized_crop_flip(pixels, uniforms[0], 24, (0.2, 1.0)).tobytes()
        assert views == expected
