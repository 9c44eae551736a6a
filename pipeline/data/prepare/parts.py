"""Pass 1: a source unit becomes a part, that is converted bytes and a table of their digests."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.data.images import ImageError
from pipeline.data.prepare.config import PrepareConfig
from pipeline.data.prepare.conversion import Converted, convert
from pipeline.data.prepare.isolation import isolated_converter
from pipeline.data.sources import RawRecord, Source, SourceUnit
from pipeline.storage import Location

PARTS = "_parts"
PART_FORMAT = "with groups "
PART_CHUNK_BYTES = 32 * 2**20
BATCH_RECORDS = 64
BATCH_BYTES = 4 * 2**20

PART_SCHEMA = pa.schema(
    [
        ("source_digest", pa.binary(32)),
        ("pixel_digest", pa.binary(32)),
        ("key", pa.string()),
        ("label", pa.int32()),
        ("chunk", pa.int32()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("group", pa.binary(16)),
        ("perceptual_hash", pa.uint64()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is known of a finished part without opening it; `left_out` counts by reason."""

    unit: int
    num_records: int
    left_out: dict[str, int]


@dataclass(frozen=True)
class ReadUnit:
    """The task of pass 1: make a unit's part in `folder`, or find it finished."""

    config: PrepareConfig
    folder: Location
    source: Source

    def __call__(self, unit: SourceUnit) -> Part:
        text = PART_FORMAT + self.config.digest() + unit.fingerprint()
        stamp = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
        meta_file = self.folder / f"{unit.index:07d}.json"
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            meta = json.loads(meta_file.read_text())
            if meta["stamp"] == stamp:
                return Part(
                    unit=unit.index, num_records=meta["num_records"], left_out=meta["left_out"]
                )
        writer = _PartWriter(self.folder, unit.index)
        left_out: Counter[str] = Counter()
        for batch in _batches(self.source.read_unit(unit)):
            for record, found in zip(batch, self._converted(batch), strict=True):
                if isinstance(found, ImageError):  # content never stops a prepare
                    left_out[found.reason] += 1
                else:
                    writer.add(record, found)
        num_records = writer.close()
        meta = {"stamp": stamp, "num_records": num_records, "left_out": dict(left_out)}
        meta_file.write_text(json.dumps(meta, sort_keys=True))
        return Part(unit=unit.index, num_records=num_records, left_out=dict(left_out))

    def _converted(self, batch: Sequence[RawRecord]) -> list[Converted | ImageError]:
        """What becomes of each record; encoded bytes are decoded in a process of their own."""
        rules = self.config.conversion_rules()
        encoded = [record.content for record in batch if isinstance(record.content, bytes)]
        decoded: Iterator[Converted | ImageError] = iter(())
        if encoded:
            with isolated_converter() as converter:
                decoded = iter(converter.convert(encoded, rules))
        results: list[Converted | ImageError] = []
        for record in batch:
            if isinstance(record.content, bytes):
                results.append(next(decoded))
            elif record.content is None:
                results.append(ImageError(record.error or "unreadable_file"))
            else:
                try:
                    results.append(convert(record.content, rules))
                except ImageError as error:
                    results.append(error)
        return results


def _batches(records: Iterable[RawRecord]) -> Iterator[list[RawRecord]]:
    """The records in order, as many at a time as are converted by one call."""
    batch: list[RawRecord] = []
    num_bytes = 0
    for record in records:
        batch.append(record)
        content = record.content
        num_bytes += content.nbytes if isinstance(content, np.ndarray) else len(content or b"")
        if len(batch) >= BATCH_RECORDS or num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


class _PartWriter:
    """Collects a unit's records; writes bytes in bounded chunks, then their table."""

    def __init__(self, folder: Location, unit: int) -> None:
        self.folder, self.unit = folder, unit
        self.columns: dict[str, list[Any]] = {name: [] for name in PART_SCHEMA.names}
        self.chunk: list[bytes] = []
        self.chunk_bytes = self.num_chunks = 0

    def add(self, record: RawRecord, found: Converted) -> None:
        label, stored = record.label, found.stored
        row = (
            found.source_digest,
            found.pixel_digest,
            record.key.encode("utf-8", "replace").decode(),
            -1 if label is None or not 0 <= label < 2**31 else label,
            self.num_chunks,
            self.chunk_bytes,
            len(stored),
            None
            if record.group is None
            else hashlib.sha256(record.group.encode("utf-8", "replace")).digest()[:16],
            found.perceptual_hash,
        )
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)
        self.chunk.append(stored)
        self.chunk_bytes += len(stored)
        if self.chunk_bytes >= PART_CHUNK_BYTES:
            self._flush()

    def _flush(self) -> None:
        chunk_file(self.folder, self.unit, self.num_chunks).write_bytes(b"".join(self.chunk))
        self.chunk, self.chunk_bytes = [], 0
        self.num_chunks += 1

    def close(self) -> int:
        if self.chunk:
            self._flush()
        table = pa.table(self.columns, PART_SCHEMA)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        _part_file(self.folder, self.unit).write_bytes(sink.getvalue().to_pybytes())
        return table.num_rows


def _group_digest(group: str) -> bytes:
    return hashlib.sha256(group.encode("utf-8", "backslashreplace")).digest()[:16]


def _part_file(folder: Location, unit: int) -> Location:
    return folder / f"{unit:07d}.arrow"


def chunk_file(folder: Location, unit: int, chunk: int) -> Location:
    """Some of a part's stored bytes, one record after the other."""
    return folder / f"{unit:07d}-{chunk:04d}.bin"


def selection_file(folder: Location, unit: int) -> Location:
    """Where pass 2 writes what becomes of a part's records."""
    return folder / f"{unit:07d}.selection"


def read_part(folder: Location, unit: int) -> pa.Table:
    """A part's table (PART_SCHEMA)."""
    return pa.ipc.open_file(pa.py_buffer(_part_file(folder, unit).read_bytes())).read_all()


def fixed_column(table: pa.Table, name: str) -> npt.NDArray[np.uint8]:
    """A column of fixed-size binary without nulls as uint8 [n, width]."""
    width = table.schema.field(name).type.byte_width
    if table.num_rows == 0:
        return np.empty((0, width), np.uint8)
    array = table.column(name).combine_chunks()
    flat = np.frombuffer(array.buffers()[1], np.uint8)
    start = array.offset * width
    return flat[start : start + len(array) * width].reshape(-1, width).copy()
