# ruff: noqa: PLR0917 - the rules have the signatures of the torch functions they stand for
"""Convolutions, by the patches that the kernel saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.dpsgd.layer_rules.side_by_side import (
    by_image,
    for_product,
    lift,
    trained_among,
)
from pipeline.dpsgd.per_image import (
    FormedGradients,
    OuterProducts,
)
from pipeline.dpsgd.products import accumulation_dtype, summed_over_positions
from pipeline.dpsgd.tape import (
    Contribution,
    Site,
)
from pipeline.dpsgd.tracing import ParameterTrace

aten = torch.ops.aten


class _Convolution(torch.autograd.Function):
    """A 2-D convolution, without the gradient of weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        anchor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        site: Site,
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.geometry, ctx.site = weight, geometry, site
        return F.conv2d(inputs, weight, bias, *geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors  # may run a segment again, traced
        with torch._C.DisableTorchFunction():
            ctx.site.receive(gradient, inputs)
            to_inputs = None
            if ctx.needs_input_grad[0]:
                to_inputs, _, _ = _convolution_backward(
                    gradient, inputs, ctx.weight, ctx.geometry, [True, False, False]
                )
        return to_inputs, None, None, None, None, None


class Geometry(NamedTuple):
    """How a 2-D kernel moves."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def _convolution_backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, geometry: Geometry, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    stride, padding, dilation, groups = geometry
    return aten.convolution_backward(
        gradient, inputs, weight, None, stride, padding, dilation, False, [0, 0], groups, wanted
    )


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    first, *rest = value
    return first, rest[0] if rest else first


def convolution_2d(
    trace: ParameterTrace,
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv2d` with any stride, padding, dilation and groups, as a linear layer on patches."""
    if input.dim() != 4:
        raise trace.refuse(
            func.__name__, trained_among(trace, input, weight, bias), "the input must be a batch"
        )
    if trace.is_trained(input):
        input = lift(trace, func.__name__, input, 4, input.shape[0])
    kernel, dilations = _pair(weight.shape[2:]), _pair(dilation)
    if isinstance(padding, str):
        total = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
        total = [0, 0] if padding == "valid" else total
        before = [each // 2 for each in total]
        if any(each % 2 for each in total):
            after = [each - first for each, first in zip(total, before, strict=True)]
            input = F.pad(input, (before[1], after[1], before[0], after[0]))
            before = [0, 0]
        padding = before
    geometry = Geometry(_pair(stride), _pair(padding), dilations, groups)
    weight_target = trace.target(weight) if trace.is_trained(weight) else None
    bias_target = trace.target(bias) if bias is not None and trace.is_trained(bias) else None
    shape = weight.shape

    def contribute(
        gradient: Tensor, saved: tuple[Tensor, ...], num_images: int
    ) -> Iterator[Contribution]:
        gradient_NTO = gradient.flatten(2).transpose(1, 2)
        gradient_MTO = by_image(gradient_NTO, num_images)
        if bias_target is not None:
            yield bias_target, FormedGradients(values=summed_over_positions(gradient_MTO))
        if weight_target is not None and groups == 1:
            patches_MTI = by_image(_patches(saved[0], kernel, geometry), num_images)
            yield (
                weight_target,
                OuterProducts(inputs_MTI=patches_MTI, output_gradients_MTO=gradient_MTO),
            )
        elif weight_target is not None:
            formed_NP = _grouped_gradients(gradient, saved[0], shape, geometry)
            formed_MKP = formed_NP.view(num_images, -1, formed_NP.shape[1])
            yield weight_target, FormedGradients(values=summed_over_positions(formed_MKP))

    targets = [target for target in (weight_target, bias_target) if target is not None]
    if not targets:
        return F.conv2d(input, weight, bias, *geometry)
    site = trace.tape.open_site(func.__name__, targets, input.shape[0], contribute)
    weight = for_product(weight.detach())
    bias = None if bias is None else for_product(bias.detach())
    return _Convolution.apply(for_product(input), trace.anchor, weight, bias, geometry, site)


def _patches(inputs: Tensor, kernel: tuple[int, int], geometry: Geometry) -> Tensor:
    """What the kernel sees at every position, [N, T, I]."""
    stride, padding, dilation, _ = geometry
    if stride == kernel and padding == (0, 0) and dilation == (1, 1):
        rows, columns = (size // k for size, k in zip(inputs.shape[2:], kernel, strict=True))
        tiles = inputs[:, :, : rows * kernel[0], : columns * kernel[1]].reshape(
            inputs.shape[0], inputs.shape[1], rows, kernel[0], columns, kernel[1]
        )
        return tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    unfolded_NIT = F.unfold(inputs, kernel, dilation, padding, stride)
    return unfolded_NIT.transpose(1, 2)


def _grouped_gradients(
    gradient: Tensor, inputs: Tensor, shape: Sequence[int], geometry: Geometry
) -> Tensor:
    """The weight gradient of every row, [N, P]: one convolution with groups for each row."""
    dtype = accumulation_dtype(gradient.dtype)
    num_rows = inputs.shape[0]
    per_row = geometry._replace(groups=geometry.groups * num_rows)
    _, formed, _ = _convolution_backward(
        gradient.to(dtype).reshape(1, -1, *gradient.shape[2:]),
        inputs.to(dtype).reshape(1, -1, *inputs.shape[2:]),
        gradient.new_zeros((), dtype=dtype).expand(num_rows * shape[0], *shape[1:]),
        per_row,
        [False, True, False],
    )
    return formed.reshape(num_rows, -1)


def convolution_1d(
    trace: ParameterTrace,
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv1d` as a 2-D convolution of height 1."""
    if input.dim() != 3:
        raise trace.refuse(
            func.__name__, trained_among(trace, input, weight, bias), "the input must be a batch"
        )
    with trace:  # a reshaped parameter is known to the trace
        input, weight = input.unsqueeze(2), weight.unsqueeze(2)
    strides, dilations = (1, _pair(stride)[0]), (1, _pair(dilation)[0])
    paddings = padding if isinstance(padding, str) else (0, _pair(padding)[0])
    outputs = convolution_2d(trace, func, input, weight, bias, strides, paddings, dilations, groups)
    return outputs.squeeze(2)
