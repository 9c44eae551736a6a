"""A lower bound on epsilon from one run: guess which canaries were there, and count.

Source: Steinke, Nasr, Jagielski: Privacy auditing with one (1) training run, arXiv 2305.08846,
Theorem 5.2. The bound is for the mechanism as a black box; it cannot come near a tight upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """The best lower bound over numbers of guesses, each paid for in confidence.

    Args:
        epsilon: at `delta`, with confidence 1 - beta; 0 if nothing can be said.
        num_canaries: each in or out by a fair coin.
        num_guesses, num_right: of the best choice; the other canaries were abstained from.
    """

    epsilon: float
    delta: float
    beta: float
    num_canaries: int
    num_guesses: int
    num_right: int


def one_run_lower_bound(
    scores: npt.NDArray[np.float64],
    is_included: npt.NDArray[np.bool_],
    *,
    delta: float,
    beta: float = 0.05,
) -> LowerBound:
    """What the guesses "highest scores in, lowest out" prove about epsilon.

    Args:
        scores: one a canary, [m]; higher where it was probably in.
        is_included: the truth, fair coins, [m].
        delta: at which epsilon is bounded.
        beta: 1 - confidence, over all numbers of guesses tried (Bonferroni).

    Raises:
        ValueError: different lengths, or fewer than two canaries.

    Guarantees:
        1. With epsilon-delta-DP true the bound exceeds epsilon with probability at most beta
           (test_bound_holds_for_randomised_response).
    """
    num = len(scores)
    if len(is_included) != num or num < 2:
        raise ValueError(
            f"scores has {num} entries and is_included {len(is_included)}: give one of each for "
            "every canary, two canaries or more"
        )
    choices = sorted({max(2, 2 * (num * share // 200)) for share in (5, 10, 20, 40, 70, 100)})
    best = LowerBound(
        epsilon=0.0, delta=delta, beta=beta, num_canaries=num, num_guesses=0, num_right=0
    )
    for guesses in choices:
        right = num_right_guesses(scores, is_included, guesses)
        epsilon = largest_refuted_epsilon(num, guesses, right, delta, beta / len(choices))
        if epsilon > best.epsilon:
            best = LowerBound(
                epsilon=epsilon,
                delta=delta,
                beta=beta,
                num_canaries=num,
                num_guesses=guesses,
                num_right=right,
            )
    return best


def num_right_guesses(
    scores: npt.NDArray[np.float64], is_included: npt.NDArray[np.bool_], num_guesses: int
) -> int:
    """How many of "the highest half of the guesses in, the lowest half out" are right."""
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")
    half = num_guesses // 2
    return int(is_included[order[:half]].sum() + (~is_included[order[len(order) - half :]]).sum())


def p_value(
    num_canaries: int, num_guesses: int, num_right: int, epsilon: float, delta: float
) -> float:
    """Bound on the probability of so many right guesses under (epsilon, delta)-DP.

    With X ~ Binomial(guesses, e^epsilon / (1 + e^epsilon)) and v right guesses it is
    P[X >= v] + 2 m delta max_i P[v > X >= v - i] / i.
    """
    accuracy = 1.0 / (1.0 + np.exp(-epsilon))
    tail = stats.binom.sf(num_right - 1, num_guesses, accuracy)
    if delta > 0 and num_right > 0:
        below = np.arange(num_right - 1, -1, -1)
        mass = np.cumsum(stats.binom.pmf(below, num_guesses, accuracy))
        tail += 2 * num_canaries * delta * float((mass / np.arange(1, num_right + 1)).max())
    return float(min(1.0, tail))


def largest_refuted_epsilon(
    num_canaries: int, num_guesses: int, num_right: int, delta: float, beta: float
) -> float:
    """The largest epsilon whose p-value is at most beta (bisection from below); 0 if none."""
    low, high = 0.0, 30.0
    if p_value(num_canaries, num_guesses, num_right, low, delta) > beta:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        if p_value(num_canaries, num_guesses, num_right, middle, delta) <= beta:
            low = middle
        else:
            high = middle
    return low
