"""The masked-autoencoder loss on public images that trained nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.evaluation.intervals import Z_95
from pipeline.evaluation.stores import ImageStore, require_public, subset, views
from pipeline.models.mae import MaskedAutoencoder, normalise_images

MASK_SEED = 0x6D61736B  # public: the same masks for every model, run and machine


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """Masked-autoencoder loss on images that trained nothing.

    Args:
        model: Whose loss.
        loss: Mean over the images.
        interval: Normal 95 % interval of that mean over the images.
        num_images: How many.
        images: Name of the set.
        norm_pix_loss: Whether patches were normalised; losses compare only where this is equal.
        norm_pix_epsilon: Added to a patch's variance where they were; the same holds.
        mask_ratio: Share of hidden patches.
        mask_seed: Public constant that fixes the masks.
    """

    model: str
    loss: float
    interval: tuple[float, float]
    num_images: int
    images: str
    norm_pix_loss: bool
    norm_pix_epsilon: float
    mask_ratio: float
    mask_seed: int


@torch.no_grad()
def held_out_loss(
    model: MaskedAutoencoder,
    store: ImageStore,
    *,
    name: str = "model",
    max_images: int = 2_000,
    seed: int = 0,
) -> HeldOutLoss:
    """The loss on public images with masks that depend on the record id and a constant alone.

    Args:
        model: The model, on any device.
        store: A set marked public.
        name: How the table calls the model.
        max_images: Use a random subset of at most this many.
        seed: Decides the subset.
    Raises:
        ValueError: if the set is not public, or holds fewer than two readable images.
    """
    require_public(store)
    device = model.mask_token.device
    chosen = subset(np.arange(store.num_records), max_images, seed)
    losses: list[float] = []
    for ids, images_M3HW in views(store, chosen, model.image_size):
        uniforms_MT = np.stack(
            [np.random.default_rng([MASK_SEED, int(i)]).random(model.num_patches) for i in ids]
        )
        inputs = normalise_images(images_M3HW.to(device))
        losses += model(inputs, torch.from_numpy(uniforms_MT).to(device)).tolist()
    if len(losses) < 2:
        raise ValueError(
            f"{store.manifest.name!r} has {len(losses)} readable image(s): the loss needs two or "
            f"more for its interval"
        )
    mean = math.fsum(losses) / len(losses)
    half = Z_95 * float(np.std(losses, ddof=1)) / math.sqrt(len(losses))
    return HeldOutLoss(
        model=name,
        loss=mean,
        interval=(mean - half, mean + half),
        num_images=len(losses),
        images=store.manifest.name,
        norm_pix_loss=model.norm_pix_loss,
        norm_pix_epsilon=model.norm_pix_epsilon,
        mask_ratio=model.mask_ratio,
        mask_seed=MASK_SEED,
    )
