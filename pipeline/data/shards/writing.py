"""What a dataset's folder holds and how it is written: WebDataset-compatible tars, Arrow tables."""

from __future__ import annotations

import hashlib
import io
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.storage import Location

INDEX_NAME = "index.arrow"
SOURCES_NAME = "sources.arrow"
ROWS_PER_BATCH = 65_536
STORED_DIGEST_BYTES = 16

INDEX_SCHEMA = pa.schema(
    [
        ("shard", pa.uint32()),
        ("length", pa.uint32()),
        ("offset", pa.uint64()),
        ("label", pa.int32()),
        ("digest", pa.binary(STORED_DIGEST_BYTES)),
    ]
)
SOURCES_SCHEMA = pa.schema(
    [("source_digest", pa.binary(32)), ("pixel_digest", pa.binary(32)), ("key", pa.string())]
)


def stored_digest(content: bytes) -> bytes:
    """The 16 bytes of SHA-256 by which the index recognises a record's stored bytes."""
    return hashlib.sha256(content).digest()[:STORED_DIGEST_BYTES]


def shard_name(number: int) -> str:
    """The file name of a dataset's shard."""
    return f"{number:06d}.tar"


def build_shard(
    first_record_id: int, contents: Sequence[bytes], labels: Sequence[int]
) -> tuple[bytes, npt.NDArray[np.uint64]]:
    """An uncompressed tar of `{record id}.jpg` (and `.cls` where the label is >= 0).

    Returns:
        The tar's bytes, the same for the same records, and each image's offset inside it.
    """
    parts: list[bytes] = []
    offsets = np.empty(len(contents), np.uint64)
    position = 0
    for row, (content, label) in enumerate(zip(contents, labels, strict=True)):
        name = f"{first_record_id + row:012d}"
        members = [(f"{name}.jpg", content)]
        if label >= 0:
            members.append((f"{name}.cls", b"%d" % label))
        offsets[row] = position + 512
        for member_name, body in members:
            padding = -len(body) % 512
            parts += (_tar_header(member_name, len(body)), body, bytes(padding))
            position += 512 + len(body) + padding
    parts.append(bytes(1024))
    return b"".join(parts), offsets


_HEADER = bytearray(512)
_HEADER[100:108] = b"0000644\0"
_HEADER[108:124] = b"0000000\0" * 2
_HEADER[136:148] = b"00000000000\0"
_HEADER[148:156] = b" " * 8
_HEADER[156:157] = b"0"
_HEADER[257:265] = b"ustar\x0000"
_HEADER_SUM = sum(_HEADER)


def _tar_header(name: str, size: int) -> bytes:
    header = bytearray(_HEADER)
    name_bytes, size_bytes = name.encode(), b"%011o" % size
    header[: len(name_bytes)] = name_bytes
    header[124:135] = size_bytes
    header[148:156] = b"%06o\0 " % (_HEADER_SUM + sum(name_bytes) + sum(size_bytes))
    return bytes(header)


class TableWriter:
    """Writes an Arrow file in batches of exactly ROWS_PER_BATCH rows and knows its SHA-256.

    On a local disk the file appears under its name when `close` returns, whole: another process
    that prepares the same dataset can neither see nor cut off a half-written one.

    Args:
        location: the file.
        schema: its columns.
        drafts: folder of the unfinished file, on the same disk; beside the file if None.
    """

    def __init__(
        self, location: Location, schema: pa.Schema, drafts: Location | None = None
    ) -> None:
        filesystem, path = location.filesystem()
        self._target: Path | None = None
        if location.is_local:
            self._target = Path(path)
            self._target.parent.mkdir(parents=True, exist_ok=True)
            folder = self._target.parent if drafts is None else drafts.local_path
            folder.mkdir(parents=True, exist_ok=True)
            path = str(folder / f".{self._target.name}.{uuid.uuid4().hex[:8]}")
        self._draft = path
        self._sink = _HashingSink(filesystem.open_output_stream(path, compression=None))
        self._writer = pa.ipc.new_file(pa.PythonFile(self._sink, mode="w"), schema)
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = 0

    def append(self, columns: dict[str, Any]) -> None:
        """Add rows given as one array (numpy, pyarrow or list) per column of the schema."""
        arrays = [pa.array(columns[field.name], field.type) for field in self._schema]
        self._waiting.append(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._num_waiting += len(self._waiting[-1])
        while self._num_waiting >= ROWS_PER_BATCH:
            self._write(ROWS_PER_BATCH)

    def _write(self, num_rows: int) -> None:
        table = pa.Table.from_batches(self._waiting, self._schema).combine_chunks()
        (batch,) = table.slice(0, num_rows).combine_chunks().to_batches()
        self._writer.write_batch(batch)
        self._waiting = table.slice(num_rows).to_batches()
        self._num_waiting -= num_rows

    def close(self) -> str:
        """Write what is left; returns the file's SHA-256 in hex."""
        if self._num_waiting:
            self._write(self._num_waiting)
        self._writer.close()
        self._sink.close_file()
        if self._target is not None:
            os.replace(self._draft, self._target)
        return self._sink.sha256.hexdigest()


class _HashingSink(io.RawIOBase):
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.sha256 = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.sha256.update(content)
        self._stream.write(content)
        return len(content)

    def close_file(self) -> None:
        self._stream.close()
