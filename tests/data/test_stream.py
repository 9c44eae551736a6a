"""stream.py in one process: order, shapes, reading ahead, ending; refusals."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest

from pipeline.data.shards import ShardStore
from pipeline.data.stream import (
    StreamConfig,
    Unit,
    num_units_of_step,
    rank_slice,
    thread_pool_units,
    unit_record_ids,
)
from pipeline.data.views import PixelReader, read_views
from pipeline.privacy.sampling import PoissonPlan, ShufflePlan

KEY = bytes(range(32))


def config_of(store: ShardStore, **changes: Any) -> StreamConfig:
    fields: dict[str, Any] = {
        "plan": PoissonPlan(key=KEY, num_records=store.num_records, sampling_probability=0.1),
        "store_root": str(store.root),
        "augmentation_key": KEY[::-1],
        "world_size": 1,
        "microbatch_size": 4,
        "microbatches_per_unit": 2,
        "image_size": 24,
        "num_steps": 6,
        "is_private": True,
    }
    return StreamConfig(**{**fields, **changes})


@pytest.mark.parametrize("num_records", [0, 1, 7, 64, 1000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
def test_shares_and_units_are_a_partition(num_records: int, world_size: int, public_store) -> None:
    ids = np.arange(num_records, dtype=np.int64) * 3
    shares = [rank_slice(ids, rank, world_size) for rank in range(world_size)]
    assert (np.concatenate(shares) == ids).all()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    config = config_of(public_store, world_size=world_size)
    num_units = num_units_of_step(num_records, config)
    units = [
        unit_record_ids(ids, unit, rank, config)
        for rank in range(world_size)
        for unit in range(num_units)
    ]
    assert all(len(unit) == config.rows_per_unit for unit in units)
    delivered = np.concatenate(units)
    assert (np.sort(delivered[delivered >= 0]) == ids).all()
    assert num_units == max(1, -(-max(map(len, shares)) // config.rows_per_unit))


def test_units_come_in_order_with_fixed_shapes(private_store: ShardStore) -> None:
    config = config_of(private_store, first_step=3)
    units = list(thread_pool_units(config, num_threads=3))
    expected = [
        (step, number)
        for step in range(3, 9)
        for number in range(num_units_of_step(len(config.plan.record_ids(step)), config))
    ]
    assert [(unit.step, unit.unit) for unit in units] == expected
    for unit in units:
        assert unit.images.shape == (8, 3, 24, 24) and unit.images.dtype == np.uint8
        assert unit.weights.shape == unit.labels.shape == unit.record_ids.shape == (8,)
        assert unit.weights.dtype == np.float32 and unit.labels.dtype == np.int64
        is_padding = unit.record_ids < 0
        assert (unit.weights == np.where(is_padding, 0, 1)).all()
        assert (unit.images[is_padding] == 0).all() and (unit.labels[is_padding] == -1).all()
        real = unit.record_ids[~is_padding]
        assert (unit.labels[~is_padding] == private_store.labels(real)).all()


def test_central_views_without_augmentation(private_store: ShardStore) -> None:
    config = config_of(private_store, augment=False, num_steps=2)
    for unit in thread_pool_units(config):
        real = unit.record_ids[unit.record_ids >= 0]
        views, is_decoded = read_views(PixelReader(private_store), real, image_size=24)
        assert is_decoded.all() and (unit.images[: len(real)] == views).all()


def test_views_without_augmentation_are_equal(private_store: ShardStore) -> None:
    """They still differ in their masks, which the model's side draws."""
    one = thread_pool_units(config_of(private_store, augment=False))
    three = thread_pool_units(config_of(private_store, augment=False, views_per_image=3))
    for single, several in zip(one, three, strict=True):
        assert (several.images == np.repeat(single.images, 3, axis=0)).all()
        assert (several.record_ids == single.record_ids).all()
        assert (several.weights == single.weights).all()


