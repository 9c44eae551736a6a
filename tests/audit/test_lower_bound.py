"""The one-run bound against closed forms, and as a bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pipeline.audit.lower_bound import largest_refuted_epsilon, one_run_lower_bound, p_value


@pytest.mark.parametrize("guesses", [10, 100, 1000])
def test_all_right_without_delta_has_a_closed_form(guesses: int) -> None:
    """P[all right] = p^r = beta at p = e^epsilon / (1 + e^epsilon)."""
    accuracy = 0.05 ** (1 / guesses)
    expected = math.log(accuracy / (1 - accuracy))
    assert largest_refuted_epsilon(2000, guesses, guesses, 0.0, 0.05) == pytest.approx(expected)


def test_half_right_refutes_nothing() -> None:
    assert largest_refuted_epsilon(1000, 100, 50, 0.0, 0.05) == 0.0
    assert largest_refuted_epsilon(1000, 100, 50, 1e-5, 0.05) == 0.0


def test_delta_by_hand() -> None:
    """r = 2, v = 2, epsilon = 0: 1/4 + 2 m delta max(P[X = 1] / 1, P[X < 2] / 2)."""
    assert p_value(10, 2, 2, 0.0, 1e-3) == pytest.approx(0.25 + 2 * 10 * 1e-3 * 0.5)
    assert p_value(10, 2, 2, 0.0, 0.0) == pytest.approx(0.25)
    assert p_value(10, 2, 2, 0.0, 1.0) == 1.0


def test_delta_weakens_the_bound() -> None:
    bounds = [largest_refuted_epsilon(1000, 200, 190, d, 0.05) for d in (0.0, 1e-6, 1e-5, 1e-4)]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > bounds[-1]


def test_bound_holds_for_randomised_response() -> None:
    """Answers that are epsilon-DP and no more: the bound is over epsilon in 5 % at most."""
    epsilon, random = 1.0, np.random.default_rng(0)
    accuracy = 1 / (1 + math.exp(-epsilon))
    over, found = 0, []
    for _ in range(300):
        included = random.random(400) < 0.5
        answers = np.where(random.random(400) < accuracy, included, ~included)
        scores = answers + 1e-6 * random.random(400)
        found.append(one_run_lower_bound(scores, included, delta=0.0).epsilon)
        over += found[-1] > epsilon
    assert over <= stats.binom.ppf(0.999, 300, 0.05)
    assert np.mean(found) > 0.4, "and it is no empty one"


def test_perfect_scores_are_refuted_far() -> None:
    included = np.arange(1000) % 2 == 0
    bound = one_run_lower_bound(included.astype(float), included, delta=1e-5)
    assert bound.epsilon > 4 and bound.num_right == bound.num_guesses


def test_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match="scores has 3 entries and is_included 2"):
        one_run_lower_bound(np.zeros(3), np.zeros(2, bool), delta=0.0)
