"""Does a finished model tell its training images from others? Membership inference on its loss."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pipeline.audit.membership import MembershipScores, membership_inference
from pipeline.evaluation.stores import ImageStore, subset, views
from pipeline.models.mae import MaskedAutoencoder, normalise_images

NUM_MASKS = 4
MAX_IMAGES = 1_000
_MASK_SEED = 0x61756469  # public: the same masks for members and others


def membership_of_model(
    model: MaskedAutoencoder, members: ImageStore, others: ImageStore, *, seed: int = 0
) -> MembershipScores:
    """Scores an attack that sees each image's masked-autoencoder loss under a few fixed masks.

    The result is a release about the members: it may be shown for public ones alone, and belongs
    into the private log for private ones.

    Args:
        model: the final model.
        members: images that it was trained on.
        others: images of the same kind that trained nothing, such as another split of their set.
        seed: of the choice of at most MAX_IMAGES of each, of the halves and the intervals.

    Raises:
        ValueError: fewer than four readable images of a kind.

    Source: arXiv 2402.18752, section 5, with the loss of this model in place of logits.
    """
    return membership_inference(
        _loss_features(model, members, seed), _loss_features(model, others, seed), seed=seed
    )


@torch.no_grad()
def _loss_features(
    model: MaskedAutoencoder, store: ImageStore, seed: int
) -> npt.NDArray[np.float64]:
    """Log losses of readable images, [N, NUM_MASKS], and their mean as one more column."""
    ids = subset(np.arange(store.num_records), MAX_IMAGES, seed)
    masks = np.random.default_rng(_MASK_SEED).random((NUM_MASKS, model.num_patches))
    device = model.mask_token.device
    rows = []
    for _, images_M3HW in views(store, ids, model.image_size):
        inputs = normalise_images(images_M3HW.to(device))
        losses = [
            model(inputs, torch.from_numpy(np.tile(mask, (len(inputs), 1))).to(device)).double()
            for mask in masks
        ]
        rows.append(torch.stack(losses, 1).clamp_min(1e-12).log().cpu().numpy())
    found = np.concatenate(rows) if rows else np.empty((0, NUM_MASKS))
    return np.concatenate([found, found.mean(1, keepdims=True)], 1)
