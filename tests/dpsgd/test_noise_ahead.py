"""Noise drawn in the background is the noise that would be drawn on demand."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pipeline.dpsgd import NoiseAhead
from pipeline.dpsgd.noise import NOISE_BLOCK, noise_blocks


class Counting:
    """Coordinate k of step s is k + s; remembers who asked for what."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.threads: set[str] = set()

    def gaussian(self, step: int, start: int, stop: int) -> np.ndarray:
        self.asked.append((step, start, stop))
        self.threads.add(threading.current_thread().name)
        return np.arange(start, stop, dtype=np.float64) + step


def test_blocks_end_at_absolute_multiples() -> None:
    assert list(noise_blocks(0, 0)) == []
    assert list(noise_blocks(5, 9)) == [(5, 9)]
    start, stop = NOISE_BLOCK - 3, 2 * NOISE_BLOCK + 7
    assert list(noise_blocks(start, stop)) == [
        (NOISE_BLOCK - 3, NOISE_BLOCK),
        (NOISE_BLOCK, 2 * NOISE_BLOCK),
        (2 * NOISE_BLOCK, 2 * NOISE_BLOCK + 7),
    ]


@pytest.mark.parametrize("max_bytes", [1, 16 * NOISE_BLOCK, 2**30])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_same_numbers_each_drawn_once_in_the_background(
    num_threads: int, max_bytes: int
) -> None:
    source = Counting()
    stop = 3 * NOISE_BLOCK + 11
    with NoiseAhead(source, num_threads=num_threads, max_bytes=max_bytes) as noise:
        for step in range(2):
            noise.begin(step, 0, stop)
            for block in noise_blocks(0, stop):
                found = noise.gaussian(step, *block)
                np.testing.assert_array_equal(found, Counting().gaussian(step, *block))
    assert sorted(source.asked) == [(s, *block) for s in (0, 1) for block in noise_blocks(0, stop)]
    assert all(thread.startswith("noise") for thread in source.threads)


def test_what_was_not_begun_is_drawn_on_demand_and_what_was_left_is_dropped() -> None:
    source = Counting()
    with NoiseAhead(source, max_bytes=1) as noise:
        noise.begin(0, 0, 4 * NOISE_BLOCK)
        noise.begin(1, 0, 10)
        np.testing.assert_array_equal(noise.gaussian(5, 2, 4), [7.0, 8.0])
        np.testing.assert_array_equal(noise.gaussian(1, 0, 10), np.arange(10.0) + 1)
    assert len([asked for asked in source.asked if asked[0] == 0]) <= 1


def test_an_error_of_the_source_is_not_lost() -> None:
    class Broken:
        def gaussian(self, step: int, start: int, stop: int) -> np.ndarray:
            raise RuntimeError("no entropy")

    with NoiseAhead(Broken()) as noise:
        noise.begin(0, 0, 10)
        with pytest.raises(RuntimeError, match="no entropy"):
            noise.gaussian(0, 0, 10)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="num_threads"):
        NoiseAhead(Counting(), num_threads=0)
    with pytest.raises(ValueError, match="max_bytes"):
        NoiseAhead(Counting(), max_bytes=0)
