"""Parquet files that hold the pictures: Hugging Face's, and img2dataset's `parquet` output."""

from __future__ import annotations

import contextlib
import json
import posixpath
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from pipeline.data.sources.base import (
    IMAGE_SUFFIXES,
    RawRecord,
    Source,
    SourceUnit,
    fault_units,
    faulty_records,
    list_below,
    printable,
    require_path,
    told,
)
from pipeline.data.sources.groups import NO_RULES, RowRules
from pipeline.data.sources.where import lowered
from pipeline.storage import Location

ROWS_PER_BATCH = 64
FOOTERS_AT_ONCE = 16


class ParquetSource(Source):
    """`PATH[?image=COLUMN&label=COLUMN]`: a Parquet file or a folder of them.

    - The picture is in `image` (encoded bytes, or a struct of `bytes` and `path`, where null bytes
      mean the file at `path`, which lies below the Parquet file's folder), or in a binary column
      that is called like an image suffix (img2dataset's `jpg`).
    - A row that img2dataset marks as failed (`status` other than success) is no record; another row
      without a picture is left out as `no_image`.
    - The label is the integer in `label`; class names come from Hugging Face's metadata.

    A unit is a row group, read a few rows at a time.
    """

    def __init__(self, spec: str, rules: RowRules = NO_RULES) -> None:
        path, _, query = spec.partition("?")
        options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        if unknown := sorted(set(options) - {"image", "label"}):
            raise ValueError(
                f"source=parquet:{spec}: option {unknown[0]!r} is unknown; give image or label"
            )
        self.root, self.rules = Location(path), rules
        require_path(self.root, "parquet")
        if self.root.name.lower().endswith(".parquet"):
            size = self.root.num_bytes()
            self.root, name = Location(self.root.uri.rpartition("/")[0]), self.root.name
            files, self._faults = [(name, size)], []
        else:
            listing = list_below(self.root)
            files = [each for each in listing.files if each[0].lower().endswith(".parquet")]
            self._faults = list(listing.faults)
        with ThreadPoolExecutor(FOOTERS_AT_ONCE) as pool:
            footers = list(pool.map(lambda each: _footer(self.root / each[0]), files))
        found = zip(files, footers, strict=True)
        self._files = [(name, size, footer) for (name, size), footer in found if footer is not None]
        read = {name for name, _, _ in self._files}
        self._faults += [(name, "unreadable_parquet") for name, _ in files if name not in read]
        if not self._files:
            raise ValueError(
                f"source=parquet:{self.root} holds no readable Parquet file: they must end in"
                " .parquet" + told(self._faults)
            )
        schema = self._files[0][2].schema.to_arrow_schema()
        self._image = _image_column(schema, options.get("image"), f"parquet:{spec}")
        self._label = _label_column(schema, options.get("label"), f"parquet:{spec}")
        self.class_names = _class_names(schema, self._label)
        if rules:
            rules.require(schema.names, f"source=parquet:{spec}")

    def list_units(self) -> list[SourceUnit]:
        units: list[SourceUnit] = []
        for name, size, footer in self._files:
            for group in range(footer.num_row_groups):
                units.append(
                    SourceUnit(
                        index=len(units), name=name, start=group, stop=group + 1, num_bytes=size
                    )
                )
        return units + fault_units(sorted(self._faults), len(units))

    def read_unit(self, unit: SourceUnit) -> Iterator[RawRecord]:
        if unit.faults:
            yield from faulty_records(unit)
            return
        place, name = self.root / unit.name, printable(unit.name)
        row = 0
        try:
            filesystem, path = place.filesystem()
            with filesystem.open_input_file(path) as file:
                reader = parquet.ParquetFile(file, pre_buffer=False)
                present = set(reader.schema_arrow.names)
                columns = [each for each in self._columns(present) if each in present]
                batches = reader.iter_batches(
                    ROWS_PER_BATCH, row_groups=[unit.start], columns=columns
                )
                for batch in batches:
                    for values in batch.to_pylist():
                        record = self._record(f"{name}/{unit.start}/{row}", unit.name, values)
                        row += 1
                        if record is not None:
                            yield record
        except (OSError, pa.ArrowException):
            yield RawRecord(
                key=f"{name}/{unit.start}/{row}", content=None, error="unreadable_parquet"
            )

    def _columns(self, present: set[str]) -> list[str]:
        named = [self._image, *([self._label] if self._label else []), "status", "key"]
        named += sorted(each for each in present if each.lower() in self.rules.names)
        return list(dict.fromkeys(named))

    def _record(self, key: str, file: str, values: dict[str, Any]) -> RawRecord | None:
        if values.get("status") not in (None, "success"):
            return None
        if values.get("key") is not None:
            key = f"{key}:{values['key']}"
        why, group = self.rules.judge(lowered(values)) if self.rules else (None, None)
        if why is not None:
            return RawRecord(key=key, content=None, error=why)
        label = values.get(self._label) if self._label else None
        if not isinstance(label, int) or isinstance(label, bool):
            label = None
        image: Any = values.get(self._image)
        path = None
        if isinstance(image, dict):
            image, path = image.get("bytes"), image.get("path")
        if image is None and path:
            return replace(self._read_beside(key, file, str(path), label), group=group)
        if not isinstance(image, bytes) or not image:
            return RawRecord(key=key, content=None, label=label, error="no_image")
        return RawRecord(key=key, content=image, label=label, group=group)

    def _read_beside(self, key: str, file: str, path: str, label: int | None) -> RawRecord:
        """The picture at a path that a row names, which must lie below the file's own folder."""
        folder = posixpath.dirname(file)
        whole = posixpath.normpath(posixpath.join(folder, path))
        is_inside = not folder or whole.startswith(folder + "/")
        if "://" in path or path.startswith("/") or whole.startswith("..") or not is_inside:
            return RawRecord(key=key, content=None, label=label, error="path_outside")
        try:
            content = (self.root / whole).read_bytes()
        except OSError:
            return RawRecord(key=key, content=None, label=label, error="unreadable_file")
        return RawRecord(key=key, content=content, label=label)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": [], "_faults": []}


