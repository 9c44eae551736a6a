"""Steps and batches for a target: the largest that it allows, and not one more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.privacy.accountant import Epsilon, epsilon_of
from pipeline.privacy.mechanism import Mechanism
from pipeline.privacy.solve import calibrate_batch_size, calibrate_num_steps

MECHANISM = Mechanism(
    num_records=1_000,
    expected_batch_size=20,
    sampling_probability=0.02,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    num_steps=1,
    reserve_steps=3,
    delta=1e-4,
)


def cost(mechanism: Mechanism) -> float:
    return epsilon_of([(mechanism, mechanism.max_charged_steps)], mechanism.delta).value


@pytest.mark.parametrize("target", [0.9, 2.0, 5.0])
def test_most_steps(target: float) -> None:
    solved = calibrate_num_steps(MECHANISM, target_epsilon=target)
    assert cost(solved) <= target < cost(replace(solved, num_steps=solved.num_steps + 1))
    assert replace(solved, num_steps=1) == MECHANISM


@pytest.mark.parametrize("target", [1.5, 6.0])
def test_largest_batch(target: float) -> None:
    start = replace(MECHANISM, num_steps=50)
    solved = calibrate_batch_size(start, target_epsilon=target)
    size = solved.expected_batch_size
    more = replace(start, expected_batch_size=size + 1, sampling_probability=(size + 1) / 1_000)
    assert cost(solved) <= target < cost(more)
    assert solved.sampling_probability == size / 1_000


def test_brute_force() -> None:
    """Every n of a small range, tried."""
    noisy = replace(MECHANISM, noise_multiplier=0.6, reserve_steps=0)
    allowed = [n for n in range(1, 12) if cost(replace(noisy, num_steps=n)) <= 2.5]
    assert 1 < len(allowed) < 11
    assert calibrate_num_steps(noisy, target_epsilon=2.5).num_steps == max(allowed)


def test_brute_force_batch() -> None:
    """Every batch size of a set of fifteen, tried."""
    target = 3.0

    def with_batch(size: int) -> Mechanism:
        return replace(
            MECHANISM,
            num_records=15,
            expected_batch_size=size,
            sampling_probability=size / 15,
            noise_multiplier=2.0,
        )

    allowed = [size for size in range(1, 16) if cost(with_batch(size)) <= target]
    assert 1 < len(allowed) < 15 and allowed == list(range(1, len(allowed) + 1))
    for start in (1, 15):
        solved = calibrate_batch_size(with_batch(start), target_epsilon=target)
        assert solved == with_batch(max(allowed))


def test_the_reserve_may_follow_the_steps() -> None:
    def reserve_of(num_steps: int) -> int:
        return 5 + num_steps // 10

    solved = calibrate_num_steps(MECHANISM, target_epsilon=2.0, reserve_of=reserve_of)
    num = solved.num_steps
    assert solved.reserve_steps == reserve_of(num)
    more = replace(solved, num_steps=num + 1, reserve_steps=reserve_of(num + 1))
    assert cost(solved) <= 2.0 < cost(more)


def test_few_slow_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PLD takes 1.5 s at the paper's scale: the quick bound does most of the search."""
    asked: list[int] = []

    def counted(events: list[tuple[Mechanism, int]], delta: float) -> Epsilon:
        asked.append(events[0][1])
        return epsilon_of(events, delta)

    monkeypatch.setattr("pipeline.privacy.solve.epsilon_of", counted)
    calibrate_num_steps(replace(MECHANISM, noise_multiplier=2.0), target_epsilon=4.0)
    assert 0 < len(asked) <= 20


def test_the_whole_set_may_be_the_batch() -> None:
    quiet = replace(MECHANISM, noise_multiplier=100.0)
    assert calibrate_batch_size(quiet, target_epsilon=5.0).expected_batch_size == 1_000


def test_targets_that_cannot_be_met() -> None:
    loud = replace(MECHANISM, noise_multiplier=0.2)
    with pytest.raises(ValueError, match="is exceeded by step 1"):
        calibrate_num_steps(loud, target_epsilon=0.1)
    with pytest.raises(ValueError, match="target_epsilon is 0"):
        calibrate_num_steps(MECHANISM, target_epsilon=0.0)
