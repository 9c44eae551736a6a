# ruff: noqa: PLR0917 - the rules have the signatures of the torch functions they stand for
"""Per operation: how it is done in the forward so that the backward yields per-image gradients.

Each rule does one torch operation in which images meet trainable parameters. The parameters enter
detached, so the backward makes no weight gradient of its own; a small autograd function passes the
input gradient on and hands (what the operation read, its output gradient) to the tape.

The leading dimension of every activation is the image dimension, or a multiple of it in which each
image's rows are contiguous (windows, flattened tokens). The engine checks this once per model.

Shapes: N rows of the leading dimension (M images times rows per image), T positions, I inputs,
O outputs, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.dpsgd.per_image import (
    EmbeddingRows,
    FormedGradients,
    OuterProducts,
    OwnRows,
    accumulation_dtype,
)
from pipeline.dpsgd.tape import (
    Contribute,
    Contribution,
    Site,
    Target,
    UnsupportedOperationError,
)
from pipeline.dpsgd.tracing import ParameterTrace, Rule, RuleBook

aten = torch.ops.aten


def by_image(values: Tensor, num_images: int) -> Tensor:
    """[N, ..., C] seen as [M, T, C], where T counts all positions of one image."""
    return values.reshape(num_images, -1, values.shape[-1])


def summed_over_positions(values_MTC: Tensor) -> Tensor:
    """[M, T, C] summed over T in fp32 (fp64 for a float64 model), [M, C]."""
    return values_MTC.sum(dim=1, dtype=accumulation_dtype(values_MTC.dtype))


def _for_product(tensor: Tensor) -> Tensor:
    """As autocast does for matrix products: in the lower precision, where it is on."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _trained(trace: ParameterTrace, *tensors: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None and trace.is_trained(tensor)]


# -- images and parameters side by side ------------------------------------------------------------


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


def _lifted(
    trace: ParameterTrace, operation: str, values: Any, num_dims: int, num_rows: int
) -> Any:
    """Arguments with every trained tensor lifted, also inside lists and tuples."""
    if isinstance(values, Tensor):
        if trace.is_trained(values):
            return lift(trace, operation, values, num_dims, num_rows)
        return values
    if isinstance(values, list | tuple):
        return type(values)(
            [_lifted(trace, operation, value, num_dims, num_rows) for value in values]
        )
    return values


