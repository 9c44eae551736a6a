"""Pitfall 9: a step without records is an ordinary step, with one padded unit on every rank."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.data.shards import ShardStore
from pipeline.data.stream import StreamConfig, thread_pool_units
from pipeline.privacy.sampling import PoissonPlan


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_gets_one_padded_unit(private_store: ShardStore, world_size: int) -> None:
    plan = PoissonPlan(key=b"e" * 32, num_records=240, sampling_probability=0.002)
    config = StreamConfig(
        plan=plan,
        store_root=str(private_store.root),
        augmentation_key=b"a" * 32,
        world_size=world_size,
        microbatch_size=4,
        microbatches_per_unit=2,
        image_size=16,
        num_steps=40,
        is_private=True,
    )
    empty_steps = [step for step in config.steps if len(plan.record_ids(step)) == 0]
    assert len(empty_steps) > 10
    for rank in range(world_size):
        units = list(thread_pool_units(config, rank))
        assert [unit.step for unit in units] == list(config.steps)
        for unit in units:
            assert unit.num_units == 1 and unit.images.shape == (8, 3, 16, 16)
            if unit.step in empty_steps:
                assert unit.receipt() == (0, 0)
                assert (unit.weights == 0).all() and (unit.record_ids == -1).all()
                assert not np.any(unit.images)
