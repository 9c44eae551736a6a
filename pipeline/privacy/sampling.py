"""Which records a step takes: exact Poisson samples, keyed shuffles, and their proof sums."""

from __future__ import annotations

import bisect
import hashlib
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from pipeline.privacy.keys import checked_key, derive

MAX_RECORDS = 2**48
_COUNT_BITS = 128
_WEIGHT_BITS = 384
_CHECKSUM_MASK = (1 << 62) - 1


@dataclass(frozen=True, kw_only=True)
class PoissonPlan:
    """The records of every step of a private phase: each one independently with probability q.

    A pure function of (sampling sub-key, step): K ~ Binomial(N, q) by inverse CDF in integers,
    then a uniform K-subset of the N records. Cost and memory follow the batch, not N.

    Args:
        key: 32 bytes, `AttemptKey.sampling_key()`.
        num_records: N, 1 to 2^48.
        sampling_probability: q in (0, 1], taken as the exact rational the double stands for.

    Guarantees:
        1. For batches up to 2^28 the law of a step's sample is within 2^-109 of N independent
           coins of bias q in total variation, given uniform bits: 128-bit uniforms against
           fewer than 2^19 thresholds, each within 2^-127 of the CDF, of a window that leaves
           out less than 2^-150; then an unbiased subset. Over 10^6 steps this adds less than
           (1 + e^epsilon) 2^-89 to delta (test_poisson_count_table_is_exact).
        2. The bits are AES-256-CTR under a key derived from (key, step): steps are
           independent, and no numpy generator and no floating-point binomial is involved
           (test_poisson_steps_are_independent).
        3. No cap and no trimming: all K records are returned, K = 0 included
           (test_poisson_has_no_cap_and_empty_steps).
        4. The sample does not depend on the number of ranks; ranks take slices of it
           (test_one_plan_for_all_ranks).
    """

    key: bytes = field(repr=False)
    num_records: int
    sampling_probability: float
    is_private: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checked_key("key", self.key)
        _check_num_records(self.num_records)
        q = self.sampling_probability
        if not (isinstance(q, float) and 0.0 < q <= 1.0):
            raise ValueError(
                f"sampling_probability must be a float in (0, 1], got {q!r}; use B / N"
            )

    def record_ids(self, step: int) -> np.ndarray:
        """Returns the sorted distinct record ids of `step`: int64 [K], each in [0, N)."""
        bits = _KeyedBits(derive(self.key, b"poisson", _checked_step(step)))
        count = _binomial(self.num_records, self.sampling_probability, bits.integer(_COUNT_BITS))
        if 2 * count <= self.num_records:
            return _uniform_subset(self.num_records, count, bits)
        left_out = _uniform_subset(self.num_records, self.num_records - count, bits)
        is_taken = np.ones(self.num_records, dtype=bool)
        is_taken[left_out] = False
        return np.flatnonzero(is_taken).astype(np.int64, copy=False)


def _binomial(num_trials: int, probability: float, uniform: int) -> int:
    """Returns the Binomial(num_trials, probability) quantile of a 128-bit uniform."""
    if probability == 1.0:
        return num_trials
    lowest, thresholds = binomial_table(num_trials, probability)
    return lowest + bisect.bisect_right(thresholds, uniform)