def _footer(place: Location) -> Any:
    """A file's metadata; None where it has none that can be read."""
    with contextlib.suppress(OSError, pa.ArrowException):
        filesystem, path = place.filesystem()
        with filesystem.open_input_file(path) as file:
            return parquet.read_metadata(file)
    return None


def _image_column(schema: pa.Schema, wanted: str | None, source: str) -> str:
    fitting = [field.name for field in schema if _holds_images(field.type)]
    if wanted is not None:
        if wanted in fitting:
            return wanted
        raise ValueError(
            f"source={source}: image={wanted!r} is no column of pictures (bytes, or a struct of"
            f" bytes and path); there are {', '.join(fitting) or 'none'}"
        )
    by_name = [name for name in ("image", *IMAGE_SUFFIXES) if name in fitting]
    if by_name or len(fitting) == 1:
        return (by_name or fitting)[0]
    if fitting:
        raise ValueError(
            f"source={source} has several columns of bytes, {', '.join(fitting)}: write"
            f" ?image={fitting[0]} behind the path to choose one"
        )
    raise ValueError(
        f"source={source} has no column of pictures (bytes, or a struct of bytes and path), only"
        f" {', '.join(schema.names)}; if it lies beside tars, give webdataset:"
    )


def _holds_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        names = {kind.field(place).name for place in range(kind.num_fields)}
        return "bytes" in names
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _label_column(schema: pa.Schema, wanted: str | None, source: str) -> str | None:
    fitting = [field.name for field in schema if pa.types.is_integer(field.type)]
    if wanted is not None and wanted not in fitting:
        raise ValueError(
            f"source={source}: label={wanted!r} is no column of integers; there are"
            f" {', '.join(fitting) or 'none'}"
        )
    return wanted or ("label" if "label" in fitting else None)


def _class_names(schema: pa.Schema, label: str | None) -> tuple[str, ...] | None:
    """Hugging Face's list for the label column, where the metadata has one."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        return tuple(names)
    return None