def elementwise(
    trace: ParameterTrace, func: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    """An operation on numbers at the same place, with broadcasting: +, *, where, ..."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    if not shape or kwargs.get("out") is not None:
        trained = _trained(trace, *tensors)
        raise trace.refuse(func.__name__, trained, "the result must be a new tensor per image")
    lifted = _lifted(trace, func.__name__, args, len(shape), shape[0])
    named = {
        name: _lifted(trace, func.__name__, value, len(shape), shape[0])
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
            func.__name__, _trained(trace, *tensors), "it joins along the image dimension"
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
    query, key, value, attn_mask = _lifted(
        trace, func.__name__, [query, key, value, attn_mask], rows.dim(), rows.shape[0]
    )
    return func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)


# -- linear ----------------------------------------------------------------------------------------


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
        with torch._C.DisableTorchFunction():
            (inputs,) = ctx.saved_tensors
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
            _trained(trace, input, other),
            "of a product of a parameter and images, only images @ parameter and "
            "parameter @ images[image, ...] have a rule",
        )
    input, other = _lifted(trace, func.__name__, [input, other], num_dims, rows.shape[0])
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
    weight = _for_product(weight.detach())
    weight = weight.t() if is_transposed else weight
    bias = None if bias is None else _for_product(bias.detach())
    # Reshaped outside: a function's output must not be a view, or nobody could change it in place.
    rows = _for_product(input).reshape(-1, input.shape[-1])
    outputs = _Linear.apply(rows, trace.anchor, weight, bias, site)
    return outputs.view(*input.shape[:-1], outputs.shape[-1])


# -- convolution -----------------------------------------------------------------------------------


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
        with torch._C.DisableTorchFunction():
            (inputs,) = ctx.saved_tensors
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
            func.__name__, _trained(trace, input, weight, bias), "the input must be a batch"
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
    weight = _for_product(weight.detach())
    bias = None if bias is None else _for_product(bias.detach())
    return _Convolution.apply(_for_product(input), trace.anchor, weight, bias, geometry, site)


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
            func.__name__, _trained(trace, input, weight, bias), "the input must be a batch"
        )
    with trace:  # a reshaped parameter is known to the trace
        input, weight = input.unsqueeze(2), weight.unsqueeze(2)
    strides, dilations = (1, _pair(stride)[0]), (1, _pair(dilation)[0])
    paddings = padding if isinstance(padding, str) else (0, _pair(padding)[0])
    outputs = convolution_2d(trace, func, input, weight, bias, strides, paddings, dilations, groups)
    return outputs.squeeze(2)


# -- normalisation ---------------------------------------------------------------------------------


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
        with torch._C.DisableTorchFunction():
            inputs, mean, inverse_std = ctx.saved_tensors
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
        input, trace.anchor, tuple(normalized_shape), _detached(weight), _detached(bias), eps, site
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
            lifted = _lifted(trace, operation, aligned, outputs.dim(), outputs.shape[0])
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


# -- embedding -------------------------------------------------------------------------------------


class _Embedding(torch.autograd.Function):
    """Reads rows of a table, without the table's gradient."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, anchor: Tensor, table: Tensor, site: Site) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.site = site
        return table.index_select(0, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        with torch._C.DisableTorchFunction():
            ctx.site.receive(gradient, *ctx.saved_tensors)
        return None, None, None, None


def embedding(
    trace: ParameterTrace,
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding`: row v of the table receives the gradients of the positions that read it."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise trace.refuse(
            func.__name__, [weight], "max_norm, scale_grad_by_freq and sparse must be off"
        )
    num_rows = weight.shape[0]
    target = trace.target(weight)
    padding_row = None if padding_idx is None or padding_idx == -1 else padding_idx % num_rows

    def contribute(
        gradient: Tensor, saved: tuple[Tensor, ...], num_images: int
    ) -> Iterator[Contribution]:
        ids_MT = saved[0].reshape(num_images, -1)
        gradient_MTO = by_image(gradient, num_images)
        if padding_row is not None:
            is_read_MT1 = (ids_MT != padding_row).unsqueeze(2)
            gradient_MTO = torch.where(is_read_MT1, gradient_MTO, torch.zeros_like(gradient_MTO))
        yield (
            target,
            EmbeddingRows(ids_MT=ids_MT, output_gradients_MTO=gradient_MTO, num_rows=num_rows),
        )

    site = trace.tape.open_site(func.__name__, [target], input.shape[0], contribute)
    outputs = _Embedding.apply(input.flatten(), trace.anchor, weight.detach(), site)
    return outputs.view(*input.shape, -1)


# -- which torch function goes where ---------------------------------------------------------------


def _functions(names: str, *owners: object) -> Iterator[Callable[..., Any]]:
    """Every function or method of these names that the owners have."""
    for name in names.split():
        for owner in owners:
            found = getattr(owner, name, None)
            if found is not None:
                yield found


def _rules() -> dict[Callable[..., Any], Rule]:
    rules: dict[Callable[..., Any], Rule] = {
        F.linear: linear,
        F.conv1d: convolution_1d,
        F.conv2d: convolution_2d,
        F.layer_norm: layer_norm,
        torch.layer_norm: layer_norm,
        F.group_norm: group_norm,
        torch.group_norm: group_norm,
        F.rms_norm: rms_norm,
        torch.rms_norm: rms_norm,
        F.batch_norm: batch_norm,
        F.embedding: embedding,
        F.scaled_dot_product_attention: attention,
    }
    arithmetic = "add sub subtract mul multiply div divide true_divide"
    in_place = " ".join(f"{name}_" for name in arithmetic.split())
    operators = "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__"
    more = "__truediv__ __rtruediv__ __itruediv__ rsub where lerp addcmul addcdiv maximum minimum"
    names = " ".join([arithmetic, in_place, operators, more])
    rules.update(dict.fromkeys(_functions(names, torch, Tensor), elementwise))
    rules.update(dict.fromkeys(_functions("cat concat concatenate stack", torch), concatenate))
    rules.update(dict.fromkeys(_functions("matmul mm __matmul__", torch, Tensor), matmul))
    return rules


RULE_BOOK = RuleBook(
    rules=_rules(),
    refusals={
        F.batch_norm: refuse_batch_statistics,
        F.instance_norm: refuse_running_statistics,
    },
    indexing=frozenset(
        _functions("__getitem__ index_select gather take take_along_dim", torch, Tensor)
    ),
)
