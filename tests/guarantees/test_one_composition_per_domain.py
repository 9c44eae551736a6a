"""All runs over the same pictures compose, prepared once or twice (PITFALLS 26, 34)."""

import dataclasses
from pathlib import Path

import pytest

from pipeline.privacy.accountant import epsilon_of
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.ledger import Attempt, BudgetExceeded, Ledger
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


def run_all(home: Path, run: str, phase: str, mechanism: Mechanism) -> None:
    attempt: Attempt = Ledger(str(home), "photos").open_attempt(
        run=run,
        phase=phase,
        mechanism=mechanism,
        key_commitment=AttemptKey.from_os_entropy().commitment(),
        first_step=0,
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


def test_disjoint_splits_are_added_up(tmp_path: Path) -> None:
    """Not composed in parallel, whatever the splits: the larger alone would be too little for
    sets that overlap, and nothing in a ledger proves that they do not."""
    small = dataclasses.replace(FIRST, num_records=500, sampling_probability=0.2)
    run_all(tmp_path, "a", "on-one-split", FIRST)
    run_all(tmp_path, "a", "on-the-other", small)
    report = Ledger(str(tmp_path), "photos").verify()
    alone = [epsilon_of([(m, 50)], 1e-5).value for m in (FIRST, small)]
    assert report.epsilon is not None
    assert report.epsilon.value == epsilon_of([(FIRST, 50), (small, 50)], 1e-5).value
    assert report.epsilon.value > max(alone)


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
