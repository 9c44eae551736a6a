"""Record ids -> decoded pixels -> views: the rows of a unit, or of a set that is evaluated."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from pipeline.data.images import (
    Pixels,
    center_boxes,
    crop_and_resize,
    decode_stored,
    random_crop_boxes,
)
from pipeline.data.shards import ShardStore, StorageFault

PIXEL_CACHE_BYTES = 512 * 2**20
ROWS_PER_CHUNK = 128
MAX_READERS = 2


class PixelReader:
    """Record ids -> decoded pixels, with a bounded cache where the whole dataset fits into it.

    The cache belongs to one dataset (root and manifest digest) and is filled as records come by.
    Records whose shape differs from the first one's are decoded anew each time. Thread-safe:
    a row is marked as present after it is written, and all writers write the same bits.
    """

    def __init__(self, store: ShardStore, cache_bytes: int = PIXEL_CACHE_BYTES) -> None:
        self.store = store
        self._cache_bytes = cache_bytes
        self._pixels: npt.NDArray[np.uint8] | None = None
        self._is_present = np.zeros(0, bool)
        self._lock = threading.Lock()

    def read(
        self, record_ids: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint8] | list[Pixels | None]:
        """The records' pixels: [n, H, W, C] if all are at hand in one shape, else one by one.

        An entry is None if the record's bytes are right but do not decode.

        Raises:
            StorageFault: storage does not return the bytes that the index names.
        """
        cached = self._pixels
        if cached is not None and self._is_present[record_ids].all():
            return cached[record_ids]
        missing = np.arange(len(record_ids))
        decoded: list[Pixels | None] = [None] * len(record_ids)
        if cached is not None:
            present = self._is_present[record_ids]
            missing = np.flatnonzero(~present)
            for row in np.flatnonzero(present).tolist():
                decoded[row] = cached[record_ids[row]]
        images = decode_stored(self.store.read(record_ids[missing]))
        for row, image in zip(missing.tolist(), images, strict=True):
            decoded[row] = image
            if image is not None:
                self._keep(int(record_ids[row]), image)
        shapes = {None if image is None else image.shape for image in decoded}
        if len(shapes) == 1 and None not in shapes:
            return np.stack([image for image in decoded if image is not None])
        return decoded

    def _keep(self, record_id: int, image: Pixels) -> None:
        if self._pixels is None:
            num_records = self.store.num_records
            if num_records * image.size > self._cache_bytes:
                return
            with self._lock:
                if self._pixels is None:
                    self._is_present = np.zeros(num_records, bool)
                    self._pixels = np.empty((num_records, *image.shape), np.uint8)
        if image.shape == self._pixels.shape[1:]:
            self._pixels[record_id] = image
            self._is_present[record_id] = True


_readers: OrderedDict[tuple[str, str, int], PixelReader] = OrderedDict()
_readers_lock = threading.Lock()


def shared_reader(root: str, manifest_digest: str, cache_bytes: int) -> PixelReader:
    """This process's reader of exactly this dataset; the last few are kept."""
    key = (root, manifest_digest, cache_bytes)
    with _readers_lock:
        if key not in _readers:
            store = ShardStore(root)
            if store.manifest.digest() != manifest_digest:
                raise StorageFault(
                    "the dataset was prepared anew since this stream was opened: start again"
                )
            _readers[key] = PixelReader(store, cache_bytes)
            while len(_readers) > MAX_READERS:
                _readers.popitem(last=False)
        _readers.move_to_end(key)
        return _readers[key]


def read_views(
    reader: PixelReader,
    record_ids: npt.NDArray[np.int64],
    *,
    image_size: int,
    crop_scale: tuple[float, float] = (0.2, 1.0),
    crop_uniforms: npt.NDArray[np.float64] | None = None,
    crop_fraction: float = 1.0,
    views_per_image: int = 1,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """Views of some records; a record is read and decoded once, whatever the number of its views.

    Args:
        reader: of the dataset.
        record_ids: int64 [n], no padding.
        image_size: side S of the views.
        crop_scale: of a random crop.
        crop_uniforms: float64 [n, V, NUM_CROP_UNIFORMS] for random crops and flips; None for the
            central square.
        crop_fraction: side of the central square as a share of the shorter side.
        views_per_image: V.

    Returns:
        images uint8 [n V, 3, S, S], the views of a record one after the other (zeros where it does
        not decode), is_decoded bool [n].
    """
    views = np.zeros((len(record_ids), views_per_image, 3, image_size, image_size), np.uint8)
    is_decoded = np.zeros(len(record_ids), bool)
    for start in range(0, len(record_ids), ROWS_PER_CHUNK):
        ids = record_ids[start : start + ROWS_PER_CHUNK]
        pixels = reader.read(ids)
        rows = np.array([row for row in range(len(ids)) if pixels[row] is not None], np.int64)
        if not len(rows):
            continue
        images = pixels if isinstance(pixels, np.ndarray) else [p for p in pixels if p is not None]
        heights = np.array([image.shape[0] for image in images])
        widths = np.array([image.shape[1] for image in images])
        for view in range(views_per_image):
            if crop_uniforms is None:
                boxes = center_boxes(heights, widths, crop_fraction)
                flips = np.zeros(len(rows), bool)
            else:
                boxes, flips = random_crop_boxes(
                    heights, widths, crop_uniforms[start + rows, view], crop_scale
                )
            views[start + rows, view] = crop_and_resize(images, boxes, flips, image_size)
        is_decoded[start + rows] = True
    return views.reshape(-1, 3, image_size, image_size), is_decoded
