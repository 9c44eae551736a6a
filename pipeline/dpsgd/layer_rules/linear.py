# ruff: noqa: PLR0917 - the rules have the signatures of the torch functions they stand for
"""Linear layers and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.dpsgd.layer_rules.side_by_side import (
    by_image,
    for_product,
    lift,
    lift_value,
    trained_among,
)
from pipeline.dpsgd.per_image import (
    FormedGradients,
    OuterProducts,
)
from pipeline.dpsgd.products import summed_over_positions
from pipeline.dpsgd.tape import (
    Contribution,
    Site,
)
from pipeline.dpsgd.tracing import ParameterTrace


class _Linear(torch.autograd.Function):
    """y = x W' + b on rows of positions, without the gradient of W and b."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, anchor: Tensor, weight: Tensor, bias: Tensor | None, site: Site
    ) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight, ctx.site = weight, site
        if bias is None:
            return torch.mm(inputs, weight.t())
        return torch.addmm(bias, inputs, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.saved_tensors  # may run a segment again, traced
        with torch._C.DisableTorchFunction():
            ctx.site.receive(gradient, inputs)
            to_inputs = gradient @ ctx.weight if ctx.needs_input_grad[0] else None
        return to_inputs, None, None, None, None


def linear(
    trace: ParameterTrace,
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`F.linear`: the gradient of W is sum_t g_t x_t', that of b is sum_t g_t."""
    if trace.is_trained(input):
        input = lift(trace, func.__name__, input, input.dim(), input.shape[0])
    return _linear(trace, input, weight, bias, is_transposed=False)


def matmul(
    trace: ParameterTrace, func: Callable[..., Tensor], input: Tensor, other: Tensor
) -> Tensor:
    """x @ W is a linear layer with W'; in W @ x every row of x meets the same W."""
    if not trace.is_trained(input) and other.dim() == 2 and input.dim() > 1:
        return _linear(trace, input, other, None, is_transposed=True)
    num_dims = max(input.dim(), other.dim())
    rows = other if trace.is_trained(input) else input
    if num_dims < 3 or rows.dim() < num_dims:
        raise trace.refuse(
            func.__name__,
            trained_among(trace, input, other),
            "of a product of a parameter and images, only images @ parameter and "
            "parameter @ images[image, ...] have a rule",
        )
    input, other = lift_value(trace, func.__name__, [input, other], num_dims, rows.shape[0])
    return func(input, other)


def _linear(
    trace: ParameterTrace,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    is_transposed: bool,
) -> Tensor:
    """A linear layer whose weight is [O, I], or [I, O] when transposed."""
    weight_target = trace.target(weight) if trace.is_trained(weight) else None
    bias_target = trace.target(bias) if bias is not None and trace.is_trained(bias) else None

    def contribute(
        gradient: Tensor, saved: tuple[Tensor, ...], num_images: int
    ) -> Iterator[Contribution]:
        gradient_MTO = by_image(gradient, num_images)
        if bias_target is not None:
            yield bias_target, FormedGradients(values=summed_over_positions(gradient_MTO))
        if weight_target is not None:
            sides = [by_image(saved[0], num_images), gradient_MTO]
            if is_transposed:
                sides.reverse()
            yield weight_target, OuterProducts(inputs_MTI=sides[0], output_gradients_MTO=sides[1])

    targets = [target for target in (weight_target, bias_target) if target is not None]
    if not targets:
        return F.linear(input, weight.t() if is_transposed else weight, bias)
    site = trace.tape.open_site("linear", targets, input.shape[0], contribute)
    weight = for_product(weight.detach())
    weight = weight.t() if is_transposed else weight
    bias = None if bias is None else for_product(bias.detach())
    # Reshaped outside: a function's output must not be a view, or nobody could change it in place.
    rows = for_product(input).reshape(-1, input.shape[-1])
    outputs = _Linear.apply(rows, trace.anchor, weight, bias, site)
    return outputs.view(*input.shape[:-1], outputs.shape[-1])
