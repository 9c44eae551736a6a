"""Pitfall 19: batch statistics and coupled losses let one image into another's gradient."""

from __future__ import annotations

import pytest
import torch

from pipeline.models.mae import MaskedAutoencoder
from pipeline.models.sizes import SIZES

NUM_IMAGES = 5
CHANGED = 2


def losses_and_gradients(
    model: MaskedAutoencoder, images: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Losses, and for each image the gradient of its loss with respect to all pixels."""
    images = images.clone().requires_grad_(True)
    losses = model(images, uniforms)
    rows = [torch.autograd.grad(loss, images, retain_graph=True)[0] for loss in losses]
    return losses.detach(), rows


@pytest.mark.parametrize("norm_pix_loss", [False, True])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("change", ["image", "mask", "nan"])
def test_changing_one_image_leaves_the_others_bit_identical(
    norm_pix_loss: bool, is_training: bool, change: str
) -> None:
    """Guarantee 1 of MaskedAutoencoder; a NaN image too stays alone."""
    model = MaskedAutoencoder(
        SIZES["micro"], image_size=12, patch_size=3, norm_pix_loss=norm_pix_loss
    ).train(is_training)
    images, uniforms = torch.randn(NUM_IMAGES, 3, 12, 12), torch.rand(NUM_IMAGES, 16)
    other_images, other_uniforms = images.clone(), uniforms.clone()
    if change == "mask":
        other_uniforms[CHANGED] = uniforms[CHANGED].flip(0)
    else:
        other_images[CHANGED] = float("nan") if change == "nan" else torch.randn(3, 12, 12)
    losses, gradients = losses_and_gradients(model, images, uniforms)
    other_losses, other_gradients = losses_and_gradients(model, other_images, other_uniforms)
    others = [i for i in range(NUM_IMAGES) if i != CHANGED]
    assert torch.equal(losses[others], other_losses[others])
    assert losses[CHANGED] != other_losses[CHANGED]
    for i in others:
        assert torch.equal(gradients[i][i], other_gradients[i][i])
        assert not gradients[i][[j for j in range(NUM_IMAGES) if j != i]].any()


def test_nothing_is_random_but_the_given_uniforms() -> None:
    """Guarantee 4 of MaskedAutoencoder: no dropout, no hidden draw."""
    model = MaskedAutoencoder(SIZES["micro"], image_size=12, patch_size=3)
    images, uniforms = torch.randn(2, 3, 12, 12), torch.rand(2, 16)
    state = torch.random.get_rng_state()
    losses = model.train()(images, uniforms)
    assert torch.equal(losses, model.eval()(images, uniforms))
    assert torch.equal(state, torch.random.get_rng_state())
