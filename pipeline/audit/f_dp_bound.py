"""A tighter lower bound from one run: against the mechanism's whole trade-off curve.

(epsilon, delta)-DP forgets most of what a mechanism promises. Here the guesses are held against
mechanisms of the same kind with *more* noise, each by its whole privacy profile; the epsilon of the
least private one that they still refute is a lower bound for a mechanism of this kind.

Source: Mahloujifar, Melis, Chaudhuri: Auditing f-differential privacy in one run, arXiv 2410.22235,
the recursion of its numerical bound, for guesses of one bit with abstention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.privacy.accountant import epsilon_of
from pipeline.privacy.mechanism import Mechanism
from pipeline.privacy.profile import privacy_profile

_EPSILONS = np.concatenate([np.linspace(0, 2, 41), np.linspace(2.1, 12, 100)])
_NUM_HALVINGS = 7
_LARGEST_FACTOR = 32.0


@dataclass(frozen=True, kw_only=True)
class TradeOff:
    """A trade-off curve, by points of its privacy profile.

    Args:
        epsilons, deltas: delta(epsilon) at some epsilon >= 0; an upper bound keeps all valid.
    """

    epsilons: npt.NDArray[np.float64]
    deltas: npt.NDArray[np.float64]

    @classmethod
    def of(cls, mechanism: Mechanism) -> TradeOff:
        """The curve of a mechanism's num_steps."""
        deltas = privacy_profile(mechanism, mechanism.num_steps, _EPSILONS.tolist())
        return cls(epsilons=_EPSILONS, deltas=np.array(deltas))

    def least(self, probability: float) -> float:
        """The least probability of an event on one side that has `probability` on the other.

        From P <= e^epsilon Q + delta for the event, and for its complement.
        """
        direct = (probability - self.deltas) * np.exp(-self.epsilons)
        mirrored = 1 - np.exp(self.epsilons) * (1 - probability) - self.deltas
        return float(max(0.0, direct.max(), mirrored.max()))


def is_refuted(
    least: Callable[[float], float],
    *,
    num_canaries: int,
    num_guesses: int,
    num_right: int,
    beta: float,
) -> bool:
    """Whether so many right guesses have probability at most beta under a trade-off curve.

    Args:
        least: `TradeOff.least` of the curve.
        beta: 1 - confidence.

    Guarantees:
        1. A mechanism with this curve is refuted with probability at most beta
           (test_f_dp_bound_holds_for_randomised_response).
    """
    right = beta * num_right / num_canaries
    wrong = beta * (num_guesses - num_right) / num_canaries
    for count in range(num_right - 1, -1, -1):
        raised = max(wrong, least(min(right, 1.0)))
        right += (raised - wrong) * count / (num_guesses - count)
        wrong = raised
        if right + wrong > num_guesses / num_canaries:
            return True
    return False


def f_dp_lower_bound(
    mechanism: Mechanism, *, num_canaries: int, num_guesses: int, num_right: int, beta: float = 0.05
) -> float:
    """The largest epsilon, among mechanisms with this q, T and more noise, that is refuted.

    Args:
        mechanism: what is claimed; its num_steps were run.
        num_canaries, num_guesses, num_right: chosen before looking, or with beta divided by the
            number of choices.

    Returns:
        epsilon at the mechanism's delta; 0 if even 32 times the noise is not refuted; if the claim
        itself is refuted, the claim.
    """

    def refuted(factor: float) -> bool:
        noisier = mechanism.with_noise(round(mechanism.noise_multiplier * factor, 4))
        return is_refuted(
            TradeOff.of(noisier).least,
            num_canaries=num_canaries,
            num_guesses=num_guesses,
            num_right=num_right,
            beta=beta,
        )

    if not refuted(_LARGEST_FACTOR):
        return 0.0
    if refuted(1.0):
        return _cost(mechanism, 1.0)
    low, high = 1.0, _LARGEST_FACTOR  # high is refuted, low is not
    for _ in range(_NUM_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return _cost(mechanism, high)


def _cost(mechanism: Mechanism, factor: float) -> float:
    noisier = mechanism.with_noise(round(mechanism.noise_multiplier * factor, 4))
    return epsilon_of([(noisier, noisier.num_steps)], noisier.delta).value
