"""The one-run bound against trade-off curves: closed forms, and as a bound."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from pipeline.audit.f_dp_bound import TradeOff, f_dp_lower_bound, is_refuted
from pipeline.audit.lower_bound import largest_refuted_epsilon, num_right_guesses
from pipeline.privacy.accountant import epsilon_of
from pipeline.privacy.mechanism import Mechanism

GAUSSIAN = Mechanism(
    num_records=10,
    expected_batch_size=10,
    sampling_probability=1.0,
    noise_multiplier=1.25,
    max_grad_norm=1.0,
    num_steps=1,
    delta=1e-3,
)


def pure(epsilon: float) -> TradeOff:
    return TradeOff(epsilons=np.array([epsilon]), deltas=np.array([0.0]))


@pytest.mark.parametrize("probability", [0.01, 0.2, 0.5, 0.9])
def test_curve_of_the_gaussian(probability: float) -> None:
    """mu-GDP: least(x) = Phi(Phi^-1(x) - mu), mu = 1 / noise multiplier; arXiv 1905.02383."""
    exact = stats.norm.cdf(stats.norm.ppf(probability) - 1 / 1.25)
    found = TradeOff.of(GAUSSIAN).least(probability)
    assert found <= exact + 1e-9
    assert found == pytest.approx(exact, abs=0.004)


def test_all_right_under_a_pure_curve() -> None:
    """Every guess right: refuted about where p^r = beta, p = e^epsilon / (1 + e^epsilon)."""
    guesses = 100
    accuracy = 0.05 ** (1 / guesses)
    known = math.log(accuracy / (1 - accuracy))
    facts = {"num_canaries": 100, "num_guesses": guesses, "num_right": guesses, "beta": 0.05}
    assert is_refuted(pure(known - 0.05).least, **facts)
    assert not is_refuted(pure(known + 0.05).least, **facts)


def test_half_right_refutes_nothing() -> None:
    facts = {"num_canaries": 200, "num_guesses": 100, "num_right": 50, "beta": 0.05}
    assert not is_refuted(pure(0.0).least, **facts)


def test_f_dp_bound_holds_for_randomised_response() -> None:
    """Answers of exactly this curve are refuted at most 5 % of the time, and weaker ones are."""
    random, epsilon = np.random.default_rng(3), 1.0
    accuracy = 1 / (1 + math.exp(-epsilon))
    rights = random.binomial(400, accuracy, 400)
    facts = {"num_canaries": 400, "num_guesses": 400, "beta": 0.05}
    over = sum(is_refuted(pure(epsilon).least, num_right=int(n), **facts) for n in rights)
    assert over <= stats.binom.ppf(0.999, 400, 0.05)
    weaker = sum(is_refuted(pure(0.6).least, num_right=int(n), **facts) for n in rights)
    assert weaker > 350


def test_bound_is_tighter_than_that_of_epsilon_and_delta() -> None:
    """Gaussian answers: the same guesses prove more against whole curves, and never too much."""
    random = np.random.default_rng(4)
    included = random.random(10_000) < 0.5
    scores = included + 1.25 * random.normal(size=10_000)
    right = num_right_guesses(scores, included, 1_000)
    claimed = epsilon_of([(GAUSSIAN, 1)], GAUSSIAN.delta).value
    facts = {"num_canaries": 10_000, "num_guesses": 1_000, "num_right": right}
    found = f_dp_lower_bound(GAUSSIAN, **facts)
    looser = largest_refuted_epsilon(10_000, 1_000, right, GAUSSIAN.delta, 0.05)
    assert looser < found < claimed and found > 0.5 * claimed
    broken = replace(GAUSSIAN, noise_multiplier=4.0)
    refuted = f_dp_lower_bound(broken, **facts)
    assert refuted == epsilon_of([(broken, 1)], GAUSSIAN.delta).value, "the claim itself"