def test_records_are_decoded_once_for_all_views(private_store: ShardStore, monkeypatch) -> None:
    read: list[int] = []
    begin = PixelReader.begin
    monkeypatch.setattr(
        PixelReader, "begin", lambda self, ids: (read.append(len(ids)), begin(self, ids))[1]
    )
    units = list(thread_pool_units(config_of(private_store, views_per_image=5)))
    assert sum(read) == sum((unit.record_ids >= 0).sum() for unit in units)
    assert all(unit.images.shape == (8 * 5, 3, 24, 24) for unit in units)


def test_public_phases_use_the_same_stream(public_store: ShardStore) -> None:
    plan = ShufflePlan(key=KEY, num_records=public_store.num_records, batch_size=20)
    config = config_of(public_store, plan=plan, is_private=False, num_steps=6)
    ids = np.concatenate([unit.record_ids for unit in thread_pool_units(config)])
    assert (np.sort(ids[ids >= 0]) == np.arange(120)).all(), "one epoch, each record once"


def test_cache_changes_nothing(private_store: ShardStore, public_store: ShardStore) -> None:
    """With a cache, without, and with one too small: the same pixels; mixed shapes too."""
    for store in (private_store, public_store):
        ids = np.arange(0, store.num_records, 3)
        readers = [PixelReader(store), PixelReader(store, 0)]
        views = [read_views(readers[i], ids, image_size=24)[0] for i in (0, 0, 1, 1)]
        assert all((view == views[0]).all() for view in views)
    assert readers[0]._pixels is not None and readers[1]._pixels is None


def test_cached_records_are_not_read_again(public_store: ShardStore, monkeypatch) -> None:
    reader = PixelReader(public_store)
    ids = np.array([3, 9, 27])
    first = reader.read(ids)
    monkeypatch.setattr(public_store, "read", lambda ids: pytest.fail("read again"))
    assert (reader.read(ids[::-1])[::-1] == first).all()


def test_closing_ends_the_threads(private_store: ShardStore) -> None:
    before = threading.active_count()
    units = thread_pool_units(config_of(private_store, num_steps=100), num_threads=2)
    first = next(units)
    assert isinstance(first, Unit) and threading.active_count() > before
    units.close()
    assert threading.active_count() == before


def test_reading_ahead_is_bounded(private_store: ShardStore, monkeypatch) -> None:
    asked: list[int] = []
    record_ids = PoissonPlan.record_ids

    def counting(self: PoissonPlan, step: int) -> np.ndarray:
        asked.append(step)
        return record_ids(self, step)

    monkeypatch.setattr(PoissonPlan, "record_ids", counting)
    units = thread_pool_units(config_of(private_store, num_steps=10**9, prefetch_units=3))
    next(units)
    assert max(asked) <= 3
    units.close()


def test_config_hides_its_keys_and_is_picklable(private_store: ShardStore) -> None:
    config = config_of(private_store)
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    for text in (repr(config), str(config)):
        assert repr(KEY) not in text and repr(KEY[::-1]) not in text and KEY.hex() not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 0}, "world_size"),
        ({"views_per_image": 0}, "views_per_image"),
        ({"microbatch_size": 0}, "microbatch_size"),
        ({"num_steps": -1}, "num_steps"),
        ({"crop_scale": (0.0, 1.0)}, "crop_scale"),
        ({"is_private": False}, "Poisson"),
    ],
)
def test_impossible_settings_are_refused(private_store, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(private_store, **changes)


def test_plan_and_dataset_must_fit(private_store: ShardStore, public_store: ShardStore) -> None:
    other = PoissonPlan(key=KEY, num_records=241, sampling_probability=0.1)
    with pytest.raises(ValueError, match="num_records=241"):
        thread_pool_units(config_of(private_store, plan=other))
    shuffled = ShufflePlan(key=KEY, num_records=240, batch_size=5)
    with pytest.raises(ValueError, match="marked private"):
        thread_pool_units(config_of(private_store, plan=shuffled, is_private=False))
    with pytest.raises(ValueError, match="rank=1"):
        thread_pool_units(config_of(public_store), rank=1)
