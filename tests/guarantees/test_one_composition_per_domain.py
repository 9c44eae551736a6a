"""All runs over the same pictures compose, prepared once or twice (PITFALLS 26, 34)."""

import dataclasses
from pathlib import Path

import pytest

from pipeline.privacy.accountant import epsilon_of
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.ledger import Attempt, BudgetExceeded, Ledger, LedgerError
from pipeline.privacy.mechanism import Mechanism

FIRST = Mechanism(
    num_records=1_000,
    expected_batch_size=100,
    sampling_probability=0.1,
    noise_multiplier=2.0,
    max_grad_norm=1.0,
    num_steps=50,
    delta=1e-5,
)
SECOND = dataclasses.replace(FIRST, noise_multiplier=3.0, num_steps=80)


def run_all(home: Path, run: str, phase: str, mechanism: Mechanism, part: str = "") -> None:
    attempt: Attempt = Ledger(str(home), "photos").open_attempt(
        run=run,
        phase=phase,
        mechanism=mechanism,
        key_commitment=AttemptKey.from_os_entropy().commitment(),
        first_step=0,
        part=part,
    )
    attempt.charge(0, mechanism.num_steps)


def test_one_composition_per_domain(tmp_path: Path) -> None:
    run_all(tmp_path, "a", "first", FIRST)
    run_all(tmp_path, "a", "second", SECOND)
    run_all(tmp_path, "b", "first", FIRST)
    ledger = Ledger(str(tmp_path), "photos")  # as a second preparation of the bucket opens it
    total = epsilon_of(ledger.spent(), 1e-5).value
    alone = [epsilon_of([(m, m.num_steps)], 1e-5).value for m in (FIRST, SECOND)]
    assert total > max(alone)
    assert total < 2 * alone[0] + alone[1]
    assert total == epsilon_of([(FIRST, 100), (SECOND, 80)], 1e-5).value
    assert epsilon_of(ledger.spent_by("b"), 1e-5).value == alone[0]
    report = ledger.verify()
    assert report.epsilon is not None and report.epsilon.value == total


SMALL = dataclasses.replace(FIRST, num_records=500, sampling_probability=0.2)
ONE, OTHER = f"{'a' * 32}/one", f"{'a' * 32}/other"


def total_of(home: Path) -> float:
    epsilon = Ledger(str(home), "photos").verify().epsilon
    assert epsilon is not None
    return epsilon.value


def test_splits_that_nothing_shows_to_be_disjoint_add_up(tmp_path: Path) -> None:
    """Sets that merely have other sizes, and splits of two preparations, may share records."""
    run_all(tmp_path, "a", "whole", FIRST)
    run_all(tmp_path, "b", "split", SMALL, ONE)
    assert total_of(tmp_path) == epsilon_of([(FIRST, 50), (SMALL, 50)], 1e-5).value
    run_all(tmp_path, "c", "split", SMALL, f"{'b' * 32}/other")
    assert total_of(tmp_path) == epsilon_of([(FIRST, 50), (SMALL, 100)], 1e-5).value


def test_disjoint_splits_of_one_preparation_cost_their_dearest(tmp_path: Path) -> None:
    run_all(tmp_path, "a", "first", FIRST, ONE)
    run_all(tmp_path, "b", "first", SMALL, OTHER)
    alone = [epsilon_of([(m, 50)], 1e-5).value for m in (FIRST, SMALL)]
    assert alone[0] < alone[1] == total_of(tmp_path)


def test_a_budget_is_spent_by_the_dearest_split(tmp_path: Path) -> None:
    ledger = Ledger(str(tmp_path), "photos")
    ledger.set_budget(1.2 * epsilon_of([(FIRST, 50)], 1e-5).value, 1e-5)
    run_all(tmp_path, "a", "first", FIRST, ONE)
    run_all(tmp_path, "b", "first", FIRST, OTHER)
    ledger.verify()
    for part in (ONE, OTHER, "", f"{'b' * 32}/one"):
        with pytest.raises(BudgetExceeded):
            run_all(tmp_path, f"c{part[:1]}", "first", FIRST, part)


@pytest.mark.parametrize("part", ["one", "/one", "a" * 32, f"{'a' * 32}/", f"{'A' * 32}/one"])
def test_a_part_that_is_none_is_refused(tmp_path: Path, part: str) -> None:
    with pytest.raises(LedgerError, match="PREPARATION/SPLIT"):
        run_all(tmp_path, "a", "first", FIRST, part)


def test_a_domain_budget_bounds_all_runs(tmp_path: Path) -> None:
    alone = epsilon_of([(FIRST, 50)], 1e-5).value
    Ledger(str(tmp_path), "photos").set_budget(1.2 * alone, 1e-5)
    run_all(tmp_path, "a", "first", FIRST)
    with pytest.raises(BudgetExceeded):
        run_all(tmp_path, "b", "first", FIRST)
    # Another domain has nothing to do with it.
    other = Ledger(str(tmp_path), "scans")
    assert other.spent() == [] and other.budget is None


def test_unprotected_access_stays_on_record(tmp_path: Path) -> None:
    Ledger(str(tmp_path), "photos").record_unprotected("rehearsal", "private", "no noise")
    run_all(tmp_path, "a", "first", FIRST)
    ledger = Ledger(str(tmp_path), "photos")
    assert ledger.has_unprotected
    assert not ledger.verify().is_total_bounded
    (tmp_path / "photos" / "00000000.json").unlink()
    with pytest.raises(ValueError, match="lacks entry 0"):
        Ledger(str(tmp_path), "photos").verify()
