"""PITFALLS 5 and 25: the ledger is charged before a step runs; else the step does not run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from phase_fixtures import Crash, crash_at, run

from pipeline.data.shards import StorageFault
from pipeline.privacy.ledger import Attempt, Ledger, LedgerStorageError
from pipeline.training.gradients import PrivateGradients
from pipeline.training.settings import PhaseSettings

Make = Callable[..., PhaseSettings]


def charged(settings: PhaseSettings) -> int:
    assert settings.ledger_home and settings.domain
    ledger = Ledger(settings.ledger_home, settings.domain)
    return sum(steps for _, steps in ledger.spent_by(settings.run))


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose images reached the model, in order."""
    steps: list[int] = []
    original = PrivateGradients.begin_step

    def begin(self: PrivateGradients, step: int) -> None:
        steps.append(step)
        original(self, step)

    monkeypatch.setattr(PrivateGradients, "begin_step", begin)
    return steps


def test_no_step_before_its_charge(
    settings: Make, monkeypatch: pytest.MonkeyPatch, executed: list[int]
) -> None:
    made = settings("private")
    original = PrivateGradients.accumulate

    def accumulate(self: PrivateGradients, *batch: object) -> None:
        assert executed[-1] < charged(made), "a step runs that nobody paid for"
        original(self, *batch)  # type: ignore[arg-type]

    monkeypatch.setattr(PrivateGradients, "accumulate", accumulate)
    run(made)
    assert executed == list(range(6)) and charged(made) == 6


def test_a_ledger_that_fails_stops_the_phase(
    settings: Make, monkeypatch: pytest.MonkeyPatch, executed: list[int]
) -> None:
    original = Attempt.charge

    def charge(self: Attempt, first_step: int, num_steps: int) -> object:
        if first_step >= 2:
            raise LedgerStorageError("the disk is full")
        return original(self, first_step, num_steps)

    monkeypatch.setattr(Attempt, "charge", charge)
    with pytest.raises(LedgerStorageError, match="the disk is full"):
        run(settings("private"))
    assert executed == [0, 1]


def test_a_lost_reservation_stays_charged(settings: Make, executed: list[int]) -> None:
    made = settings("private")
    with pytest.raises(Crash):
        run(made, crash_at(3))
    assert charged(made) == 4
    outcome, shown = run(made)
    assert (outcome.step, outcome.finished) == (6, "complete")
    assert executed == [0, 1, 2, 3, 2, 3, 4, 5]
    assert charged(made) == 8 >= len(set(executed))
    assert shown[-1].epsilon is not None


def test_reserve_exhausted_ends_early(settings: Make, executed: list[int]) -> None:
    """T = 6 and 4 spare steps: three lost windows of 2 leave room for two windows only."""
    made = settings("private")
    for _ in range(3):
        with pytest.raises(Crash):
            run(made, crash_at(1))
    outcome, _ = run(made)
    assert (outcome.step, outcome.finished) == (4, "reserve_used_up")
    assert charged(made) == 10
    again, shown = run(made)
    assert again == outcome and not shown and charged(made) == 10


def test_a_zombie_attempt_is_stopped(settings: Make, executed: list[int]) -> None:
    made = settings("private")
    assert made.ledger_home and made.domain and made.mechanism

    def rival(config: object) -> object:
        from pipeline.privacy.keys import AttemptKey

        ledger = Ledger(made.ledger_home or "", made.domain or "")
        for unit in units_then(config):
            if unit.step == 1:
                ledger.open_attempt(
                    run=made.run,
                    phase=made.phase.name,
                    mechanism=made.mechanism,  # type: ignore[arg-type]
                    key_commitment=AttemptKey.from_os_entropy().commitment(),
                    first_step=0,
                )
            yield unit

    with pytest.raises(ValueError, match="attempt"):
        run(made, rival)  # type: ignore[arg-type]
    assert max(executed) == 1


def units_then(config: object) -> object:
    from phase_fixtures import units

    return units(config)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["000000.tar", "index.arrow"])
def test_a_damaged_set_is_found_before_the_charge(
    settings: Make, executed: list[int], private_set: str, name: str
) -> None:
    path = Path(private_set) / name
    path.write_bytes(path.read_bytes()[:-600])
    made = settings("private")
    for _ in range(2):
        with pytest.raises(StorageFault, match="delete that folder"):
            run(made)
    assert not executed and charged(made) == 0
