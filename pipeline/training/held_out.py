"""The loss on public held-out images, the one training curve that may be shown."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from pipeline.data.shards import ShardStore
from pipeline.data.views import PixelReader, read_views
from pipeline.models.mae import MaskedAutoencoder, normalise_images
from pipeline.privacy.sampling import record_uniforms
from pipeline.training.settings import PhaseSettings

_MASK_KEY = hashlib.sha256(b"dp-pretrain held-out masks").digest()
_MICROBATCH = 256


class HeldOutLoss:
    """Mean loss over a fixed spread of images of a set marked public, with fixed masks.

    Raises:
        ValueError: if the set is not marked public: its loss would be a release.
    """

    def __init__(self, settings: PhaseSettings) -> None:
        self._images: np.ndarray | None = None
        if settings.held_out_root is None:
            return
        store = ShardStore(settings.held_out_root)
        if store.manifest.visibility != "public":
            raise ValueError(
                f"held_out is {settings.held_out_root}, marked {store.manifest.visibility}: the "
                "loss on a private set is a release; name a public one"
            )
        count = min(settings.phase.held_out_images, store.num_records)
        self._ids = np.linspace(0, store.num_records - 1, count).astype(np.int64)
        size = settings.model.image_size
        images, is_decoded = read_views(PixelReader(store, 0), self._ids, image_size=size)
        self._ids, self._images = self._ids[is_decoded], images[is_decoded]

    @torch.no_grad()
    def measure(self, model: MaskedAutoencoder) -> float | None:
        """The mean loss, or None if the recipe names no held-out set."""
        if self._images is None:
            return None
        device = next(model.parameters()).device
        total = 0.0
        for start in range(0, len(self._ids), _MICROBATCH):
            rows = slice(start, start + _MICROBATCH)
            uniforms = record_uniforms(
                _MASK_KEY, 0, self._ids[rows], "mask", num_values=model.num_patches
            )
            images = normalise_images(torch.from_numpy(self._images[rows]).to(device))
            total += float(model(images, torch.from_numpy(uniforms).to(device)).sum())
        return total / len(self._ids) if len(self._ids) else None
