"""ShardShufflePlan: whole shards in keyed shuffled order, a pure function of key and step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pipeline.privacy.sampling import ShardShufflePlan

KEY = bytes(range(32))


def plan_of(num_records: int = 1000, batch_size: int = 64, key: bytes = KEY, **changes: int):
    sizes = {"records_per_shard": 90, "num_open_shards": 4, "run_length": 8, **changes}
    return ShardShufflePlan(key=key, num_records=num_records, batch_size=batch_size, **sizes)


@pytest.mark.parametrize("num_records", [1, 89, 90, 91, 720, 1000])
@pytest.mark.parametrize("num_open_shards", [1, 4, 50])
def test_shards_are_read_whole_once_an_epoch(num_records: int, num_open_shards: int) -> None:
    plan = plan_of(num_records, batch_size=1, num_open_shards=num_open_shards)
    for epoch in range(3):
        steps = range(epoch * num_records, (epoch + 1) * num_records)
        ids = np.concatenate([plan.record_ids(step) for step in steps])
        assert (np.sort(ids) == np.arange(num_records)).all()
        groups: list[set[int]] = []
        for shard in (ids // 90).tolist():  # no more shards at once than are open
            if not any(shard in group for group in groups):
                if not groups or len(groups[-1]) == num_open_shards:
                    groups.append(set())
                groups[-1].add(shard)
        last_of = {shard: np.flatnonzero(ids // 90 == shard).max() for shard in set(ids // 90)}
        first_of = {shard: np.flatnonzero(ids // 90 == shard).min() for shard in set(ids // 90)}
        for before, after in itertools.pairwise(groups):
            assert max(last_of[s] for s in before) < min(first_of[s] for s in after)


def test_batches_straddle_epochs_and_lose_nothing() -> None:
    plan = plan_of()
    ids = np.concatenate([plan.record_ids(step) for step in range(125)])  # 8 epochs
    assert (np.bincount(ids, minlength=1000) == 8).all()


def test_shard_shuffle_is_a_pure_function() -> None:
    forwards = [plan_of().record_ids(step) for step in range(40)]
    backwards = [plan_of().record_ids(step) for step in reversed(range(40))][::-1]
    assert all((one == other).all() for one, other in zip(forwards, backwards, strict=True))
    other = plan_of(key=KEY[::-1])
    assert any((plan_of().record_ids(s) != other.record_ids(s)).any() for s in range(3))


def test_epochs_differ_and_so_do_runs() -> None:
    plan = plan_of(num_records=900, batch_size=900 // 2)
    first, second = plan.record_ids(0), plan.record_ids(2)
    assert set(first.tolist()) != set(second.tolist())
    starts = [set((plan_of(720, 32).record_ids(step) % 8).tolist()) for step in (0, 23)]
    assert starts[0] and starts[1]


def test_a_step_is_made_of_runs_of_several_shards() -> None:
    ids = plan_of(batch_size=64).record_ids(0)
    num_runs = 1 + int((np.diff(ids) != 1).sum())
    assert num_runs <= 64 // 8 + 4 and len(set((ids // 90).tolist())) >= 4


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="run_length must be >= 1"):
        plan_of(run_length=0)
