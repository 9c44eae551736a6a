"""The sampler: exact law, cryptographic bits, cost of the batch and not of N."""

import itertools
import math
import pickle
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.sampling import (
    PoissonPlan,
    ShufflePlan,
    _KeyedBits,
    _uniform_subset,
    binomial_table,
    checksum,
    expected_coverage,
    record_uniforms,
    view_uniforms,
)

KEY = AttemptKey.seeded(7).sampling_key()


def poisson(num_records: int, probability: float, key: bytes = KEY) -> PoissonPlan:
    return PoissonPlan(key=key, num_records=num_records, sampling_probability=probability)


# The law of the count


@pytest.mark.parametrize(("n", "q"), [(1, 0.5), (40, 0.3), (60, 0.999), (25, 1e-9), (9, 0.5)])
def test_poisson_count_table_is_exact(n: int, q: float) -> None:
    lowest, thresholds = binomial_table(n, q)
    exact = Fraction(q)
    cumulative = Fraction(0)
    for k in range(n + 1):
        cumulative += math.comb(n, k) * exact**k * (1 - exact) ** (n - k)
        if k < lowest:
            assert cumulative < Fraction(1, 2**150)
        elif k - lowest < len(thresholds):
            found = Fraction(thresholds[k - lowest], 2**128)
            assert abs(found - cumulative) <= Fraction(1, 2**127)
        else:
            assert 1 - cumulative < Fraction(1, 2**127)


