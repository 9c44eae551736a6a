"""Two processes release what one does; ranks that differ are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_planted_faults import SETTINGS

from pipeline.audit import check_ranks, rank_check
from pipeline.audit.step import AuditSettings, observe
from pipeline.privacy.noise import KeyedNoise


def test_two_processes_release_what_one_does() -> None:
    found = check_ranks(SETTINGS)
    assert found.passed, found.detail


def run_with_noise_by_rank(rank: int, folder: str, settings: AuditSettings) -> None:
    """Noise from each rank's own position 0: slices of it repeat each other."""
    original = KeyedNoise.gaussian
    KeyedNoise.gaussian = (  # type: ignore[method-assign]
        lambda self, step, start, stop, out=None: original(self, step, 0, stop - start)
    )
    original_run(rank, folder, settings)


def run_with_all_shares(rank: int, folder: str, settings: AuditSettings) -> None:
    """Each rank reads the whole sample."""
    rank_check.observe = lambda settings, num_steps, rank: observe(  # type: ignore[assignment]
        settings, num_steps=num_steps
    )
    original_run(rank, folder, settings)


def run_with_other_seeds(rank: int, folder: str, settings: AuditSettings) -> None:
    """Each rank has an attempt key of its own."""
    original_run(rank, folder, replace(settings, seed=rank))


original_run = rank_check._run_rank


@pytest.mark.parametrize(
    "fault", [run_with_noise_by_rank, run_with_all_shares, run_with_other_seeds]
)
def test_ranks_that_differ_are_found(fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_check, "_run_rank", fault)
    found = check_ranks(SETTINGS)
    assert not found.passed, found.detail
