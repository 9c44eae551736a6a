"""The noise that a release needs: its source, its pieces, and how to have it in time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, Self

import numpy as np

NOISE_BLOCK = 2**20
"""Noise is drawn for so many coordinates at a time (8 MiB of float64)."""

_GRID_BITS = 20


class NoiseSource(Protocol):
    """Standard Gaussian numbers, each a pure function of (its key, step, absolute coordinate)."""

    def gaussian(self, step: int, start: int, stop: int) -> np.ndarray:
        """The numbers of coordinates start to stop at this step: float64, [stop - start]."""
        ...


def noise_grid(noise_std: float) -> float:
    """The grid that sum + noise is rounded to: 2^(floor(log2(noise_std)) - 20).

    Source: arXiv 2112.05307: the low bits of floating-point noise tell what it was added to.
    """
    if not (math.isfinite(noise_std) and noise_std > 0):
        raise ValueError(f"noise_std must be > 0 and finite, not {noise_std}")
    exponent = math.frexp(noise_std)[1] - 1 - _GRID_BITS
    if exponent < -149:
        raise ValueError(
            f"noise_std {noise_std} is too small: its grid 2^{exponent} is no fp32 number; "
            "raise max_grad_norm, which the learning rate can undo"
        )
    return math.ldexp(1.0, exponent)


def noise_blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The coordinates start to stop in pieces that end at multiples of NOISE_BLOCK."""
    while start < stop:
        end = min(stop, (start // NOISE_BLOCK + 1) * NOISE_BLOCK)
        yield start, end
        start = end


class NoiseAhead:
    """A noise source that draws a step's noise in the background while gradients are computed.

        noise = NoiseAhead(keyed_noise)
        noise.begin(step, *rank_slice(layout.num_coordinates))
        ...                                     # microbatches of the step
        release_gradient(..., step=step, noise_source=noise)

    The numbers are those of the source behind it; what was not begun is drawn on demand. It helps
    where the source releases the interpreter lock, as numpy and AES do.

    Args:
        source: the noise source behind it.
        num_threads: background threads.
        max_bytes: how much finished noise may wait; at least one block does.
    """

    def __init__(
        self, source: NoiseSource, *, num_threads: int = 1, max_bytes: int = 2**30
    ) -> None:
        for name, value in (("num_threads", num_threads), ("max_bytes", max_bytes)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, not {value}")
        self.source = source
        self._max_blocks = max(1, max_bytes // (8 * NOISE_BLOCK))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="noise")
        self._to_draw: deque[tuple[int, int, int]] = deque()
        self._drawn: dict[tuple[int, int, int], Future[np.ndarray]] = {}

    def begin(self, step: int, start: int, stop: int) -> None:
        """Start to draw the noise of these coordinates; drops what an earlier step left over."""
        self._drop()
        self._to_draw.extend((step, *block) for block in noise_blocks(start, stop))
        self._fill()

    def gaussian(self, step: int, start: int, stop: int) -> np.ndarray:
        """The source's numbers, waiting for them where they are being drawn."""
        drawn = self._drawn.pop((step, start, stop), None)
        if drawn is None:
            return self.source.gaussian(step, start, stop)
        self._fill()
        return drawn.result()

    def close(self) -> None:
        """Drop everything and end the threads."""
        self._drop()
        self._pool.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fill(self) -> None:
        while self._to_draw and len(self._drawn) < self._max_blocks:
            block = self._to_draw.popleft()
            self._drawn[block] = self._pool.submit(self.source.gaussian, *block)

    def _drop(self) -> None:
        self._to_draw.clear()
        for drawn in self._drawn.values():
            drawn.cancel()
        self._drawn.clear()
