# ruff: noqa: N802, N815 - names carry the shape of their tensor
"""The clipped gradient sum, slow and obvious: what the engine must equal.

One ordinary backward per image in float64; then norms, factors and sum, as the definition says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.dpsgd.blocks import ParameterBlocks, all_layer, only_block
from pipeline.dpsgd.clipping import Clipping
from pipeline.dpsgd.layout import ParameterLayout, Trainable, trainable_parameters


@dataclass(frozen=True, kw_only=True)
class ReferenceSum:
    """The sum, and the private facts of every image (M images, P coordinates, K blocks)."""

    flat_sum_P: Tensor
    gradients_MP: Tensor
    losses_M: Tensor
    norms_M: Tensor
    block_norms_MK: Tensor
    block_factors_MK: Tensor

    @property
    def factors_M(self) -> Tensor:
        """What the whole gradient was multiplied by, where it is one block; else ValueError."""
        return only_block(self.block_factors_MK)


def reference_clipped_sum(
    model: Trainable,
    loss_of_image: Callable[[int], Tensor],
    num_images: int,
    clipping: Clipping,
    weights: Tensor | None = None,
    *,
    blocks: ParameterBlocks | None = None,
) -> ReferenceSum:
    """sum_i w_i c_i g_i, where g_i is the gradient of image i's loss over all parameters.

    With K blocks g_i is cut into K pieces, and each has its own factor.

    Args:
        model: a module or (name, parameter) pairs, best in float64.
        loss_of_image: computes the loss of image i alone, a scalar: one forward for each image.
        num_images: M.
        clipping: from norms to factors.
        weights: w_i, [M]; 1 where not given.
        blocks: the parameters that are clipped together; all of them where not given.

    Returns:
        The sum in the layout's order, float64. An image with weight 0, or whose loss or norm (of
        any block) is not finite, adds nothing; its factors are 0.

    Raises:
        ValueError: blocks that are not of this model's trainable parameters.
    """
    if not isinstance(model, nn.Module):
        model = list(model)
    layout = ParameterLayout.of(model)
    places_of_blocks = (all_layer(model) if blocks is None else blocks).places(layout)
    num_blocks = len(places_of_blocks)
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
    block_of_P = torch.zeros(layout.num_coordinates, dtype=torch.int64, device=device)
    views_of_blocks = tuple(layout.views(block_of_P).values())
    for k, places in enumerate(places_of_blocks):
        for place in places:
            views_of_blocks[place].fill_(k)
    norms_MK = torch.zeros(num_images, num_blocks, dtype=torch.float64, device=device)
    factors_MK = torch.zeros_like(norms_MK)
    for k in range(num_blocks):
        norms_MK[:, k] = gradients_MP[:, block_of_P == k].square().sum(dim=1).sqrt()
        factors_MK[:, k] = clipping.of_blocks(num_blocks).factors(norms_MK[:, k])
    flat_sum_P = torch.zeros_like(gradients_MP[0])
    for image in range(num_images):
        weight = 1.0 if weights is None else float(weights[image])
        usable = bool(torch.isfinite(losses_M[image]) & torch.isfinite(norms_MK[image]).all())
        if weight == 0.0 or not usable:
            factors_MK[image] = 0.0
            continue
        factors_MK[image] *= weight
        flat_sum_P += factors_MK[image, block_of_P] * gradients_MP[image]
    return ReferenceSum(
        flat_sum_P=flat_sum_P,
        gradients_MP=gradients_MP,
        losses_M=losses_M,
        norms_M=gradients_MP.square().sum(dim=1).sqrt(),
        block_norms_MK=norms_MK,
        block_factors_MK=factors_MK,
    )
