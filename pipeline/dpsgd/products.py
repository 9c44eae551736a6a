"""Matrix products whose sums are fp32, whatever the operands and whatever the user allows his own.

A product of two bf16 numbers is an fp32 number, exactly. A GPU multiplies bf16 matrices ten times
faster than fp32 ones and can hand out its fp32 sums, so norms and clipped sums of a bf16 step are
made of bf16 operands there. On the CPU, where torch cannot, they are cast first: the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

CAST_NUMBERS = 2**19
"""On the CPU, bf16 numbers are cast so many at a time: 2 MiB of fp32, which stay in the cache."""

_HAS_BACKEND_PRECISION = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # torch >= 2.9
_HAS_OUTPUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()  # torch >= 2.8


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms, factors and sums are kept in fp32, or in fp64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _lowered_backends() -> list[tuple[Any, str]]:
    """The backends whose fp32 products the user lets be rounded, with what he lets them do."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    set_to = [(backend, backend.fp32_precision) for backend in backends]
    return [(backend, name) for backend, name in set_to if name not in ("none", "ieee")]


def products_are_rounded() -> bool:
    """Whether products of fp32 matrices may be done in TF32 or bf16."""
    if _HAS_BACKEND_PRECISION:
        return bool(_lowered_backends())
    return torch.get_float32_matmul_precision() != "highest"


@contextmanager
def exact_products() -> Iterator[None]:
    """Matrix products of fp32 tensors in fp32, whatever the user allows his own (TF32, bf16)."""
    if not _HAS_BACKEND_PRECISION:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
        return
    lowered = _lowered_backends()
    for backend, _ in lowered:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in lowered:
            backend.fp32_precision = precision


def sums_stay_wide(values: Tensor) -> bool:
    """Whether products of bf16 matrices like this one can be had in fp32, unrounded."""
    return _HAS_OUTPUT_DTYPE and values.dtype == torch.bfloat16 and values.device.type == "cuda"


def for_wide_product(values: Tensor) -> Tensor:
    """The operand as `wide_product` takes it: cast once, where it is to be used more than once."""
    return values if sums_stay_wide(values) else values.to(accumulation_dtype(values.dtype))


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of two matrices, or of two batches of them, with fp32 sums (fp64 of fp64)."""
    multiply = torch.bmm if left.dim() == 3 else torch.mm
    if sums_stay_wide(left) and sums_stay_wide(right):
        return multiply(left, right, out_dtype=torch.float32)  # type: ignore[call-overload]
    return multiply(for_wide_product(left), for_wide_product(right))


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 tensor as the sum of two bf16 ones, to 2^-17 of each number."""
    high = values.to(torch.bfloat16)
    return high, (values - high.to(values.dtype)).to(torch.bfloat16)


def for_sums(values: Tensor) -> Iterator[Tensor]:
    """[N, ...] in consecutive pieces, in the dtype of sums; one piece where nothing is cast."""
    dtype = accumulation_dtype(values.dtype)
    if values.dtype == dtype or values.device.type != "cpu":
        yield values.to(dtype)
        return
    rows_at_once = max(1, CAST_NUMBERS * len(values) // max(1, values.numel()))
    for piece in values.split(rows_at_once):
        yield piece.to(dtype)


def summed_over_positions(values_MTC: Tensor) -> Tensor:
    """[M, T, C] summed over T in the dtype of sums, [M, C]."""
    dtype = accumulation_dtype(values_MTC.dtype)
    if values_MTC.device.type != "cpu" or values_MTC.shape[1] == 1:
        return values_MTC.sum(dim=1, dtype=dtype)
    ones_1T = values_MTC.new_ones(1, values_MTC.shape[1], dtype=dtype)
    # As a product, which reads memory in order: twice as fast as sum() at width 2,048.
    pieces = for_sums(values_MTC)
    return torch.cat([torch.matmul(ones_1T, piece_MTC).squeeze(1) for piece_MTC in pieces])
