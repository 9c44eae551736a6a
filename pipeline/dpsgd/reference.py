# ruff: noqa: N815 - names carry the shape of their tensor
"""The clipped gradient sum, slow and obvious: what the engine must equal.

One ordinary backward per image in float64; then norm, factor and sum, as the definition says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.dpsgd.clipping import Clipping
from pipeline.dpsgd.layout import ParameterLayout, Trainable, trainable_parameters


@dataclass(frozen=True, kw_only=True)
class ReferenceSum:
    """The sum, and the private facts of every image (M images, P coordinates)."""

    flat_sum_P: Tensor
    gradients_MP: Tensor
    losses_M: Tensor
    norms_M: Tensor
    factors_M: Tensor


def reference_clipped_sum(
    model: Trainable,
    loss_of_image: Callable[[int], Tensor],
    num_images: int,
    clipping: Clipping,
    weights: Tensor | None = None,
) -> ReferenceSum:
    """sum_i w_i c_i g_i, where g_i is the gradient of image i's loss over all parameters.

    Args:
        model: a module or (name, parameter) pairs, best in float64.
        loss_of_image: computes the loss of image i alone, a scalar: one forward for each image.
        num_images: M.
        clipping: from norms to factors.
        weights: w_i, [M]; 1 where not given.

    Returns:
        The sum in the layout's order, float64. An image with weight 0, or whose loss or norm is
        not finite, adds nothing; its factor is 0.
    """
    layout = ParameterLayout.of(model)
    parameters = tuple(trainable_parameters(model).values())
    device = parameters[0].device
    gradients_MP = torch.zeros(
        num_images, layout.num_coordinates, dtype=torch.float64, device=device
    )
    losses_M = torch.zeros(num_images, dtype=torch.float64, device=device)
    for image in range(num_images):
        loss = loss_of_image(image)
        losses_M[image] = loss.detach()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        views = layout.views(gradients_MP[image]).values()
        for gradient, view in zip(gradients, views, strict=True):
            if gradient is not None:
                view.copy_(gradient)
    norms_M = gradients_MP.square().sum(dim=1).sqrt()
    factors_M = clipping.factors(norms_M)
    flat_sum_P = torch.zeros_like(gradients_MP[0])
    for image in range(num_images):
        weight = 1.0 if weights is None else float(weights[image])
        usable = bool(torch.isfinite(losses_M[image]) & torch.isfinite(norms_M[image]))
        if weight == 0.0 or not usable:
            factors_M[image] = 0.0
            continue
        factors_M[image] *= weight
        flat_sum_P += factors_M[image] * gradients_MP[image]
    return ReferenceSum(
        flat_sum_P=flat_sum_P,
        gradients_MP=gradients_MP,
        losses_M=losses_M,
        norms_M=norms_M,
        factors_M=factors_M,
    )
