"""Noise and samples come once: over steps, chunks, ranks, attempts and forks (PITFALLS 2, 4, 16).

Each statistical test states its power. Keys are pinned where chance could fail a right program; a
threshold of 4.5 standard errors is passed by chance once in 150,000 comparisons.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from phase_fixtures import Crash, crash_at, run, units
from scipy import stats

from pipeline.data.stream import StreamConfig, Unit
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.noise import CHUNK, KeyedNoise
from pipeline.privacy.sampling import PoissonPlan
from pipeline.training.settings import PhaseSettings

NUM_VALUES = 5 * CHUNK
"""327,680: a standard deviation to 0.12 %."""

FAMILIES = {
    "whole chunks": (0, 0),
    "slices that begin inside a chunk": (0, CHUNK // 2 + 12_345),
    "far coordinates": (0, 4_800 * CHUNK),
    "beyond 2^32": (0, 2**33 + 17),
    "a late step": (999_999, 0),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_std_in_every_family_of_chunks(family: str) -> None:
    """Power: 1 % off is 8 standard errors; 0.55 %, the tolerance, is 4.5."""
    step, start = FAMILIES[family]
    noise = KeyedNoise(noise_key=AttemptKey.seeded(1).noise_key())
    values = noise.gaussian(step, start, start + NUM_VALUES)
    tolerance = 4.5 / math.sqrt(2 * NUM_VALUES)
    assert tolerance < 0.0056
    assert abs(values.std() - 1) < tolerance
    assert abs(values.mean()) < 4.5 / math.sqrt(NUM_VALUES)
    # The two halves of a chunk are the cosines and the sines: each must have the std of the whole.
    halves = noise.gaussian(step, 0, NUM_VALUES).reshape(5, 2, -1).swapaxes(0, 1).reshape(2, -1)
    assert np.all(np.abs(halves.std(axis=1) - 1) < tolerance * math.sqrt(2))


def test_noise_is_independent_over_steps_chunks_and_attempts() -> None:
    """Power: streams that share 3.5 % of their values or more are told apart (4.5 + 4.5 s.e.)."""
    keys = [AttemptKey.seeded(seed).noise_key() for seed in range(3)]
    streams = np.stack(
        [
            KeyedNoise(noise_key=key).gaussian(step, chunk * CHUNK, (chunk + 1) * CHUNK)
            for key in keys
            for step in (0, 1, 2, 256, 65_536)
            for chunk in (0, 1, 2, 256, 65_536)
        ]
    )
    for values in (streams, streams**2):  # signs alone would hide a reuse with signs flipped
        correlation = np.corrcoef(values) - np.eye(len(values))
        assert np.abs(correlation).max() < 5.0 / math.sqrt(CHUNK)  # of 2,775 pairs
    assert len(np.unique(streams)) > 0.999999 * streams.size


@pytest.mark.parametrize("world_size", [2, 4])
def test_noise_of_ranks_is_independent(world_size: int) -> None:
    """Slices of one step that are not multiples of a chunk; power as above, for each lag too."""
    noise = KeyedNoise(noise_key=AttemptKey.seeded(2).noise_key())
    size = CHUNK + 4_321
    slices = np.stack([noise.gaussian(7, r * size, (r + 1) * size) for r in range(world_size)])
    for lag in (0, 1, 4_321, size - CHUNK // 2):
        moved = np.roll(slices, lag, axis=1)
        correlation = np.corrcoef(slices, moved)[:world_size, world_size:]
        if lag == 0:
            correlation = correlation - np.eye(world_size)
        assert np.abs(correlation).max() < 5.0 / math.sqrt(size)


def test_samples_are_independent_over_steps_and_attempts() -> None:
    """Power: equal samples share 500 ids and not 25 +- 5: 95 standard errors in that pair; over
    all pairs, samples that share 2.5 % more than chance are 5 standard errors away.
    """
    num_records, q = 10_000, 0.05
    drawn = []
    for seed in range(6):
        plan = PoissonPlan(
            key=AttemptKey.seeded(seed).sampling_key(),
            num_records=num_records,
            sampling_probability=q,
        )
        drawn += [plan.record_ids(step) for step in range(10)]
    pairs = [(left, right) for index, left in enumerate(drawn) for right in drawn[:index]]
    shared = np.array([len(np.intersect1d(*pair, assume_unique=True)) for pair in pairs])
    # Given their sizes, independent samples share a hypergeometric number of records.
    expected = np.array([len(left) * len(right) / num_records for left, right in pairs])
    deviation = np.sqrt(expected) * (1 - q)
    assert np.abs((shared - expected) / deviation).max() < 6
    total = (shared - expected).sum() / math.sqrt((deviation**2).sum())
    assert abs(total) < 4.5


Drawn = dict[str, dict[object, np.ndarray]]


def resume_and_watch(settings: PhaseSettings, monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """What a phase draws from here to its end: record ids by step, noise by (step, slice)."""
    drawn: Drawn = {"ids": {}, "noise": {}}
    whole = KeyedNoise.gaussian

    def watched_noise(
        self: KeyedNoise, step: int, start: int, stop: int, out: np.ndarray | None = None
    ) -> np.ndarray:
        values = whole(self, step, start, stop, out)
        drawn["noise"][step, start, stop] = values.copy()
        return values

    def watched_units(config: StreamConfig) -> Iterator[Unit]:
        for unit in units(config):
            real = unit.record_ids[unit.record_ids >= 0]
            before = drawn["ids"].get(unit.step, np.empty(0, np.int64))
            drawn["ids"][unit.step] = np.sort(np.concatenate([before, real]))
            yield unit

    with monkeypatch.context() as patch:
        patch.setattr(KeyedNoise, "gaussian", watched_noise)
        run(settings, watched_units)
    return drawn


def test_two_forks_of_one_checkpoint_draw_differently(
    settings: Callable[..., PhaseSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole storage, ledger included, copied at step 2 and resumed twice: nothing repeats.

    Power: the samples of one step are equal by chance with probability below 1e-18, and noise
    that is reused is equal in every value.
    """
    made = settings("private")
    with pytest.raises(Crash):
        run(made, crash_at(3))
    kept = {tmp_path / name: tmp_path / f"kept-{name}" for name in ("phase", "domains")}
    for live, copy in kept.items():
        shutil.copytree(live, copy)
    first = resume_and_watch(made, monkeypatch)
    for live, copy in kept.items():
        shutil.rmtree(live)
        shutil.copytree(copy, live)
    second = resume_and_watch(made, monkeypatch)
    for name in ("ids", "noise"):
        assert first[name].keys() == second[name].keys() and len(first[name]) >= 4
        for place, values in first[name].items():
            assert not np.array_equal(values, second[name][place]), (name, place)
    left, right = (
        np.concatenate([each["noise"][place] for place in sorted(first["noise"])])  # type: ignore
        for each in (first, second)
    )
    assert not np.any(left == right)
    assert abs(stats.pearsonr(left, right).statistic) < 5.0 / math.sqrt(left.size)
