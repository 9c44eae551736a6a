"""What one record has paid: everything, but of the disjoint splits of one preparation only its own.

The splits of one preparation share no record, and which one a record lies in is decided by itself
and public text alone. So whatever the splits paid, a record paid for one of them (parallel
composition). Splits of different preparations may share records and add up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

from pipeline.privacy.accountant import Epsilon, epsilon_of, rdp_epsilon_of
from pipeline.privacy.mechanism import Mechanism

WHOLE = ""
"""The part that every record may lie in."""
MAX_CASES = 64

Spent = list[tuple[Mechanism, int]]


class Charge(NamedTuple):
    """Steps of a mechanism, and the part of the domain whose records they sampled.

    Args:
        part: `PREPARATION/SPLIT`, or WHOLE where nothing is known to be disjoint.
    """

    mechanism: Mechanism
    num_steps: int
    part: str = WHOLE


def epsilon_of_charges(charges: Iterable[Charge], delta: float) -> Epsilon:
    """Returns what charges cost the record that they cost most, at `delta`.

    Raises:
        ValueError: as `epsilon_of`.

    Guarantees:
        1. Of disjoint splits the dearest counts, of splits that may overlap the sum
           (test_disjoint_splits_cost_their_dearest, test_splits_of_two_preparations_add_up).
        2. A group of records may have members in every split: all add up
           (test_groups_pay_for_every_split).
    """
    return max((epsilon_of(case, delta) for case in worst_cases(charges)), key=lambda e: e.value)


def is_within(charges: Iterable[Charge], epsilon: float, delta: float) -> bool:
    """Whether charges cost every record at most `epsilon`; the quick bound is asked first."""
    return all(
        rdp_epsilon_of(case, delta) <= epsilon or epsilon_of(case, delta).value <= epsilon
        for case in worst_cases(charges)
    )


def worst_cases(charges: Iterable[Charge]) -> list[Spent]:
    """Returns what the records of each combination of splits have paid; at least one case.

    More than MAX_CASES combinations are not told apart: then all charges add up, which bounds each.
    """
    paid = [charge for charge in charges if charge.num_steps > 0]
    preparations: dict[str, dict[str, list[Charge]]] = {}
    shared = []
    for charge in paid:
        preparation, _, split = charge.part.partition("/")
        if split:
            preparations.setdefault(preparation, {}).setdefault(split, []).append(charge)
        else:
            shared.append(charge)
    is_one_record = all(charge.mechanism.group_size == 1 for charge in paid)
    num_cases = math.prod(len(splits) for splits in preparations.values())
    if not is_one_record or num_cases > MAX_CASES:
        return [_counted(paid)]
    choices = itertools.product(*(splits.values() for splits in preparations.values()))
    return [_counted(itertools.chain(shared, *chosen)) for chosen in choices]


def _counted(charges: Iterable[Charge]) -> Spent:
    """(mechanism, steps), equal mechanisms counted together."""
    totals: dict[str, tuple[Mechanism, int]] = {}
    for mechanism, num_steps, _ in charges:
        key = mechanism.digest()
        totals[key] = (mechanism, totals.get(key, (mechanism, 0))[1] + num_steps)
    return list(totals.values())
