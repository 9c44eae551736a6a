"""95 % intervals of the numbers that evaluation reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z_95 = 1.959963984540054
# Two-sided 95 % quantiles of Student's t for 1 to 9 degrees of freedom.
_T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


def wilson_interval(num_right: int, num_images: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion."""
    share, z2 = num_right / num_images, Z_95**2
    centre = (share + z2 / (2 * num_images)) / (1 + z2 / num_images)
    spread = math.sqrt(share * (1 - share) / num_images + z2 / (4 * num_images**2))
    half = Z_95 * spread / (1 + z2 / num_images)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of the mean of a few independent values; None for fewer than two."""
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = _student_quantile(count - 1) * math.sqrt(variance / count)
    return mean - half, mean + half


def _student_quantile(freedom: int) -> float:
    """Table for few degrees of freedom, Cornish and Fisher's expansion (error < 1e-4) for more."""
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    z = Z_95
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
