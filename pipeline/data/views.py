"""Record ids -> decoded pixels -> views: the rows of a unit, or of a set that is evaluated."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pipeline.data.images import (
    SMALL_SIDE,
    Pixels,
    center_boxes,
    crop_and_resize,
    decode_stored,
    random_crop_boxes,
)
from pipeline.data.shards import CacheSettings, ShardStore, StorageFault

PIXEL_CACHE_BYTES = 512 * 2**20
ROWS_PER_CHUNK = 128
MAX_READERS = 2

PixelRows = npt.NDArray[np.uint8] | list[Pixels | None]
"""Pictures of some records: [n, H, W, C], or one by one; None where one does not decode."""


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

    def read(self, record_ids: npt.NDArray[np.int64]) -> PixelRows:
        """The records' pixels: [n, H, W, C] if they are at hand in one shape, else one by one.

        An entry is None if the record's bytes are right but do not decode.

        Raises:
            StorageFault: storage does not return the bytes that the index names.
        """
        return self.begin(record_ids)()

    def begin(self, record_ids: npt.NDArray[np.int64]) -> Callable[[], PixelRows]:
        """Begin to `read`: an object store is asked at once; the call that is returned decodes."""
        cached = self._pixels
        present = np.zeros(len(record_ids), bool)
        if cached is not None:
            present = self._is_present[record_ids]
            if present.all():
                return lambda: cached[record_ids]
        missing = np.flatnonzero(~present)
        pending = self.store.begin(record_ids[missing])

        def finish() -> PixelRows:
            decoded: list[Pixels | None] = [None] * len(record_ids)
            if cached is not None:
                for row in np.flatnonzero(present).tolist():
                    decoded[row] = cached[record_ids[row]]
            images = decode_stored(pending.result())
            for row, image in zip(missing.tolist(), images, strict=True):
                decoded[row] = image
                if image is not None:
                    self._keep(int(record_ids[row]), image)
            whole = [image for image in decoded if image is not None]
            is_small = len(whole) == len(decoded) and len({image.shape for image in whole}) == 1
            if is_small and max(whole[0].shape) <= SMALL_SIDE:
                return np.stack(whole)  # small pictures are cropped many at once
            return decoded

        return finish

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


_readers: OrderedDict[tuple[object, ...], PixelReader] = OrderedDict()
_readers_lock = threading.Lock()


def shared_reader(
    root: str, manifest_digest: str, cache_bytes: int, cache: CacheSettings | None = None
) -> PixelReader:
    """This process's reader of exactly this dataset; the last few are kept.

    Args:
        root, manifest_digest: the dataset.
        cache_bytes: of decoded pixels in this process's memory.
        cache: of stored bytes on this machine's disk.
    """
    key = (root, manifest_digest, cache_bytes, cache)
    with _readers_lock:
        if key not in _readers:
            store = ShardStore(root, cache=cache)
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
    views = np.zeros((len(record_ids) * views_per_image, 3, image_size, image_size), np.uint8)
    is_decoded = np.zeros(len(record_ids), bool)
    for start in range(0, len(record_ids), ROWS_PER_CHUNK):
        rows = slice(start, min(start + ROWS_PER_CHUNK, len(record_ids)))
        is_decoded[rows] = write_views(
            reader.read(record_ids[rows]),
            views[rows.start * views_per_image : rows.stop * views_per_image],
            crop_scale=crop_scale,
            crop_uniforms=None if crop_uniforms is None else crop_uniforms[rows],
            crop_fraction=crop_fraction,
        )
    return views, is_decoded


def write_views(
    pixels: PixelRows,
    views: npt.NDArray[np.uint8],
    *,
    crop_scale: tuple[float, float] = (0.2, 1.0),
    crop_uniforms: npt.NDArray[np.float64] | None = None,
    crop_fraction: float = 1.0,
) -> npt.NDArray[np.bool_]:
    """Crop and resize pictures into `views`, uint8 [n V, 3, S, S]; see `read_views`.

    Returns:
        is_decoded bool [n]; the views of a record that does not decode are left as they are.
    """
    num, side = len(pixels), views.shape[-1]
    if not num:
        return np.zeros(0, bool)
    views_nV = views.reshape(num, -1, 3, side, side)
    is_decoded = np.array([image is not None for image in pixels])
    images = pixels if isinstance(pixels, np.ndarray) else [p for p in pixels if p is not None]
    if not len(images):
        return is_decoded
    heights = np.array([image.shape[0] for image in images])
    widths = np.array([image.shape[1] for image in images])
    rows = slice(None) if is_decoded.all() else np.flatnonzero(is_decoded)
    for view in range(views_nV.shape[1]):
        if crop_uniforms is None:
            boxes = center_boxes(heights, widths, crop_fraction)
            flips = np.zeros(len(images), bool)
        else:
            uniforms = crop_uniforms[rows, view]
            boxes, flips = random_crop_boxes(heights, widths, uniforms, crop_scale)
        views_nV[rows, view] = crop_and_resize(images, boxes, flips, side)
    return is_decoded
