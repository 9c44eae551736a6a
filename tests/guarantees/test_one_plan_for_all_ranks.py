"""One plan for the whole step; ranks take slices of it (PITFALLS 2: every rank drew the same)."""

import numpy as np
import pytest

from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.sampling import PoissonPlan, checksum

KEY = AttemptKey.seeded(5).sampling_key()


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_one_plan_for_all_ranks(world_size: int) -> None:
    for step in range(30):
        # Each rank builds the plan for itself from the broadcast sub-key, then cuts its slice.
        slices = []
        for rank in range(world_size):
            plan = PoissonPlan(key=KEY, num_records=5_000, sampling_probability=0.02)
            slices.append(np.array_split(plan.record_ids(step), world_size)[rank])
        delivered = np.concatenate(slices)
        assert len(np.unique(delivered)) == len(delivered), "a record was drawn by two ranks"
        np.testing.assert_array_equal(
            np.sort(delivered),
            PoissonPlan(key=KEY, num_records=5_000, sampling_probability=0.02).record_ids(step),
        )
        assert sum(checksum(part) for part in slices) % 2**62 == checksum(delivered)


def test_ranks_that_drew_alike_would_be_seen() -> None:
    """The fault itself, planted: two ranks with the same sample fail the per-step proof."""
    ids = PoissonPlan(key=KEY, num_records=5_000, sampling_probability=0.02).record_ids(0)
    half = np.array_split(ids, 2)[0]
    twice = (checksum(half) + checksum(half)) % 2**62
    assert twice != checksum(ids)
