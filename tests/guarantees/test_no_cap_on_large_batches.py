"""No cap, no trimming, and empty steps are ordinary steps (PITFALLS 9, 17)."""

import numpy as np

from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.sampling import PoissonPlan

KEY = AttemptKey.seeded(2).sampling_key()


def test_poisson_has_no_cap_and_empty_steps() -> None:
    # Mean 3: in 3,000 steps the largest sample is about 11 and 5 % are empty.
    plan = PoissonPlan(key=KEY, num_records=1_000, sampling_probability=0.003)
    counts = np.array([len(plan.record_ids(step)) for step in range(3_000)])
    assert counts.max() >= 9
    assert abs((counts == 0).mean() - 0.997**1_000) < 0.015
    assert plan.record_ids(int(np.argmin(counts))).shape == (0,)


def test_large_batches_are_not_trimmed() -> None:
    plan = PoissonPlan(key=KEY, num_records=100_000, sampling_probability=0.01)
    counts = np.array([len(plan.record_ids(step)) for step in range(400)])
    z = (counts - 1_000) / np.sqrt(990)
    assert z.max() > 2.2
    assert abs((z > 0).mean() - 0.5) < 0.1
    assert abs((z > 1).mean() - 0.1587) < 0.08