@pytest.mark.parametrize("n", [233_000_000, 2_000_000_000])
def test_poisson_count_table_at_scale(n: int) -> None:
    q = 98_304 / n
    lowest, thresholds = binomial_table(n, q)
    context = mpmath.mp.clone()
    context.dps = 100
    p = context.mpf(q)
    for offset in (0, 1, len(thresholds) // 3, len(thresholds) // 2, len(thresholds) - 2):
        k = lowest + offset + 1
        log_pmf = (
            context.loggamma(n + 1) - context.loggamma(k + 1) - context.loggamma(n - k + 1)
        ) + (k * context.log(p) + (n - k) * context.log1p(-p))
        found = context.mpf(thresholds[offset + 1] - thresholds[offset]) / 2**128
        assert abs(found - context.exp(log_pmf)) < context.mpf(2) ** -126


def test_poisson_count_uses_128_bits() -> None:
    lowest, thresholds = binomial_table(1_000, 0.1)
    assert thresholds[0] < 2**64 < 2**127 < thresholds[-1] <= 2**128
    assert thresholds == sorted(thresholds)
    assert lowest >= 0


def test_poisson_rate() -> None:
    # Power: 700,000 inclusions estimate q to 0.12 %; a rate 1 % off is 8 standard errors away.
    plan = poisson(20_000, 0.05)
    total = sum(len(plan.record_ids(step)) for step in range(700))
    assert abs(total / (700 * 20_000) / 0.05 - 1) < 0.005


def test_poisson_count_has_binomial_variance() -> None:
    plan = poisson(200, 0.05)
    counts = np.array([len(plan.record_ids(step)) for step in range(6_000)])
    assert abs(counts.var() / (200 * 0.05 * 0.95) - 1) < 0.09  # fixed-size batches give 0
    observed = np.bincount(np.clip(counts, 3, 18))[3:]
    law = stats.binom(200, 0.05)
    expected = np.array([law.cdf(3), *law.pmf(np.arange(4, 18)), law.sf(17)]) * len(counts)
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_poisson_records_are_equally_likely_and_independent() -> None:
    num_steps, q = 6_000, 0.3
    is_taken = np.zeros((num_steps, 20))
    plan = poisson(20, q)
    for step in range(num_steps):
        is_taken[step, plan.record_ids(step)] = 1
    z = (is_taken.mean(axis=0) - q) / math.sqrt(q * (1 - q) / num_steps)
    assert np.abs(z).max() < 4.5
    correlation = np.corrcoef(is_taken.T) - np.eye(20)
    assert np.abs(correlation).max() < 4.5 / math.sqrt(num_steps)
    over_steps = np.corrcoef(is_taken[:-1].ravel(), is_taken[1:].ravel())[0, 1]
    assert abs(over_steps) < 4.5 / math.sqrt(is_taken.size)


def test_poisson_steps_are_independent() -> None:
    plan, other = poisson(1_000, 0.5), poisson(1_000, 0.5, AttemptKey.seeded(8).sampling_key())
    samples = [plan.record_ids(step) for step in range(4)] + [other.record_ids(0)]
    for a, b in itertools.combinations(samples, 2):
        common = len(np.intersect1d(a, b))
        assert abs(common - 250) < 5 * math.sqrt(1_000 * 0.25 * 0.75)


# The subset


def test_subsets_are_uniform() -> None:
    num_draws = 8_000
    bits = _KeyedBits(KEY)
    subsets = {s: 0 for s in itertools.combinations(range(6), 3)}
    for _ in range(num_draws):
        subsets[tuple(_uniform_subset(6, 3, bits).tolist())] += 1
    assert stats.chisquare(list(subsets.values())).pvalue > 1e-3


def test_integers_are_unbiased() -> None:
    # 2^64 is 2 2/3 times this bound: without rejection the lowest two thirds come 3/8 too often.
    bound = 3 << 61
    values = _KeyedBits(KEY).integers_below(bound, 30_000)
    observed = np.bincount((values // (1 << 61)).astype(int), minlength=3)
    assert values.min() >= 0
    assert stats.chisquare(observed).pvalue > 1e-3


@pytest.mark.parametrize("probability", [1e-4, 0.3, 0.5, 0.7, 0.97, 1.0])
def test_poisson_ids_are_sorted_distinct_and_in_range(probability: float) -> None:
    plan = poisson(3_000, probability)
    for step in range(5):
        ids = plan.record_ids(step)
        assert ids.dtype == np.int64
        assert np.all(np.diff(ids) > 0)
        assert len(ids) == 0 or (ids[0] >= 0 and ids[-1] < 3_000)
    if probability == 1.0:
        np.testing.assert_array_equal(plan.record_ids(0), np.arange(3_000))


def test_poisson_at_two_billion_records() -> None:
    ids = poisson(2_000_000_000, 98_304 / 2e9).record_ids(5_999)
    assert abs(len(ids) - 98_304) < 6 * math.sqrt(98_304)
    assert stats.kstest(ids / 2e9, "uniform").pvalue > 1e-3


def test_poisson_golden() -> None:
    """A change of the stream would make ranks of two versions disagree: it must be meant."""
    ids = poisson(1_000_000, 1e-5, bytes(range(32))).record_ids(3)
    golden = [14929, 189278, 219161, 321603, 334443, 452106, 458361, 544602, 677079]
    assert ids.tolist() == golden


def test_plans_are_picklable_and_hide_their_key() -> None:
    for plan in (poisson(100, 0.1), ShufflePlan(key=KEY, num_records=10, batch_size=3)):
        again = pickle.loads(pickle.dumps(plan))
        np.testing.assert_array_equal(again.record_ids(4), plan.record_ids(4))
        assert "key" not in repr(plan)
    assert PoissonPlan.is_private and not ShufflePlan.is_private


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_records": 0}, "num_records"),
        ({"num_records": 2**49}, "num_records"),
        ({"sampling_probability": 0.0}, "sampling_probability"),
        ({"sampling_probability": 1.1}, "sampling_probability"),
        ({"sampling_probability": math.nan}, "sampling_probability"),
        ({"sampling_probability": 1}, "sampling_probability"),
        ({"key": b"short"}, "32 bytes"),
    ],
)
def test_poisson_refuses(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoissonPlan(**{"key": KEY, "num_records": 10, "sampling_probability": 0.1, **fields})


def test_negative_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="step"):
        poisson(10, 0.1).record_ids(-1)
    with pytest.raises(ValueError, match="step"):
        ShufflePlan(key=KEY, num_records=10, batch_size=3).record_ids(-1)


# Shuffled epochs


@pytest.mark.parametrize("num_records", [1, 2, 7, 64, 1_000])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_shuffle_visits_each_record_once_an_epoch(num_records: int, batch_size: int) -> None:
    plan = ShufflePlan(key=KEY, num_records=num_records, batch_size=batch_size)
    num_steps = num_records  # batch_size whole epochs
    visited = np.concatenate([plan.record_ids(step) for step in range(num_steps)])
    np.testing.assert_array_equal(np.bincount(visited), np.full(num_records, batch_size))
    for step in range(min(num_steps, 20)):
        ids = plan.record_ids(step)
        assert ids.shape == (batch_size,)
        assert np.all(np.diff(ids) >= 0)


def test_shuffle_is_a_pure_function() -> None:
    plan = ShufflePlan(key=KEY, num_records=1_000, batch_size=100)
    again = ShufflePlan(key=KEY, num_records=1_000, batch_size=100)
    np.testing.assert_array_equal(plan.record_ids(17), again.record_ids(17))
    assert not np.array_equal(plan.record_ids(0), plan.record_ids(10))  # another epoch
    other = ShufflePlan(key=bytes(32), num_records=1_000, batch_size=100)
    assert not np.array_equal(plan.record_ids(0), other.record_ids(0))


def test_shuffle_orders_look_uniform() -> None:
    orders = np.array(
        [
            [
                ShufflePlan(key=KEY, num_records=12, batch_size=1).record_ids(epoch * 12 + i)[0]
                for i in range(12)
            ]
            for epoch in range(600)
        ]
    )
    table = np.stack([np.bincount(orders[:, i], minlength=12) for i in range(12)])
    assert stats.chi2_contingency(table).pvalue > 1e-3
    is_ascent = orders[:, 1:] > orders[:, :-1]
    assert abs(is_ascent.mean() - 0.5) < 0.03


def test_shuffle_memory_follows_the_batch() -> None:
    plan = ShufflePlan(key=KEY, num_records=2**45, batch_size=1_000)
    ids = plan.record_ids(3)
    assert len(np.unique(ids)) == 1_000
    assert stats.kstest(ids / 2.0**45, "uniform").pvalue > 1e-3


def test_shuffle_refuses_an_empty_batch() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        ShufflePlan(key=KEY, num_records=10, batch_size=0)


# Proof of delivery, and randomness per record


def test_checksum_adds_up_over_slices_in_any_order() -> None:
    ids = poisson(100_000, 0.01).record_ids(0)
    shuffled = np.random.default_rng(0).permutation(ids)
    parts = [checksum(part) for part in np.array_split(shuffled, 7)]
    assert sum(parts) % 2**62 == checksum(ids)
    assert 0 <= checksum(ids) < 2**62
    assert checksum(ids[:0]) == 0


def test_checksum_tells_lost_repeated_and_other_records() -> None:
    ids = np.arange(100, dtype=np.int64)
    sums = {checksum(ids), checksum(ids[1:]), checksum(ids[:-1]), checksum(ids + 1)}
    sums |= {checksum(np.append(ids, 5)), checksum(np.append(ids[1:], 1))}
    assert len(sums) == 6


def test_augmentation_by_record_id() -> None:
    ids = np.array([5, 0, 2**40, -1], dtype=np.int64)
    whole = record_uniforms(KEY, 3, ids, purpose="mask", num_values=20)
    assert whole.shape == (4, 20) and whole.dtype == np.float64
    backwards = record_uniforms(KEY, 3, ids[::-1], purpose="mask", num_values=20)
    np.testing.assert_array_equal(whole, backwards[::-1])
    alone = record_uniforms(KEY, 3, ids[2:3], purpose="mask", num_values=7)
    np.testing.assert_array_equal(whole[2:3, :7], alone)
    variants = [
        record_uniforms(KEY, 4, ids, purpose="mask", num_values=20),
        record_uniforms(KEY, 3, ids, purpose="crop", num_values=20),
        record_uniforms(KEY, 3, ids, purpose="mask", num_values=20, view=1),
        record_uniforms(bytes(32), 3, ids, purpose="mask", num_values=20),
    ]
    for variant in variants:
        assert not np.any(variant == whole)
    assert record_uniforms(KEY, 3, ids[:0], purpose="mask", num_values=20).shape == (0, 20)


def test_views_of_a_record_are_its_uniforms_by_view() -> None:
    ids = np.array([4, 5, -1])
    views = view_uniforms(KEY, 3, ids, "crop", num_values=7, num_views=3)
    assert views.shape == (3, 3, 7)
    for view in range(3):
        alone = record_uniforms(KEY, 3, ids, "crop", num_values=7, view=view)
        np.testing.assert_array_equal(views[:, view], alone)


def test_record_uniforms_are_uniform() -> None:
    values = record_uniforms(KEY, 0, np.arange(2_000), purpose="crop", num_values=50)
    assert values.min() >= 0 and values.max() < 1
    assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-3
    correlation = np.corrcoef(values.T) - np.eye(50)
    assert np.abs(correlation).max() < 5 / math.sqrt(2_000)


def test_expected_coverage() -> None:
    assert expected_coverage(1.0, 3) == 1.0
    assert expected_coverage(0.5, 2) == pytest.approx(0.75)
    assert expected_coverage(98_304 / 233e6, 6_000) == pytest.approx(0.92046, abs=1e-4)
    assert expected_coverage(0.5, 0) == 0.0
