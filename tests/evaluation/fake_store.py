"""A prepared set in memory, with what evaluation asks of one."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from PIL import Image


@dataclass
class FakeStore:
    """Encoded images with labels; visibility and name as in a manifest."""

    contents: list[bytes]
    known_labels: np.ndarray
    name: str = "fake"
    visibility: str = "public"

    @property
    def manifest(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.name, visibility=self.visibility)

    @property
    def num_records(self) -> int:
        return len(self.contents)

    def read(self, record_ids) -> list[bytes]:
        return [self.contents[i] for i in record_ids]

    def begin(self, record_ids) -> SimpleNamespace:
        return SimpleNamespace(result=lambda: self.read(record_ids))

    def labels(self, record_ids) -> np.ndarray:
        return self.known_labels[np.asarray(record_ids)]

    def pixel_digests(self, record_ids=None) -> np.ndarray:
        ids = range(self.num_records) if record_ids is None else record_ids
        digests = [hashlib.sha256(self.contents[i]).digest() for i in ids]
        return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


def make_store(
    num_images: int, *, seed: int, name: str = "fake", visibility: str = "public"
) -> FakeStore:
    """Pictures of three classes, bright in one third of their rows, as PNG."""
    random = np.random.default_rng(seed)
    labels = np.arange(num_images) % 3
    contents = []
    for label in labels:
        pixels = random.integers(0, 120, (12, 12, 3), dtype=np.uint8)
        pixels[4 * label : 4 * label + 4] += 80
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "PNG")
        contents.append(stream.getvalue())
    return FakeStore(contents, labels, name, visibility)