@lru_cache(maxsize=8)
def binomial_table(num_trials: int, probability: float) -> tuple[int, list[int]]:
    """Returns (lowest, thresholds): count lowest + i is taken iff thresholds[i-1] <= u < [i].

    The weights w_k = P(k) / P(mode) follow from the mode outwards by the exact ratio
    P(k+1) / P(k) = (N - k) q / ((k + 1)(1 - q)) in integers of 384 fractional bits, until
    w < 2^-192. Each division errs by less than one unit, which the ratios (< 1 going
    outwards) never amplify: w_k errs by at most 2^-384 per step from the mode. Beyond the
    window the weights fall geometrically by a ratio r with 1/(1 - r) < 2^40 for N <= 2^48, so
    less than 2^-150 of the mass is cut off.
    """
    numerator, denominator = probability.as_integer_ratio()
    complement = denominator - numerator
    mode = min(num_trials, (num_trials + 1) * numerator // denominator)
    one, least = 1 << _WEIGHT_BITS, 1 << (_WEIGHT_BITS - 192)

    above = [one]
    k = mode
    while k < num_trials and above[-1] >= least:
        above.append(above[-1] * (num_trials - k) * numerator // ((k + 1) * complement))
        k += 1
    below: list[int] = []
    weight, k = one, mode
    while k > 0 and weight >= least:
        weight = weight * k * complement // ((num_trials - k + 1) * numerator)
        below.append(weight)
        k -= 1
    weights = below[::-1] + above

    total = sum(weights)
    thresholds, cumulative = [], 0
    for weight in weights[:-1]:
        cumulative += weight
        thresholds.append((cumulative << _COUNT_BITS) // total)
    return mode - len(below), thresholds


def _uniform_subset(num_records: int, count: int, bits: _KeyedBits) -> np.ndarray:
    """Returns a uniform `count`-subset of [0, num_records), sorted: int64 [count].

    The first `count` distinct values of a sequence of independent uniform ids form a uniform
    subset (by symmetry). Each round draws exactly as many ids as are still missing, so the
    union never overshoots and nothing is ever trimmed.
    """
    subset = np.empty(0, dtype=np.int64)
    while len(subset) < count:
        drawn = bits.integers_below(num_records, count - len(subset))
        candidates = np.sort(np.concatenate([subset, drawn]))
        is_first = np.ones(len(candidates), dtype=bool)
        np.not_equal(candidates[1:], candidates[:-1], out=is_first[1:])
        subset = candidates[is_first]
    return subset


class _KeyedBits:
    """A stream of cryptographic bits: AES-256-CTR from counter 0 under a key used once."""

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def integer(self, num_bits: int) -> int:
        """Returns the next `num_bits` (a multiple of 8) as an integer."""
        return int.from_bytes(self._encryptor.update(bytes(num_bits // 8)), "big")

    def integers_below(self, bound: int, count: int) -> np.ndarray:
        """Returns the next `count` unbiased integers in [0, bound): int64 [count]."""
        limit = (1 << 64) // bound * bound  # words at or above it would favour small values
        accepted = np.empty(0, dtype=np.uint64)
        while len(accepted) < count:
            room = bytes(8 * (count - len(accepted)))
            words = np.frombuffer(self._encryptor.update(room), dtype="<u8")
            if limit < 1 << 64:
                words = words[words < np.uint64(limit)]
            accepted = np.concatenate([accepted, words]) if len(accepted) else words
        return (accepted % np.uint64(bound)).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class ShufflePlan:
    """The records of every step of a public phase: shuffled epochs, fixed batch size.

    Epoch e visits the records in the order of a keyed permutation (a Feistel network on the
    next even power of two, walked along its cycles into [0, N)), so that memory follows the
    batch. Not private: it must never be accounted as Poisson sampling.

    Args:
        key: 32 bytes.
        num_records: N, 1 to 2^48.
        batch_size: records per step, >= 1.

    Guarantees:
        1. Each epoch takes every record exactly once; a batch may straddle two epochs (and
           may then hold an id twice) (test_shuffle_visits_each_record_once_an_epoch).
        2. A pure function of (key, step): resuming needs no reader position
           (test_shuffle_is_a_pure_function).
    """

    key: bytes = field(repr=False)
    num_records: int
    batch_size: int
    is_private: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checked_key("key", self.key)
        _check_num_records(self.num_records)
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {self.batch_size}")

    def record_ids(self, step: int) -> np.ndarray:
        """Returns the record ids of `step`, sorted: int64 [batch_size]."""
        first = _checked_step(step) * self.batch_size
        parts = []
        while first < (step + 1) * self.batch_size:
            epoch, position = divmod(first, self.num_records)
            count = min((step + 1) * self.batch_size - first, self.num_records - position)
            positions = np.arange(position, position + count, dtype=np.uint64)
            parts.append(_permute(self.key, epoch, self.num_records, positions))
            first += count
        return np.sort(np.concatenate(parts)).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class ShardShufflePlan:
    """The records of every step of a public phase that reads whole shards: for object stores.

    A request for each record is wasteful where its price is that of megabytes. Epoch e takes the
    shards in the order of a keyed permutation, `num_open_shards` at a time, and reads those side by
    side: a run of `run_length` neighbours of each in turn, so that a step mixes as many places of
    the data set as it has runs. Each shard begins at a keyed place and goes round, so that a
    run's records are others in every epoch. Not private.

    Args:
        key: 32 bytes.
        num_records: N.
        batch_size: records per step.
        records_per_shard: of every shard but the last one.
        num_open_shards: shards that are read side by side.
        run_length: neighbouring records that are read together.

    Guarantees:
        1. Each epoch takes every record exactly once; a batch may straddle two epochs
           (test_shards_are_read_whole_once_an_epoch).
        2. A pure function of (key, step): resuming needs no reader position
           (test_shard_shuffle_is_a_pure_function).
    """

    key: bytes = field(repr=False)
    num_records: int
    batch_size: int
    records_per_shard: int
    num_open_shards: int
    run_length: int
    is_private: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checked_key("key", self.key)
        _check_num_records(self.num_records)
        for name in ("batch_size", "records_per_shard", "num_open_shards", "run_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")

    @property
    def num_shards(self) -> int:
        """Shards, the last one perhaps shorter."""
        return -(-self.num_records // self.records_per_shard)

    def record_ids(self, step: int) -> np.ndarray:
        """Returns the record ids of `step`, sorted: int64 [batch_size]."""
        first = _checked_step(step) * self.batch_size
        last = first + self.batch_size
        parts = []
        while first < last:
            epoch, position = divmod(first, self.num_records)
            start, ids = self._group_at(epoch, position)
            taken = ids[position - start : position - start + last - first]
            parts.append(taken)
            first += len(taken)
        return np.sort(np.concatenate(parts))

    def _group_at(self, epoch: int, position: int) -> tuple[int, np.ndarray]:
        """The shards read side by side at a position of an epoch: its start, and their order."""
        size = self.num_open_shards * self.records_per_shard
        # Where the short last shard comes is known, so the group follows from the position.
        missing = self.num_shards * self.records_per_shard - self.num_records
        short = self._place_of_last(epoch) // self.num_open_shards
        group = position // size
        if group >= short:
            group = max(short, (position + missing) // size)
        start = group * size - (missing if group > short else 0)
        places = np.arange(
            group * self.num_open_shards, min((group + 1) * self.num_open_shards, self.num_shards)
        )
        shards = _permute(self.key, 2 * epoch, self.num_shards, places.astype(np.uint64))
        return start, self._side_by_side(epoch, shards.astype(np.int64))

    def _place_of_last(self, epoch: int) -> int:
        return _place_of_last_shard(self.key, epoch, self.num_shards)

    def _side_by_side(self, epoch: int, shards: np.ndarray) -> np.ndarray:
        """Record ids of some shards, a run of each in turn."""
        turns, ids = [], []
        for shard in shards.tolist():
            first = shard * self.records_per_shard
            length = min(self.records_per_shard, self.num_records - first)
            digest = derive(self.key, b"shard start", epoch, shard)
            rows = (np.arange(length) + int.from_bytes(digest[:8], "big") % length) % length
            ids.append(first + rows)
            turns.append(np.arange(length) // self.run_length)
        order = np.argsort(np.concatenate(turns), kind="stable")
        return np.concatenate(ids)[order]


@lru_cache(maxsize=4)
def _place_of_last_shard(key: bytes, epoch: int, num_shards: int) -> int:
    """Where an epoch's order has the last shard, which may be shorter than the others."""
    order = _permute(key, 2 * epoch, num_shards, np.arange(num_shards, dtype=np.uint64))
    return int(np.flatnonzero(order == num_shards - 1)[0])


_FEISTEL_ROUNDS = 8


def _permute(key: bytes, epoch: int, num_records: int, positions: np.ndarray) -> np.ndarray:
    """Returns where `epoch`'s permutation of [0, num_records) sends `positions` (uint64)."""
    half_bits = np.uint64(max(1, -(-(num_records - 1).bit_length() // 2)))
    digest = hashlib.shake_256(derive(key, b"shuffle", epoch)).digest(8 * _FEISTEL_ROUNDS)
    round_keys = np.frombuffer(digest, dtype="<u8")
    values = _feistel(positions, round_keys, half_bits)
    outside = np.flatnonzero(values >= num_records)
    while len(outside):  # on average at most three more rounds, as 2^(2 half_bits) < 4 N
        values[outside] = _feistel(values[outside], round_keys, half_bits)
        outside = outside[values[outside] >= num_records]
    return values


def _feistel(values: np.ndarray, round_keys: np.ndarray, half_bits: np.uint64) -> np.ndarray:
    """Returns a keyed permutation of [0, 2^(2 half_bits)) applied to `values` (uint64)."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for round_key in round_keys:
        # Two mixes: the key enters through a bijection, so that rounds differ for any key.
        mixed = _mix64(_mix64(right) ^ round_key)
        left, right = right, left ^ (mixed >> np.uint64(64 - int(half_bits)))
    return (left << half_bits) | right


def checksum(record_ids: np.ndarray) -> int:
    """Returns a sum over ids, in [0, 2^62), that proves which records were delivered.

    The sum (mod 2^62) of a 64-bit mix of each id: free of order, and additive, so that the
    checksums of disjoint slices add up (mod 2^62) to that of the whole. Ids repeated or lost
    change it but with probability about 2^-62; it is no defence against a forger.
    """
    mixed = _mix64(np.asarray(record_ids, dtype=np.int64).view(np.uint64))
    return int(mixed.sum(dtype=np.uint64)) & _CHECKSUM_MASK


def record_uniforms(
    key: bytes,
    step: int,
    record_ids: np.ndarray,
    purpose: str,
    *,
    num_values: int,
    view: int = 0,
) -> np.ndarray:
    """Returns uniforms for each record: a pure function of (key, step, record id, view, purpose).

    Args:
        key: 32 bytes, `AttemptKey.augmentation_key()`.
        step: logical step, >= 0.
        record_ids: int64 [n]; negative ids (padding) are allowed.
        purpose: what they are for, such as "crop" or "mask"; purposes are independent.
        num_values: uniforms per record.
        view: which of several views of the record, >= 0.

    Returns:
        float64 [n, num_values] in [0, 1), 53 random bits each.

    Guarantees:
        1. No dependence on rank, position or neighbours (test_augmentation_by_record_id).
    """
    checked_key("key", key)
    stem = derive(key, b"record", purpose.encode(), _checked_step(step), view)
    prefix = hashlib.shake_256(stem)
    words = bytearray()
    for record_id in np.asarray(record_ids, dtype=np.int64).tolist():
        stream = prefix.copy()
        stream.update(record_id.to_bytes(8, "big", signed=True))
        words += stream.digest(8 * num_values)
    values = (np.frombuffer(words, dtype="<u8") >> np.uint64(11)) * 2.0**-53
    return values.reshape(len(record_ids), num_values)


def view_uniforms(
    key: bytes,
    step: int,
    record_ids: np.ndarray,
    purpose: str,
    *,
    num_values: int,
    num_views: int,
) -> np.ndarray:
    """Returns `record_uniforms` of each of V views of each record, float64 [n, V, num_values]."""
    of_views = [
        record_uniforms(key, step, record_ids, purpose, num_values=num_values, view=view)
        for view in range(num_views)
    ]
    return np.stack(of_views, axis=1)


def _mix64(values: np.ndarray) -> np.ndarray:
    """Returns the splitmix64 finaliser of each value: a fixed bijection of uint64."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _check_num_records(num_records: int) -> None:
    if not (isinstance(num_records, int) and 1 <= num_records <= MAX_RECORDS):
        raise ValueError(
            f"num_records must be an int from 1 to 2^48, got {num_records!r}; "
            "take it from the dataset's manifest"
        )


def _checked_step(step: int) -> int:
    if step < 0:
        raise ValueError(f"step must be >= 0, got {step}; steps are counted from 0")
    return int(step)


def expected_coverage(sampling_probability: float, num_steps: int) -> float:
    """Returns 1 - (1 - q)^T, the chance that a record is taken at least once in T steps."""
    if sampling_probability >= 1.0:
        return 1.0 if num_steps > 0 else 0.0
    return -math.expm1(num_steps * math.log1p(-sampling_probability))
