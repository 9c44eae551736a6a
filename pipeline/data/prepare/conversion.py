"""One picture as found -> the record that is stored: upright, shrunk, JPEG, with its digests."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.data.images import (
    Pixels,
    canonical_pixels,
    decode_image,
    encode_jpeg,
    resize_short_side,
)

HASH_SIDE = 32
HASH_LOW = 8
LEAST_CONTRAST = 2.0
"""Standard deviation of grey values (0 to 255) below which a picture has no perceptual hash."""


@dataclass(frozen=True, kw_only=True)
class ConversionRules:
    """What decides the stored bytes of a picture: see PrepareConfig."""

    short_side: int
    jpeg_quality: int
    with_perceptual_hash: bool = False


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A picture ready to be stored.

    source_digest: SHA-256 of the bytes as found. pixel_digest: SHA-256 of the decoded, upright
    pixels before they were shrunk. perceptual_hash: 64 bits, None where not asked for or where the
    picture is too even to have one.
    """

    source_digest: bytes
    pixel_digest: bytes
    perceptual_hash: int | None
    stored: bytes


def convert(content: bytes | Pixels, rules: ConversionRules) -> Converted:
    """The stored form of encoded bytes or of uint8 pixels [H, W] or [H, W, C].

    Raises:
        ImageError: this is no picture we accept; its `reason` is counted.
    """
    if isinstance(content, bytes):
        pixels = decode_image(content).pixels
        source_digest = hashlib.sha256(content).digest()
    else:
        pixels = canonical_pixels(content)
        source_digest = hashlib.sha256(content.tobytes()).digest()
    digest = hashlib.sha256(b"pixels %d %d %d\n" % pixels.shape)
    digest.update(pixels.data)
    resized = resize_short_side(pixels, rules.short_side)
    return Converted(
        source_digest=source_digest,
        pixel_digest=digest.digest(),
        perceptual_hash=perceptual_hash(resized) if rules.with_perceptual_hash else None,
        stored=encode_jpeg(resized, rules.jpeg_quality),
    )


def perceptual_hash(pixels: Pixels) -> int | None:
    """64 bits that change little when a picture is resized, recompressed or slightly toned.

    Grey values averaged to 32 x 32 pixels, their two-dimensional cosine transform, and of the 8 x 8
    lowest frequencies beside the mean (rows and columns 1 to 8) whether each is above their median.

    Args:
        pixels: uint8 [H, W, C], C = 1 or 3.

    Returns:
        The bits, or None for a picture without contrast, whose bits would be chance.

    Source: the DCT hash of pHash (Zauner 2010), here without the lowest row and column.
    """
    grey = pixels.astype(np.float64) @ _grey_weights(pixels.shape[2])
    if grey.std() < LEAST_CONTRAST:
        return None
    small = _averaging(grey.shape[0]) @ grey @ _averaging(grey.shape[1]).T
    transform = _cosines()
    low = transform @ small @ transform.T
    bits = (low > np.median(low)).ravel()
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def _grey_weights(num_channels: int) -> npt.NDArray[np.float64]:
    return np.array([1.0]) if num_channels == 1 else np.array([0.299, 0.587, 0.114])


@functools.lru_cache(maxsize=256)
def _averaging(side: int) -> npt.NDArray[np.float64]:
    """[HASH_SIDE, side]: means over equal parts of a side, pixels on a border shared."""
    edges = np.linspace(0, side, HASH_SIDE + 1)
    starts, pixels = edges[:-1, None], np.arange(side)[None]
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(starts, pixels)
    return np.clip(overlap, 0, None) * (HASH_SIDE / side)


@functools.cache
def _cosines() -> npt.NDArray[np.float64]:
    """[HASH_LOW, HASH_SIDE]: rows 1 to 8 of the cosine transform."""
    frequency, place = np.arange(1, HASH_LOW + 1)[:, None], np.arange(HASH_SIDE)[None]
    return np.cos(np.pi * frequency * (place + 0.5) / HASH_SIDE)
