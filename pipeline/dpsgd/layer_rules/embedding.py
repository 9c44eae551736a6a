# ruff: noqa: PLR0917 - the rules have the signatures of the torch functions they stand for
"""Tables read at places that depend on the image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.dpsgd.layer_rules.side_by_side import (
    by_image,
)
from pipeline.dpsgd.per_image import (
    EmbeddingRows,
)
from pipeline.dpsgd.tape import (
    Contribution,
    Site,
)
from pipeline.dpsgd.tracing import ParameterTrace


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
        saved = ctx.saved_tensors  # may run a segment again, traced
        with torch._C.DisableTorchFunction():
            ctx.site.receive(gradient, *saved)
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
