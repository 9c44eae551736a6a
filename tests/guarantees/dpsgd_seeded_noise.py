"""A noise source for the tests of the DP engine."""

from __future__ import annotations

import numpy as np


class SeededNoise:
    """A NoiseSource for tests: numpy, one stream per (seed, step, chunk of 64 coordinates)."""

    chunk = 64

    def __init__(self, seed: int = 0, scale: float = 1.0) -> None:
        self.seed = seed
        self.scale = scale
        self.drawn: list[tuple[int, int, int]] = []

    def gaussian(self, step: int, start: int, stop: int) -> np.ndarray:
        """By absolute coordinate, and written down."""
        self.drawn.append((step, start, stop))
        first, last = start // self.chunk, -(-stop // self.chunk)
        chunks = [
            np.random.default_rng([self.seed, step, chunk]).standard_normal(self.chunk)
            for chunk in range(first, last)
        ]
        numbers = np.concatenate([np.zeros(0), *chunks])
        return self.scale * numbers[start - first * self.chunk : stop - first * self.chunk]
