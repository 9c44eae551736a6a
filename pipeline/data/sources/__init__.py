"""What people bring: folders of images, tars, IDX files and procedural images, read as one stream.

A source lists *units* (a tar, some files, a range of rows): small, picklable and read on their own
by any worker. Reading never fails because of content: an unreadable file, a damaged tar member or
a cut-off tar becomes a RawRecord with an `error`, which `prepare` counts. Only a path that does
not hold what its URI says is a ValueError.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeline.data.sources.base import IMAGE_SUFFIXES, RawRecord, Source, SourceUnit
from pipeline.data.sources.groups import GroupKey, RowRules
from pipeline.data.sources.idx import IdxSource
from pipeline.data.sources.imagefolder import ImageFolderSource
from pipeline.data.sources.parquet import ParquetSource
from pipeline.data.sources.procedural import SyntheticSource
from pipeline.data.sources.webdataset import WebDatasetSource
from pipeline.data.sources.where import Where

__all__ = [
    "IMAGE_SUFFIXES",
    "GroupKey",
    "IdxSource",
    "ImageFolderSource",
    "ParquetSource",
    "RawRecord",
    "RowRules",
    "Source",
    "SourceUnit",
    "SyntheticSource",
    "WebDatasetSource",
    "Where",
    "open_source",
]


def open_source(uri: str, where: str | None = None, group_key: str | None = None) -> Source:
    """The source that a URI names.

    Args:
        uri: one of `imagefolder:PATH` (class = relative folder, or by its metadata file),
            `webdataset:PATH` (a tar or a folder of tars, img2dataset's too), `parquet:PATH` (a file
            or a folder, Hugging Face's or img2dataset's), `idx:IMAGES[,LABELS]` (MNIST family,
            plain or .gz), `synthetic:FAMILY+FAMILY?num_images=N&size=S&seed=K`. PATH is local or
            any URI that pyarrow reads (`s3://bucket/folder`).
        where: which images are taken, by their metadata (`where.py`).
        group_key: whose an image is, by its metadata (`groups.py`).

    Raises:
        ValueError: unknown kind, missing path, nothing of that kind there, or a filter or
            group key that does not fit it.
    """
    kind, separator, rest = uri.partition(":")
    with_metadata: dict[str, Callable[[str, RowRules], Source]] = {
        "imagefolder": ImageFolderSource,
        "parquet": ParquetSource,
        "webdataset": WebDatasetSource,
    }
    without: dict[str, Callable[[str], Source]] = {"idx": IdxSource, "synthetic": SyntheticSource}
    if not separator or kind not in {**with_metadata, **without} or not rest:
        raise ValueError(
            f"source={uri!r} is not understood: write KIND:WHERE with KIND one of"
            f" {', '.join([*with_metadata, *without])}, for example imagefolder:/my/photos"
        )
    rules = RowRules(
        None if where is None else Where(where), None if group_key is None else GroupKey(group_key)
    )
    if kind in with_metadata:
        return with_metadata[kind](rest, rules)
    if rules:
        raise ValueError(f"{rules.text}: source={uri} has no metadata to read; remove it")
    return without[kind](rest)
