"""Exactly T steps, ever: no T + 1, and a resume does not forget what was spent (PITFALLS 5)."""

import dataclasses
from pathlib import Path

import pytest

from pipeline.privacy.accountant import epsilon_of
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.ledger import Attempt, Ledger, LedgerError, ReserveExhausted
from pipeline.privacy.mechanism import Mechanism

MECHANISM = Mechanism(
    num_records=1_000,
    expected_batch_size=20,
    sampling_probability=0.02,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    num_steps=30,
    reserve_steps=10,
    delta=1e-5,
)


def start(home: Path, first_step: int, mechanism: Mechanism = MECHANISM) -> Attempt:
    return Ledger(str(home), "photos").open_attempt(
        run="run",
        phase="private",
        mechanism=mechanism,
        key_commitment=AttemptKey.from_os_entropy().commitment(),
        first_step=first_step,
    )


def test_no_step_beyond_the_last(tmp_path: Path) -> None:
    attempt = start(tmp_path, 0)
    attempt.charge(0, 30)
    with pytest.raises(LedgerError, match="pass the last"):
        attempt.charge(30, 1)


def test_resuming_does_not_forget(tmp_path: Path) -> None:
    """Crash after crash: the total never passes T + reserve, and epsilon counts every step."""
    start(tmp_path, 0).charge(0, 10)
    start(tmp_path, 5).charge(5, 10)
    start(tmp_path, 10).charge(10, 15)
    ledger = Ledger(str(tmp_path), "photos")
    assert ledger.spent() == [(MECHANISM, 35)]
    last = start(tmp_path, 20)
    last.charge(20, 5)
    with pytest.raises(ReserveExhausted):
        last.charge(25, 5)
    last.finish("reserve_used_up", 25)
    promised = epsilon_of([(MECHANISM, 40)], 1e-5).value
    assert epsilon_of(ledger.spent(), 1e-5).value == promised


def test_a_longer_phase_is_not_slipped_in(tmp_path: Path) -> None:
    start(tmp_path, 0).charge(0, 10)
    for change in ({"num_steps": 31}, {"reserve_steps": 1_000}):
        with pytest.raises(LedgerError, match="began with another mechanism"):
            start(tmp_path, 0, dataclasses.replace(MECHANISM, **change))
