"""Pitfalls 2 and 8: one plan for all ranks, each chosen record delivered exactly once.

The receipts (count and checksum of ids) of all units of a step must add up to the plan's. Every
way of losing or repeating rows that was met in other systems is planted here and must show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pipeline.data import stream
from pipeline.data.shards import ShardStore
from pipeline.data.stream import (
    DeliveryError,
    StreamConfig,
    Unit,
    ray_unit_iterators,
    thread_pool_units,
    unit_record_ids,
    units_from_iterator,
)
from pipeline.privacy.sampling import PoissonPlan, checksum

NUM_STEPS = 12


def config_of(
    store: ShardStore, world_size: int, num_steps: int = NUM_STEPS, views_per_image: int = 1
) -> StreamConfig:
    return StreamConfig(
        plan=PoissonPlan(key=b"s" * 32, num_records=240, sampling_probability=0.15),
        store_root=str(store.root),
        augmentation_key=b"a" * 32,
        world_size=world_size,
        microbatch_size=3,
        microbatches_per_unit=2,
        image_size=16,
        num_steps=num_steps,
        is_private=True,
        views_per_image=views_per_image,
    )


def wrong_steps(config: StreamConfig, ranks: Iterable[Iterable[Unit]]) -> list[int]:
    """Steps whose receipts over all ranks do not add up to the plan's."""
    received = {step: [0, 0] for step in config.steps}
    for units in ranks:
        for unit in units:
            count, proof = unit.receipt()
            received[unit.step][0] += count
            received[unit.step][1] += proof
    return [
        step
        for step, (count, proof) in received.items()
        if (ids := config.plan.record_ids(step)) is not None
        and (count != len(ids) or proof % 2**62 != checksum(ids))
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_thread_pools_deliver_the_plan(private_store: ShardStore, world_size: int) -> None:
    config = config_of(private_store, world_size)
    ranks = [list(thread_pool_units(config, rank)) for rank in range(world_size)]
    assert wrong_steps(config, ranks) == []
    # The same number of units on every rank, in every step.
    assert len({tuple((u.step, u.unit, u.num_units) for u in units) for units in ranks}) == 1
    # Disjoint slices: no record reaches two ranks in one step.
    for step in config.steps:
        ids = np.concatenate([u.record_ids for units in ranks for u in units if u.step == step])
        assert len(ids[ids >= 0]) == len(np.unique(ids[ids >= 0]))


def losing(units: Iterator[Unit]) -> Iterator[Unit]:
    for number, unit in enumerate(units):
        if number != 5:
            yield unit


def repeating(units: Iterator[Unit]) -> Iterator[Unit]:
    for number, unit in enumerate(units):
        yield unit
        if number == 5:
            yield unit


def swapping_a_row(units: Iterator[Unit]) -> Iterator[Unit]:
    """Another record in a record's place, as a cache shared between ranks would give."""
    for number, unit in enumerate(units):
        ids = unit.record_ids.copy()
        if number == 5:
            ids[0] = (ids[0] + 1) % 240
        yield dataclasses.replace(unit, record_ids=ids)


def dropping_a_row(units: Iterator[Unit]) -> Iterator[Unit]:
    for number, unit in enumerate(units):
        ids = unit.record_ids.copy()
        if number == 5:
            ids[np.flatnonzero(ids >= 0)[-1]] = -1
        yield dataclasses.replace(unit, record_ids=ids)


@pytest.mark.parametrize("fault", [losing, repeating, swapping_a_row, dropping_a_row])
def test_planted_faults_show_in_the_receipts(private_store: ShardStore, fault) -> None:
    config = config_of(private_store, 2)
    ranks = [fault(thread_pool_units(config, 0)), thread_pool_units(config, 1)]
    assert len(wrong_steps(config, ranks)) == 1


def test_two_ranks_with_the_same_rows_show(private_store: ShardStore) -> None:
    """Pitfall 2: every rank draws the same sample."""
    config = config_of(private_store, 2)
    ranks = [thread_pool_units(config, 0), thread_pool_units(config, 0)]
    assert len(wrong_steps(config, ranks)) == NUM_STEPS


def collect(config: StreamConfig, read: Callable = units_from_iterator) -> list[list[Unit]]:
    """All ranks of the Ray stream, read at the same time as ranks do."""
    iterators = ray_unit_iterators(config, num_cpus=2)
    with ThreadPoolExecutor(config.world_size) as pool:
        work = [
            pool.submit(lambda it, rank: list(read(it, config, rank)), it, rank)
            for rank, it in enumerate(iterators)
        ]
        return [future.result() for future in work]


def units_as_they_come(iterator, config: StreamConfig, rank: int) -> Iterator[Unit]:
    """A rank that does not look at the tags: only the receipts can show a fault."""
    for row in stream._rows_ahead(iterator, 4):
        step, unit, rank_of_unit, num_units = row["tags"].tolist()
        arrays = {name: row[name] for name in ("record_ids", "weights", "images", "labels")}
        yield Unit(step=step, unit=unit, rank=rank_of_unit, num_units=num_units, **arrays)


@pytest.mark.ray
@pytest.mark.parametrize(("world_size", "views_per_image"), [(2, 1), (3, 1), (2, 3)])
def test_ray_delivers_the_plan_and_the_same_bits(
    ray_local, private_store: ShardStore, world_size: int, views_per_image: int
) -> None:
    config = config_of(private_store, world_size, views_per_image=views_per_image)
    ranks = collect(config)
    assert wrong_steps(config, ranks) == []
    for rank, units in enumerate(ranks):
        expected = list(thread_pool_units(config, rank))
        assert len(units) == len(expected)
        for one, other in zip(units, expected, strict=True):
            for field in dataclasses.fields(Unit):
                ours, theirs = getattr(one, field.name), getattr(other, field.name)
                assert np.array_equal(ours, theirs), field.name


@pytest.mark.ray
@pytest.mark.parametrize("equal", [False, True])
def test_ray_split_into_equal_parts_drops_rows_and_shows(
    ray_local, private_store, monkeypatch, equal: bool
) -> None:
    """Pitfall 8, as Ray Train's own `datasets=` splits: equal=True loses what does not divide."""
    from ray.data import Dataset

    class RaggedPlan(stream._PlanTask):
        """Leaves out units that are all padding: ranks no longer have the same number of them."""

        def __call__(self, batch):
            rows = super().__call__(batch)
            config = self.config
            is_needed = [
                (unit_record_ids(config.plan.record_ids(step), unit, rank, config) >= 0).any()
                for step, unit, rank in zip(rows["step"], rows["unit"], rows["rank"], strict=True)
            ]
            return {name: column[is_needed] for name, column in rows.items()}

    split = Dataset.streaming_split
    monkeypatch.setattr(
        Dataset, "streaming_split", lambda self, n, **options: split(self, n, equal=equal)
    )
    monkeypatch.setattr(stream, "_PlanTask", RaggedPlan)
    config = dataclasses.replace(
        config_of(private_store, 3, num_steps=2), microbatch_size=1, microbatches_per_unit=1
    )
    assert sum(len(config.plan.record_ids(step)) for step in config.steps) % 3 != 0
    ranks = collect(config, units_as_they_come)
    assert wrong_steps(config, ranks) == ([1] if equal else [])


@pytest.mark.ray
def test_ray_unit_lost_or_out_of_order_is_caught(ray_local, private_store, monkeypatch) -> None:
    """A lost unit shifts every later one to another rank: the first wrong tag stops the rank."""

    class LosingPlan(stream._PlanTask):
        def __call__(self, batch):
            rows = super().__call__(batch)
            return {name: np.delete(column, 3) for name, column in rows.items()}

    monkeypatch.setattr(stream, "_PlanTask", LosingPlan)
    with pytest.raises(DeliveryError, match="was dealt another unit"):
        collect(config_of(private_store, 2, num_steps=5))
