"""Where a step's gradient comes from: the private release, or the ordinary public average.

Both have one face, so that the loop in phase.py is the same for public and private phases.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pipeline.dpsgd.release import (
    PublicGradient,
    ReleasedGradient,
)


class GradientSource(Protocol):
    """Turns the microbatches of a logical step into one gradient."""

    def begin_step(self, step: int) -> None:
        """Start a logical step."""

    def accumulate(self, images: Tensor, mask_uniforms: Tensor, weights: Tensor) -> None:
        """Add a microbatch: images [M,3,H,W], mask uniforms [M,T], weights [M] (0 = padding)."""

    def finish_step(self, step: int) -> ReleasedGradient | PublicGradient:
        """The step's gradient, the same on every rank."""

    def public_loss(self) -> float | None:
        """Mean training loss since the last window, public phases only."""

    def end_window(self) -> None:
        """A checkpoint is being written."""

    def close(self) -> None:
        """Stop background work."""
