"""From an image's gradient norm to the factor its gradient is multiplied by.

The sum of clipped gradients is what gets noise; its *sensitivity*, the most that one image can add
to it, is stated by the clipper and never typed by hand. Where a gradient is clipped in K blocks
(`blocks.py`), each block has a clipper of its own, `of_blocks(K)`: R / sqrt(K) each are R together.

Source: flat clipping: Abadi et al., arXiv 1607.00133, Algorithm 1. Automatic clipping: Bu et al.,
arXiv 2206.07136, Theorem 1. Global clipping: Bu et al., arXiv 2106.07830, section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

MARGIN = 1.0 - 2.0**-12
"""Factors aim at max_grad_norm x MARGIN, so that rounding in fp32 never carries a sum over it."""


class Clipping(Protocol):
    """What the engine needs of a clipper."""

    @property
    def sensitivity(self) -> float:
        """The largest Euclidean norm that one image can add to the sum."""
        ...

    def factors(self, norms_M: Tensor) -> Tensor:
        """The factor of each norm, in the shape and dtype of the norms, each by itself."""
        ...

    def of_blocks(self, num_blocks: int) -> Clipping:
        """The clipper of each of K blocks: K gradients that it has clipped, side by side, are
        never longer than this clipper's sensitivity."""
        ...


SMALLEST = 1e-9
"""Squares of numbers under 1e-19 are 0 in fp32, so a norm may be too small by 1e-19 times the
square root of the number of parameters: far within the margin of a bound not under this."""


def _check_positive(field: str, value: float, *, may_be_infinite: bool = False) -> None:
    if math.isnan(value) or value < SMALLEST or (math.isinf(value) and not may_be_infinite):
        allowed = f"at least {SMALLEST}" + ("" if may_be_infinite else " and finite")
        raise ValueError(f"{field} must be {allowed}, not {value}")


def _share(max_grad_norm: float, num_blocks: int) -> float:
    """The bound of each of K blocks: K of them side by side have the length max_grad_norm."""
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
    return max_grad_norm / math.sqrt(num_blocks)


def _normal_or_zero(factors_M: Tensor) -> Tensor:
    """0 for a factor that is no normal number: that of a NaN, infinite or absurdly long norm."""
    is_normal_M = factors_M >= torch.finfo(factors_M.dtype).tiny  # False for NaN
    return torch.where(is_normal_M, factors_M, torch.zeros_like(factors_M))


@dataclass(frozen=True)
class FlatClipping:
    """Shrink a gradient that is longer than max_grad_norm; leave shorter ones alone.

    With R = max_grad_norm (1 - 2^-12), the factor of a norm n is min(1, R / n):

    | norm | 0 | n <= R | n > R | inf | NaN |
    |---|---|---|---|---|---|
    | factor | 1 | 1 | R / n | 0 | 0 |

    Args:
        max_grad_norm: bound on what one image adds; > 0. Infinity clips nothing (no privacy).

    Guarantees:
        1. n x factor <= sensitivity for every n, in fp32 (tests/guarantees/test_sensitivity.py).
    """

    max_grad_norm: float

    def __post_init__(self) -> None:
        _check_positive("max_grad_norm", self.max_grad_norm, may_be_infinite=True)

    @property
    def sensitivity(self) -> float:
        """max_grad_norm."""
        return self.max_grad_norm

    def factors(self, norms_M: Tensor) -> Tensor:
        """min(1, R / n) for every norm."""
        factors_M = (self.max_grad_norm * MARGIN / norms_M).clamp_max(1.0)
        return _normal_or_zero(factors_M)

    def of_blocks(self, num_blocks: int) -> FlatClipping:
        """The same, with max_grad_norm / sqrt(K)."""
        return replace(self, max_grad_norm=_share(self.max_grad_norm, num_blocks))


@dataclass(frozen=True)
class AutomaticClipping:
    """Normalise every gradient to almost max_grad_norm, whatever its length.

    With R = max_grad_norm (1 - 2^-12), the factor of a norm n is R / (n + gamma):

    | norm | 0 | n | inf | NaN |
    |---|---|---|---|---|
    | factor | R / gamma | R / (n + gamma) | 0 | 0 |

    Args:
        max_grad_norm: bound on what one image adds; > 0 and finite.
        gamma: keeps small gradients small; > 0 and finite.

    Guarantees:
        1. n x factor < sensitivity for every n, in fp32 (tests/guarantees/test_sensitivity.py).
    """

    max_grad_norm: float
    gamma: float = 0.01

    def __post_init__(self) -> None:
        _check_positive("max_grad_norm", self.max_grad_norm)
        _check_positive("gamma", self.gamma)

    @property
    def sensitivity(self) -> float:
        """max_grad_norm."""
        return self.max_grad_norm

    def factors(self, norms_M: Tensor) -> Tensor:
        """R / (n + gamma) for every norm."""
        return _normal_or_zero(self.max_grad_norm * MARGIN / (norms_M + self.gamma))

    def of_blocks(self, num_blocks: int) -> AutomaticClipping:
        """The same, with max_grad_norm / sqrt(K)."""
        return replace(self, max_grad_norm=_share(self.max_grad_norm, num_blocks))


@dataclass(frozen=True)
class GlobalClipping:
    """Keep a gradient as it is, or drop it when it is longer than max_grad_norm.

    With R = max_grad_norm (1 - 2^-12):

    | norm | 0 | n <= R | n > R | inf | NaN |
    |---|---|---|---|---|---|
    | factor | 1 | 1 | 0 | 0 | 0 |

    Args:
        max_grad_norm: bound on what one image adds; > 0 and finite.

    Guarantees:
        1. n x factor <= sensitivity for every n (tests/guarantees/test_sensitivity.py).
    """

    max_grad_norm: float

    def __post_init__(self) -> None:
        _check_positive("max_grad_norm", self.max_grad_norm)

    @property
    def sensitivity(self) -> float:
        """max_grad_norm: longer gradients are dropped, not scaled."""
        return self.max_grad_norm

    def factors(self, norms_M: Tensor) -> Tensor:
        """1 where the norm is within the bound, else 0."""
        return (norms_M <= self.max_grad_norm * MARGIN).to(norms_M.dtype)

    def of_blocks(self, num_blocks: int) -> GlobalClipping:
        """The same, with max_grad_norm / sqrt(K)."""
        return replace(self, max_grad_norm=_share(self.max_grad_norm, num_blocks))


def make_clipping(name: str, max_grad_norm: float, gamma: float = 0.01) -> Clipping:
    """The clipper of that name: "flat", "automatic" or "global"; gamma serves "automatic" alone."""
    if name == "flat":
        return FlatClipping(max_grad_norm)
    if name == "automatic":
        return AutomaticClipping(max_grad_norm, gamma)
    if name == "global":
        return GlobalClipping(max_grad_norm)
    raise ValueError(f"clipping must be 'flat', 'automatic' or 'global', not {name!r}")
