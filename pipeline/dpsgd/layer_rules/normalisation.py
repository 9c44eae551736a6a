# ruff: noqa: PLR0917 - the rules have the signatures of the torch functions they stand for
"""Norms of one image; statistics over several are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.dpsgd.layer_rules.side_by_side import (
    detached,
    lift,
    lift_value,
)
from pipeline.dpsgd.per_image import FormedGradients
from pipeline.dpsgd.products import summed_over_positions
from pipeline.dpsgd.tape import (
    Contribution,
    Site,
    UnsupportedOperationError,
)
from pipeline.dpsgd.tracing import ParameterTrace

aten = torch.ops.aten


class _LayerNorm(torch.autograd.Function):
    """Layer norm, without the gradient of weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        anchor: Tensor,
        shape: Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        site: Site,
    ) -> Tensor:
        outputs, mean, inverse_std = torch.native_layer_norm(inputs, shape, weight, bias, eps)
        ctx.save_for_backward(inputs, mean, inverse_std)
        ctx.weight, ctx.bias, ctx.shape, ctx.site = weight, bias, shape, site
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, mean, inverse_std = ctx.saved_tensors  # may run a segment again, traced
        with torch._C.DisableTorchFunction():
            gradient = gradient.contiguous()
            ctx.site.receive(gradient, inputs, mean, inverse_std)
            to_inputs = None
            if ctx.needs_input_grad[0]:
                to_inputs, _, _ = aten.native_layer_norm_backward(
                    gradient,
                    inputs,
                    ctx.shape,
                    mean,
                    inverse_std,
                    ctx.weight,
                    ctx.bias,
                    [True, False, False],
                )
        return to_inputs, None, None, None, None, None, None


def layer_norm(
    trace: ParameterTrace,
    func: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """`F.layer_norm`: gradient of the weight sum_t g_t * normalised_t, of the bias sum_t g_t."""
    if trace.is_trained(input):
        input = lift(trace, func.__name__, input, input.dim(), input.shape[0])
    weight_target = (
        trace.target(weight) if weight is not None and trace.is_trained(weight) else None
    )
    bias_target = trace.target(bias) if bias is not None and trace.is_trained(bias) else None
    num_values = math.prod(normalized_shape)

    def contribute(
        gradient: Tensor, saved: tuple[Tensor, ...], num_images: int
    ) -> Iterator[Contribution]:
        gradient_MTC = gradient.reshape(num_images, -1, num_values)
        if bias_target is not None:
            yield bias_target, FormedGradients(values=summed_over_positions(gradient_MTC))
        if weight_target is not None:
            inputs, mean, inverse_std = saved
            normalised = (inputs - mean).mul_(inverse_std)
            products_MTC = normalised.reshape(gradient_MTC.shape).mul_(gradient_MTC)
            yield weight_target, FormedGradients(values=summed_over_positions(products_MTC))

    targets = [target for target in (weight_target, bias_target) if target is not None]
    if not targets:
        return func(input, normalized_shape, weight, bias, eps)
    site = trace.tape.open_site("layer_norm", targets, input.shape[0], contribute)
    if input.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        input = input.float()  # as autocast does on that device
    return _LayerNorm.apply(
        input, trace.anchor, tuple(normalized_shape), detached(weight), detached(bias), eps, site
    )


def _scaled_and_shifted(
    trace: ParameterTrace,
    operation: str,
    normalised: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    num_inner_dims: int,
) -> Tensor:
    """normalised * weight + bias, one number per channel; inner dimensions follow the channel."""
    outputs = normalised
    for combine, value in ((torch.mul, weight), (torch.add, bias)):
        if value is not None:
            with trace:  # a reshaped parameter is known to the trace
                aligned = value.reshape(*value.shape, *[1] * num_inner_dims)
            lifted = lift_value(trace, operation, aligned, outputs.dim(), outputs.shape[0])
            outputs = combine(outputs, lifted)
    return outputs.to(normalised.dtype)


def group_norm(
    trace: ParameterTrace,
    func: Callable[..., Tensor],
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """`F.group_norm`, as normalising and then scaling and shifting."""
    if trace.is_trained(input):
        input = lift(trace, func.__name__, input, input.dim(), input.shape[0])
    normalised = F.group_norm(input, num_groups, None, None, eps)
    return _scaled_and_shifted(trace, "group_norm", normalised, weight, bias, input.dim() - 2)


def rms_norm(
    trace: ParameterTrace,
    func: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """`F.rms_norm`, as normalising and then scaling."""
    if trace.is_trained(input):
        input = lift(trace, func.__name__, input, input.dim(), input.shape[0])
    normalised = F.rms_norm(input, tuple(normalized_shape), None, eps)
    return _scaled_and_shifted(trace, "rms_norm", normalised, weight, None, 0)


def batch_norm(
    trace: ParameterTrace,
    func: Callable[..., Tensor],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm` with fixed statistics, as normalising and then scaling and shifting."""
    if trace.is_trained(input):
        input = lift(trace, func.__name__, input, input.dim(), input.shape[0])
    normalised = F.batch_norm(input, running_mean, running_var, None, None, False, momentum, eps)
    return _scaled_and_shifted(trace, "batch_norm", normalised, weight, bias, input.dim() - 2)


def refuse_batch_statistics(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> None:
    """Batch norm in training mode: every image changes the gradient of every other."""
    if training or running_mean is None:
        raise UnsupportedOperationError(
            "batch_norm in training mode couples the images of a microbatch, so no image's "
            "gradient is its own; use GroupNorm or LayerNorm instead, or fix the statistics by "
            "calling eval() on the batch norm layers"
        )


def refuse_running_statistics(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> None:
    """Instance norm that keeps running statistics: they would be published without noise."""
    if use_input_stats and running_mean is not None:
        raise UnsupportedOperationError(
            "instance_norm with track_running_stats=True keeps statistics of the images outside "
            "the clipped gradient; set track_running_stats=False"
        )
