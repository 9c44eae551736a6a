"""The most steps, or the largest batch, that a target epsilon allows at a given noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pipeline.privacy.accountant import (
    MAX_TARGET_EPSILON,
    MIN_TARGET_EPSILON,
    epsilon_of,
    rdp_epsilon_of,
)
from pipeline.privacy.mechanism import Mechanism

MAX_NUM_STEPS = 1_000_000


def calibrate_num_steps(
    mechanism: Mechanism,
    *,
    target_epsilon: float,
    reserve_of: Callable[[int], int] | None = None,
) -> Mechanism:
    """Returns the mechanism with the most steps whose epsilon, reserve included, is allowed.

    Args:
        mechanism: all its fields but num_steps are kept.
        target_epsilon: from 0.001 to 1,000.
        reserve_of: num_steps -> reserve_steps, never falling; default: the mechanism's.

    Raises:
        ValueError: for a target out of range, or one that even a single step exceeds.

    Guarantees:
        1. Epsilon of num_steps + reserve_steps is at most the target; with one step more it is
           not, unless num_steps is 1,000,000 (test_most_steps).
    """

    def with_steps(num: int) -> Mechanism:
        reserve = mechanism.reserve_steps if reserve_of is None else reserve_of(num)
        return dataclasses.replace(mechanism, num_steps=num, reserve_steps=reserve)

    return with_steps(_largest(with_steps, target_epsilon, 1, MAX_NUM_STEPS, "step"))


def calibrate_batch_size(mechanism: Mechanism, *, target_epsilon: float) -> Mechanism:
    """Returns the mechanism with the largest expected batch size that the target allows.

    Args:
        mechanism: under replace_special; all its fields but expected_batch_size and with it
            sampling_probability = B / N are kept.
        target_epsilon: from 0.001 to 1,000.

    Raises:
        ValueError: for a target out of range, one that even B = 1 exceeds, or a mechanism
            whose N is private.

    Guarantees:
        1. Epsilon is at most the target; with one image more it is not, unless B is N
           (test_largest_batch).
    """
    num = mechanism.num_records
    if num is None:
        raise ValueError(
            "num_records is private under add_or_remove_one: give sampling_probability"
        )

    def with_batch(size: int) -> Mechanism:
        return dataclasses.replace(
            mechanism, expected_batch_size=size, sampling_probability=size / num
        )

    return with_batch(_largest(with_batch, target_epsilon, 1, num, "expected_batch_size of"))


def _largest(
    make: Callable[[int], Mechanism], target: float, lowest: int, highest: int, what: str
) -> int:
    """The largest n in [lowest, highest] with epsilon(make(n)) <= target; epsilon rises with n."""
    if not MIN_TARGET_EPSILON <= target <= MAX_TARGET_EPSILON:
        raise ValueError(
            f"target_epsilon is {target}; it must be from {MIN_TARGET_EPSILON} to "
            f"{MAX_TARGET_EPSILON}"
        )

    def quick(num: int) -> float:
        made = make(num)
        return rdp_epsilon_of([(made, made.max_charged_steps)], made.delta)

    def bound(num: int) -> float:
        made = make(num)
        return epsilon_of([(made, made.max_charged_steps)], made.delta).value

    low = _bisected(quick, target, lowest - 1, highest + 1)
    # RDP alone allows `low`, so the smaller of both bounds does too.
    if low < lowest:
        if bound(lowest) > target:
            raise ValueError(
                f"target_epsilon {target} is exceeded by {what} {lowest}: raise it, or "
                "noise_multiplier"
            )
        low = lowest
    high, reach = highest + 1, max(1, low // 8)
    while low + reach < high:
        if bound(low + reach) <= target:
            low, reach = low + reach, 2 * reach
        else:
            high = low + reach
    return _bisected(bound, target, low, high)


def _bisected(bound: Callable[[int], float], target: float, low: int, high: int) -> int:
    """The largest n in [low, high) with bound(n) <= target, given that low has it or is none."""
    while high - low > 1:
        middle = (low + high) // 2
        if bound(middle) <= target:
            low = middle
        else:
            high = middle
    return low
