"""The whole privacy profile of a mechanism: delta for every epsilon, not for one."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.privacy.accountant import PLD_INTERVAL
from pipeline.privacy.mechanism import Mechanism


def privacy_profile(mechanism: Mechanism, num_steps: int, epsilons: Sequence[float]) -> list[float]:
    """Returns an upper bound on delta at each epsilon after `num_steps`, by PLD.

    Args:
        mechanism: of a private phase.
        num_steps: >= 1.
        epsilons: each >= 0.

    Source: arXiv 2207.04380 (connect-the-dots PLD).
    """
    from dp_accounting import NeighboringRelation, pld  # noqa: PLC0415 - takes 1.5 s

    accountant = pld.PLDAccountant(
        NeighboringRelation[mechanism.adjacency.upper()],
        value_discretization_interval=10 * PLD_INTERVAL,
    )
    accountant.compose(mechanism.event(num_steps))
    return [float(accountant.get_delta(epsilon)) for epsilon in epsilons]
