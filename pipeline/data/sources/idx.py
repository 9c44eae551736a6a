"""IDX files of the MNIST family."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pipeline.data.sources.base import GZIP, RawRecord, Source, SourceUnit, require_path
from pipeline.storage import Location

ROWS_PER_UNIT = 5_000


class IdxSource(Source):
    """IDX files of the MNIST family, plain or gzip: uint8 [N, H, W] (or [N, H, W, 3]) and labels.

    The labels lie beside the images under the family's naming (`train-images-idx3-ubyte` and
    `train-labels-idx1-ubyte`) or are given as `idx:IMAGES,LABELS`.
    """

    def __init__(self, paths: str) -> None:
        images, _, labels = paths.partition(",")
        self.images = Location(images)
        require_path(self.images, "idx")
        self.labels = Location(labels) if labels else self._find_labels()
        if labels:
            require_path(Location(labels), "idx")
        shape, _ = _read_idx(self.images.uri)
        if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)):
            raise ValueError(
                f"source=idx:{self.images} has shape {shape}: images must be [N, H, W] or"
                " [N, H, W, 1 or 3]; give the images file first, then a comma and the labels"
            )
        if self.labels is not None:
            label_shape, values = _read_idx(self.labels.uri)
            if len(values) < math.prod(label_shape):
                raise ValueError(
                    f"source=idx: {self.labels} ends after {len(values)} of its"
                    f" {math.prod(label_shape)} labels; fetch the file again"
                )
            if label_shape != shape[:1]:
                raise ValueError(
                    f"source=idx: {self.labels} has shape {label_shape}, but {self.images} has"
                    f" {shape[0]} images; name the labels that belong to them after a comma"
                )
        self.shape = shape

    def _find_labels(self) -> Location | None:
        name = self.images.name
        other = name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1")
        beside = Location(self.images.uri.removesuffix(name) + other)
        return beside if other != name and beside.exists() else None

    def list_units(self) -> list[SourceUnit]:
        pixels_per_image = math.prod(self.shape[1:])
        if self.shape[0] == 0 or pixels_per_image == 0:
            raise ValueError(f"source=idx:{self.images} holds no image")
        # A cut-off file: its complete images, and one fault for all that is missing.
        num_whole = len(_read_idx(self.images.uri)[1]) // pixels_per_image
        num = min(self.shape[0], num_whole + 1)
        size = self.images.num_bytes() + (self.labels.num_bytes() if self.labels else 0)
        return [
            SourceUnit(
                index=i,
                name=self.images.name,
                start=s,
                stop=min(num, s + ROWS_PER_UNIT),
                num_bytes=size,
            )
            for i, s in enumerate(range(0, num, ROWS_PER_UNIT))
        ]

    def read_unit(self, unit: SourceUnit) -> Iterator[RawRecord]:
        shape, values = _read_idx(self.images.uri)
        pixels_per_image = math.prod(shape[1:])
        labels = _read_idx(self.labels.uri)[1] if self.labels is not None else None
        for row in range(unit.start, unit.stop):
            key = str(row)
            flat = values[row * pixels_per_image : (row + 1) * pixels_per_image]
            label = int(labels[row]) if labels is not None and row < len(labels) else None
            if len(flat) < pixels_per_image:
                yield RawRecord(key=key, content=None, label=label, error="truncated_file")
                continue
            yield RawRecord(key=key, content=flat.reshape(shape[1:]), label=label)


def _read_idx(uri: str) -> tuple[tuple[int, ...], npt.NDArray[np.uint8]]:
    """(shape, flat uint8 values); a cut-off file gives fewer values than its shape says."""
    filesystem, path = Location(uri).filesystem()
    info = filesystem.get_file_info(path)
    return _read_idx_version(uri, info.size, info.mtime_ns)


@functools.lru_cache(maxsize=4)
def _read_idx_version(
    uri: str, size: int | None, mtime_ns: int | None
) -> tuple[tuple[int, ...], npt.NDArray[np.uint8]]:
    """Read a file once per version of it: a unit is only a part of it."""
    if Location(uri).is_local and Location(uri).local_path.is_dir():
        raise ValueError(f"source=idx:{uri} is a folder: give the file of the images")
    content = Location(uri).read_bytes()
    if content[:2] == GZIP:
        content = _gunzip_as_far_as_possible(content)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != 0x08:
        raise ValueError(
            f"source=idx:{uri} is not an IDX file of unsigned bytes (it must start with 00 00 08);"
            " check the path"
        )
    num_dims = content[3]
    if len(content) < 4 + 4 * num_dims:
        raise ValueError(f"source=idx:{uri} ends inside its header; fetch the file again")
    shape = np.frombuffer(content, ">u4", count=num_dims, offset=4)
    return tuple(int(n) for n in shape), np.frombuffer(content, np.uint8, offset=4 + 4 * num_dims)


def _gunzip_as_far_as_possible(content: bytes) -> bytes:
    parts = []
    while content[:2] == GZIP:  # a gzip file may have several members
        member = zlib.decompressobj(wbits=31)
        try:
            parts.append(member.decompress(content))
        except zlib.error:
            break
        content = member.unused_data
    return b"".join(parts)
