# ruff: noqa: PLR0917 - the rules have the signatures of the torch functions they stand for
"""Images and parameters side by side: arithmetic, concatenation, attention.

A parameter is lifted to an activation with one copy per row; its gradient is per image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.dpsgd.per_image import (
    FormedGradients,
    OwnRows,
)
from pipeline.dpsgd.products import accumulation_dtype, summed_over_positions
from pipeline.dpsgd.tape import (
    Contribute,
    Contribution,
    Site,
    Target,
)
from pipeline.dpsgd.tracing import ParameterTrace

aten = torch.ops.aten


def by_image(values: Tensor, num_images: int) -> Tensor:
    """[N, ..., C] seen as [M, T, C], where T counts all positions of one image."""
    return values.reshape(num_images, -1, values.shape[-1])


def for_product(tensor: Tensor) -> Tensor:
    """As autocast does for matrix products: in the lower precision, where it is on."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def trained_among(trace: ParameterTrace, *tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None and trace.is_trained(tensor)]


class _Lift(torch.autograd.Function):
    """A parameter seen by every row; its gradient is left on the tape, row by row."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, value: Tensor, shape: Sequence[int], site: Site
    ) -> Tensor:
        ctx.site = site
        return value.expand(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        with torch._C.DisableTorchFunction():
            ctx.site.receive(gradient)
        return None, None, None, None


def lift(
    trace: ParameterTrace, operation: str, value: Tensor, num_dims: int, num_rows: int
) -> Tensor:
    """A trained tensor as an activation of `num_dims` dimensions and `num_rows` rows.

    A tensor without an image dimension is repeated (without copying) for every row. One that has
    `num_rows` rows already is taken to have one block of them per image.
    """
    aligned = (1,) * (num_dims - value.dim()) + tuple(value.shape)
    source = trace.spread_source(value)
    if aligned[0] == 1:
        contribute = _per_row(trace.target(value))
        targets = [trace.target(value)]
    elif source is not None and (source.dim() < num_dims or source.shape[0] == 1):
        targets = [trace.target(source)]
        contribute = _per_row(targets[0], (1,) * (num_dims - source.dim()) + tuple(source.shape))
    else:
        targets = [trace.target(value)]
        contribute = _own_rows(targets[0])
    site = trace.tape.open_site(operation, targets, num_rows, contribute)
    shape = (num_rows, *aligned[1:])
    return _Lift.apply(trace.anchor, value.detach().view(aligned), shape, site)


def _per_row(target: Target, source: Sequence[int] = ()) -> Contribute:
    """Every row read the whole tensor; along dimensions of length 1 in `source` it was repeated."""

    def contribute(
        gradient: Tensor, saved: tuple[Tensor, ...], num_images: int
    ) -> Iterator[Contribution]:
        repeated = [dim for dim, size in enumerate(source) if dim > 0 and size == 1]
        if repeated:
            gradient = gradient.sum(repeated, dtype=accumulation_dtype(gradient.dtype))
        rows_MKP = gradient.reshape(num_images, gradient.shape[0] // num_images, -1)
        yield target, FormedGradients(values=summed_over_positions(rows_MKP))

    return contribute


def _own_rows(target: Target) -> Contribute:
    """Every image read its own rows."""

    def contribute(
        gradient: Tensor, saved: tuple[Tensor, ...], num_images: int
    ) -> Iterator[Contribution]:
        yield target, OwnRows(values_MR=gradient.reshape(num_images, -1))

    return contribute


def lift_value(
    trace: ParameterTrace, operation: str, values: Any, num_dims: int, num_rows: int
) -> Any:
    """Arguments with every trained tensor lifted, also inside lists and tuples."""
    if isinstance(values, Tensor):
        if trace.is_trained(values):
            return lift(trace, operation, values, num_dims, num_rows)
        return values
    if isinstance(values, list | tuple):
        return type(values)(
            [lift_value(trace, operation, value, num_dims, num_rows) for value in values]
        )
    return values


def elementwise(
    trace: ParameterTrace, func: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """An operation on numbers at the same place, with broadcasting: +, *, where, ..."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    if not shape or kwargs.get("out") is not None:
        trained = trained_among(trace, *tensors)
        raise trace.refuse(func.__name__, trained, "the result must be a new tensor per image")
    lifted = lift_value(trace, func.__name__, args, len(shape), shape[0])
    named = {
        name: lift_value(trace, func.__name__, value, len(shape), shape[0])
        for name, value in kwargs.items()
    }
    return func(*lifted, **named)


def concatenate(
    trace: ParameterTrace, func: Callable[..., Tensor], tensors: Sequence[Tensor], dim: int = 0
) -> Tensor:
    """`cat` and `stack` along any dimension but the image dimension."""
    num_dims = tensors[0].dim() + (func is torch.stack)
    if dim % num_dims == 0:
        raise trace.refuse(
            func.__name__, trained_among(trace, *tensors), "it joins along the image dimension"
        )
    lifted = [
        lift(trace, func.__name__, tensor, tensor.dim(), tensor.shape[0])
        if trace.is_trained(tensor)
        else tensor
        for tensor in tensors
    ]
    return func(lifted, dim)


def attention(
    trace: ParameterTrace,
    func: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """`F.scaled_dot_product_attention` with a trained bias, query, key or value."""
    rows = next(each for each in (query, key, value) if not trace.is_trained(each))
    query, key, value, attn_mask = lift_value(
        trace, func.__name__, [query, key, value, attn_mask], rows.dim(), rows.shape[0]
    )
    return func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
