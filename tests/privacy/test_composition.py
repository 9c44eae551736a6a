"""What one record has paid: disjoint splits cost their dearest, all else adds up."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.privacy.accountant import epsilon_of
from pipeline.privacy.composition import (
    MAX_CASES,
    WHOLE,
    Charge,
    epsilon_of_charges,
    is_within,
    worst_cases,
)
from pipeline.privacy.mechanism import Mechanism

DELTA = 1e-5
MECHANISM = Mechanism(
    num_records=10_000,
    expected_batch_size=100,
    sampling_probability=0.01,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    num_steps=1_000,
    delta=DELTA,
)
LOUDER = MECHANISM.with_noise(2.0)
P, R = "a" * 32, "b" * 32


def epsilon(*events: tuple[Mechanism, int]) -> float:
    return epsilon_of(list(events), DELTA).value


def composed(*charges: Charge) -> float:
    return epsilon_of_charges(charges, DELTA).value


def test_disjoint_splits_cost_their_dearest() -> None:
    one, two = Charge(MECHANISM, 300, f"{P}/one"), Charge(LOUDER, 200, f"{P}/two")
    everywhere = Charge(LOUDER, 50, WHOLE)
    assert composed(one, two) == epsilon((MECHANISM, 300))
    assert composed(one, two, everywhere) == epsilon((MECHANISM, 300), (LOUDER, 50))
    again = Charge(MECHANISM, 100, f"{P}/one")
    assert composed(one, again, two) == epsilon((MECHANISM, 400))


def test_splits_of_two_preparations_add_up() -> None:
    """A picture may lie in one split of each: names and order of splits do not matter."""
    charges = [
        Charge(MECHANISM, 300, f"{P}/one"),
        Charge(MECHANISM, 200, f"{P}/two"),
        Charge(LOUDER, 100, f"{R}/one"),
        Charge(LOUDER, 400, f"{R}/two"),
    ]
    assert composed(*charges) == epsilon((MECHANISM, 300), (LOUDER, 400))
    assert composed(charges[0], charges[2]) == epsilon((MECHANISM, 300), (LOUDER, 100))


def test_groups_pay_for_every_split() -> None:
    group = replace(MECHANISM, privacy_unit="group_of_2")
    charges = [Charge(group, 30, f"{P}/one"), Charge(group, 20, f"{P}/two")]
    assert composed(*charges) == epsilon((group, 50))


def test_too_many_combinations_add_up() -> None:
    """Not told apart, so bounded by the sum of all."""
    charges = [
        Charge(MECHANISM, 1, f"{number:032x}/{name}") for number in range(7) for name in "ab"
    ]
    assert 2**7 > MAX_CASES
    assert worst_cases(charges) == [[(MECHANISM, 14)]]
    assert len(worst_cases(charges[:12])) == 2**6


def test_nothing_costs_nothing() -> None:
    assert composed() == composed(Charge(MECHANISM, 0, f"{P}/one")) == 0.0
    assert worst_cases([]) == [[]]


PARTS = st.sampled_from([WHOLE, *(f"{p}/{s}" for p in (P, R) for s in ("one", "two", "three"))])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([MECHANISM, LOUDER]), st.integers(0, 9), PARTS)))
def test_no_record_pays_more(drawn: list[tuple[Mechanism, int, str]]) -> None:
    """Against every place that a record may have, by brute force."""
    charges = [Charge(*each) for each in drawn]
    paid = set()
    for places in itertools.product(("one", "two", "three"), repeat=2):
        mine = {WHOLE, f"{P}/{places[0]}", f"{R}/{places[1]}"}
        steps = [
            sum(c.num_steps for c in charges if c.part in mine and c.mechanism == mechanism)
            for mechanism in (MECHANISM, LOUDER)
        ]
        paid.add(tuple(steps))
    cases = {
        tuple(dict(case).get(mechanism, 0) for mechanism in (MECHANISM, LOUDER))
        for case in worst_cases(charges)
    }
    assert cases <= paid
    for steps in paid:  # each record's bill is covered by a case
        assert any(all(a <= b for a, b in zip(steps, case, strict=True)) for case in cases)


@pytest.mark.parametrize("part", [WHOLE, f"{P}/two"])
def test_is_within_agrees(part: str) -> None:
    charges = [Charge(MECHANISM, 300, f"{P}/one"), Charge(MECHANISM, 200, part)]
    total = composed(*charges)
    assert is_within(charges, total, DELTA) and not is_within(charges, total - 1e-3, DELTA)
