"""Which images may be scored, and how they are read: prepared sets as evaluation sees them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.data.shards import ShardStore
from pipeline.data.views import PixelReader, read_views

DIGESTS_PER_READ = 1_000_000
MICROBATCH_SIZE = 256


class DigestStore(Protocol):
    """What the refusal of private images needs of a prepared set."""

    @property
    def num_records(self) -> int:
        """N."""

    def pixel_digests(self, record_ids: npt.ArrayLike | None = None) -> npt.NDArray[np.uint8]:
        """SHA-256 of each record's decoded pixels, uint8 [n, 32]."""


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def visibility(self) -> str: ...


class ImageStore(DigestStore, Protocol):
    """What is asked of a prepared set (`ShardStore` of pipeline/data/shards.py)."""

    @property
    def manifest(self) -> _Named:
        """Its name and whether it is public."""

    def read(self, record_ids: npt.ArrayLike) -> list[bytes]:
        """Stored bytes of records."""

    def labels(self, record_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Labels of records, -1 where there is none."""


def require_public(store: ImageStore) -> None:
    """Refuse a set that is not marked public. Raises ValueError."""
    if store.manifest.visibility != "public":
        raise ValueError(
            f"evaluation set {store.manifest.name!r} is marked {store.manifest.visibility}: a "
            f"score on it would be a release; evaluate on a set marked public"
        )


def assert_disjoint(
    name: str, labelled: DigestStore, private_stores: Sequence[tuple[str, DigestStore]]
) -> None:
    """Refuse to score images that a private set holds too: their accuracy would be a release.

    Images are compared by the SHA-256 of their decoded pixels before resizing. The message does
    not tell which or how many are shared, since that is a fact about the private set.

    Args:
        name: What to call the scored set in the message.
        labelled: The set to be scored; its digests are held in memory.
        private_stores: Names and stores of every private set of the run.
    Raises:
        ValueError: if a scored image is in a private set.
    """
    scored = np.ascontiguousarray(labelled.pixel_digests())
    heads = np.unique(_heads(scored))
    whole = {digest.tobytes() for digest in scored}
    for private_name, store in private_stores:
        for start in range(0, store.num_records, DIGESTS_PER_READ):
            stop = min(start + DIGESTS_PER_READ, store.num_records)
            digests = np.ascontiguousarray(store.pixel_digests(np.arange(start, stop)))
            candidates = digests[np.isin(_heads(digests), heads)]
            if any(digest.tobytes() in whole for digest in candidates):
                raise ValueError(
                    f"evaluation set {name!r} shares images with the private set "
                    f"{private_name!r}: scoring them would release facts about private images; "
                    f"prepare the private set again with the evaluation set excluded"
                )


def _heads(digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The first 8 bytes of each digest as one number: a sieve before whole digests are compared."""
    return np.ascontiguousarray(digests[:, :8]).view(np.uint64)[:, 0]


def subset(ids: npt.NDArray[np.int64], max_images: int | None, seed: int) -> npt.NDArray[np.int64]:
    """All ids, or a random choice of `max_images` of them in order."""
    if max_images is None or len(ids) <= max_images:
        return ids
    return np.sort(np.random.default_rng([seed, 2]).permutation(ids)[:max_images])


def views(
    store: ImageStore, ids: npt.NDArray[np.int64], image_size: int
) -> Iterator[tuple[npt.NDArray[np.int64], Tensor]]:
    """Central views of readable images, uint8 [M, 3, S, S], with their record ids."""
    reader = PixelReader(cast(ShardStore, store), cache_bytes=0)
    for start in range(0, len(ids), MICROBATCH_SIZE):
        wanted = ids[start : start + MICROBATCH_SIZE]
        images, is_decoded = read_views(reader, wanted, image_size=image_size)
        if is_decoded.any():
            yield wanted[is_decoded], torch.from_numpy(images[is_decoded])
