"""ShardStore: record id -> stored bytes, by byte range, from a local disk or an object store.

A dataset's folder holds WebDataset-compatible tars, `index.arrow` (36 bytes a record: shard,
offset, length, label, 16-byte digest of the stored bytes), `sources.arrow` (digests of the
original bytes and of the decoded pixels, original key) and the manifest. The index is mapped into
memory, so that readers on one node share it and their own memory does not grow with N.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.data.manifest import DatasetManifest
from pipeline.storage import Location

INDEX_NAME = "index.arrow"
SOURCES_NAME = "sources.arrow"
ROWS_PER_BATCH = 65_536
STORED_DIGEST_BYTES = 16
MAX_VERIFIED_INDEX_BYTES = 64 * 2**20
MAX_CHECKED_BYTES = 2 * 2**30
SHARDS_PER_LISTING = 1_000
MAX_OPEN_SHARDS = 256
NUM_REMOTE_READS = 16
RETRY_DELAYS_SECONDS = (0.05, 0.5, 2.0)

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


class StorageFault(RuntimeError):
    """Storage did not return the bytes that the index names, whatever their content.

    The message is public and names no shard and no record; `private_detail` does, for the private
    log alone.
    """

    def __init__(self, message: str, private_detail: str = "") -> None:
        super().__init__(message)
        self.private_detail = private_detail

    def __reduce__(self) -> tuple[type[StorageFault], tuple[str, str]]:
        return type(self), (str(self), self.private_detail)


def stored_digest(content: bytes) -> bytes:
    """The 16 bytes of SHA-256 by which the index recognises a record's stored bytes."""
    return hashlib.sha256(content).digest()[:STORED_DIGEST_BYTES]


# ------------------------------------------------------------------------------------- writing


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


# ------------------------------------------------------------------------------------- reading


class _RangeReader(Protocol):
    def read_at(self, num_bytes: int, offset: int) -> bytes: ...


class _LocalShard:
    """An open local file; `pread` needs no lock and, unlike a mapping, survives truncation."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        return os.pread(self._descriptor, num_bytes, offset)

    def __del__(self) -> None:
        # Closed when the last reader lets go: another thread may still read a dropped shard.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


@dataclass(frozen=True)
class _Rows:
    """Index rows of some records, one array entry each."""

    shard: npt.NDArray[np.uint32]
    length: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.uint64]
    label: npt.NDArray[np.int32]
    digest: npt.NDArray[np.uint8]  # [n, 16]


class ShardStore:
    """Random access to a prepared dataset.

    Cheap to make and to pickle: nothing is opened before the first use, and a copy in another
    process opens its own. Safe to use from several threads.

    Args:
        root: the dataset's folder.
        retry_delays_seconds: pauses before each further try of a failed read.

    Guarantees:
        1. Every returned record is the bytes that the index names, by digest, or StorageFault
           (test_storage_faults).
        2. A StorageFault's message names no record, shard or key (test_storage_faults).
        3. Results come in the order of the ids asked for, repeated ids included (test_shards).
        4. Of an object store, at most 5 % more bytes are read than asked for (test_shards).
    """

    def __init__(
        self,
        root: Location | str,
        *,
        retry_delays_seconds: Sequence[float] = RETRY_DELAYS_SECONDS,
    ) -> None:
        self.root = root if isinstance(root, Location) else Location(root)
        self.retry_delays_seconds = tuple(retry_delays_seconds)
        self._open_state()

    def _open_state(self) -> None:
        self._lock = threading.RLock()
        self._manifest: DatasetManifest | None = None
        self._tables: dict[str, _MappedTable] = {}
        self._shards: OrderedDict[int, _RangeReader] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "retry_delays_seconds": self.retry_delays_seconds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_state()

    def __len__(self) -> int:
        return self.num_records

    @property
    def manifest(self) -> DatasetManifest:
        """The dataset's manifest. Raises ValueError if the folder is not a finished dataset."""
        with self._lock:
            if self._manifest is None:
                self._manifest = DatasetManifest.load(self.root)
            return self._manifest

    @property
    def num_records(self) -> int:
        """N: record ids are 0 … N-1."""
        return self.manifest.num_records

    def labels(self, record_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The records' labels, int64 [n]; -1 where there is none."""
        return self._rows(np.asarray(record_ids, np.int64)).label.astype(np.int64)

    def pixel_digests(self, record_ids: npt.ArrayLike | None = None) -> npt.NDArray[np.uint8]:
        """SHA-256 of the decoded pixels before resizing, uint8 [n, 32]; of all records if None."""
        return self._source_column("pixel_digest", record_ids)

    def source_digests(self, record_ids: npt.ArrayLike | None = None) -> npt.NDArray[np.uint8]:
        """SHA-256 of the original bytes, uint8 [n, 32]; of all records if None."""
        return self._source_column("source_digest", record_ids)

    def _source_column(self, name: str, ids: npt.ArrayLike | None) -> npt.NDArray[np.uint8]:
        digest = self.manifest.sources_digest
        if digest is None:
            raise ValueError(f"{self.root} was made without {SOURCES_NAME}: prepare it again")
        table = self._table(SOURCES_NAME, digest)
        wanted = self._checked(
            np.arange(self.num_records) if ids is None else np.asarray(ids, np.int64)
        )
        return table.take(name, wanted)

    def read(self, record_ids: npt.ArrayLike) -> list[bytes]:
        """The stored bytes of each record, in the order asked for.

        Args:
            record_ids: int [n], each in [0, N), any order; sorted is fastest.

        Raises:
            ValueError: an id outside [0, N).
            StorageFault: after retries, a shard is missing or its bytes differ from the digest.
        """
        rows = self._rows(np.asarray(record_ids, np.int64))
        contents: list[bytes] = [b""] * len(rows.shard)
        order = np.lexsort((rows.offset, rows.shard))
        reads = list(self._ranges(rows, order))
        if self.root.is_local or len(reads) < 2:
            for read in reads:
                self._read_range(rows, read, contents)
        else:
            # list(): raises what a read raised.
            list(self._thread_pool().map(lambda r: self._read_range(rows, r, contents), reads))
        return contents

    def _ranges(self, rows: _Rows, order: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        """Positions to be read by one request each: neighbours, where that wastes under 5 %.

        A local read costs a microsecond, so records are read one by one and nothing is wasted;
        they still come grouped by shard.
        """
        if self.root.is_local:
            boundaries = np.flatnonzero(np.diff(rows.shard[order].astype(np.int64))) + 1
            yield from (group for group in np.split(order, boundaries) if len(group))
            return
        group: list[int] = []
        useful = end = start = 0
        for position in order.tolist():
            offset, length = int(rows.offset[position]), int(rows.length[position])
            is_near = (
                bool(group)
                and rows.shard[position] == rows.shard[group[-1]]
                and max(end, offset + length) - start <= 1.05 * (useful + length)
                and useful < 8 * 2**20
            )
            if group and not is_near:
                yield np.array(group)
            if not is_near:
                group, useful, start, end = [], 0, offset, offset
            group.append(position)
            useful += length if offset >= end else 0
            end = max(end, offset + length)
        if group:
            yield np.array(group)

    def _read_range(
        self, rows: _Rows, positions: npt.NDArray[np.int64], contents: list[bytes]
    ) -> None:
        """Read one group of one shard into `contents`, with retries."""
        shard = int(rows.shard[positions[0]])
        offsets, lengths = rows.offset[positions].tolist(), rows.length[positions].tolist()
        digests = [digest.tobytes() for digest in rows.digest[positions]]
        waiting = list(range(len(positions)))
        detail = ""
        for delay in (0.0, *self.retry_delays_seconds):
            if delay:
                time.sleep(delay)
            try:
                reader = self._shard(shard)
                if self.root.is_local:
                    got = [reader.read_at(lengths[i], offsets[i]) for i in waiting]
                else:
                    base = offsets[waiting[0]]
                    end = max(offsets[i] + lengths[i] for i in waiting)
                    whole = reader.read_at(end - base, base)
                    got = [
                        whole[offsets[i] - base : offsets[i] - base + lengths[i]] for i in waiting
                    ]
            except (OSError, pa.ArrowException) as error:
                detail = f"shard {shard}: {error}"
                self._forget_shard(shard)
                continue
            failed = []
            for i, content in zip(waiting, got, strict=True):
                if len(content) == lengths[i] and stored_digest(content) == digests[i]:
                    contents[positions[i]] = content
                else:
                    failed.append(i)
            if not failed:
                return
            waiting = failed
            detail = f"shard {shard}: {len(failed)} records differ from their digest, the first"
            detail += f" at offset {offsets[failed[0]]}"
            self._forget_shard(shard)
        raise StorageFault(
            "storage did not return the bytes that the index names, after"
            f" {len(self.retry_delays_seconds) + 1} tries; the private log says which."
            " Restore the shard from a copy, or prepare the dataset again",
            detail,
        ) from None

    def _shard(self, number: int) -> _RangeReader:
        with self._lock:
            if number in self._shards:
                self._shards.move_to_end(number)
                return self._shards[number]
        location = self.root / self.manifest.shards[number].name
        filesystem, path = location.filesystem()
        reader = _LocalShard(path) if location.is_local else filesystem.open_input_file(path)
        with self._lock:
            self._shards[number] = reader
            while len(self._shards) > MAX_OPEN_SHARDS:
                self._shards.popitem(last=False)
        return reader

    def _forget_shard(self, number: int) -> None:
        with self._lock:
            self._shards.pop(number, None)

    def _thread_pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_REMOTE_READS, "shard-read")
            return self._pool

    def _rows(self, record_ids: npt.NDArray[np.int64]) -> _Rows:
        ids = self._checked(record_ids)
        table = self._table(INDEX_NAME, self.manifest.index_digest)
        return _Rows(*(table.take(name, ids) for name in INDEX_SCHEMA.names))

    def _checked(self, record_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if record_ids.size and not (
            record_ids.min() >= 0 and record_ids.max() < self.manifest.num_records
        ):
            raise ValueError(
                f"a record id lies outside [0, {self.manifest.num_records}): the plan and the"
                " dataset disagree on the number of records"
            )
        return record_ids

    def _table(self, name: str, digest: str) -> _MappedTable:
        with self._lock:
            if name not in self._tables:
                self._tables[name] = _MappedTable(
                    _local_copy(self.root / name, digest), digest, self.num_records
                )
            return self._tables[name]

    def check_files(self) -> None:
        """Find a lost or damaged file before anything is charged for reading it.

        The index is opened, every shard's size is compared with the manifest and, up to
        MAX_CHECKED_BYTES in all, its digest too. It looks at all of them in order, whatever will
        be sampled, so its message may name the shard.

        Raises:
            StorageFault: naming what is wrong and what to do.
        """
        try:
            self._table(INDEX_NAME, self.manifest.index_digest)
        except StorageFault as fault:
            raise self._damaged(str(fault).partition("; ")[0]) from None
        filesystem, path = self.root.filesystem()
        shards = self.manifest.shards
        sizes: list[int] = []
        for start in range(0, len(shards), SHARDS_PER_LISTING):
            paths = [f"{path}/{shard.name}" for shard in shards[start : start + SHARDS_PER_LISTING]]
            sizes += [
                -1 if info.size is None else info.size for info in filesystem.get_file_info(paths)
            ]
        for shard, size in zip(shards, sizes, strict=True):
            if size != shard.num_bytes:
                found = "is missing" if size < 0 else f"has {size} bytes, not {shard.num_bytes}"
                raise self._damaged(f"shard {shard.name} {found}")
        if sum(sizes) > MAX_CHECKED_BYTES:
            return
        for shard in shards:
            if _file_digest(self.root / shard.name) != shard.sha256:
                raise self._damaged(f"shard {shard.name} differs from the manifest's digest")

    def _damaged(self, what: str) -> StorageFault:
        return StorageFault(
            f"the prepared data set at {self.root} is damaged: {what}. Restore it from a copy, or"
            " delete that folder: the same command then prepares the same bytes from the source"
            " again. No step was charged for this",
            what,
        )


def _file_digest(location: Location) -> str:
    """SHA-256 (hex) of a file; of nothing if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with location.open_stream() as stream:
            while part := stream.read(4 * 2**20):
                digest.update(part)
    except OSError:
        return ""
    return digest.hexdigest()


class _MappedTable:
    """An Arrow file in shared memory, read by row number without touching other rows."""

    def __init__(self, path: Path, digest: str, num_rows: int) -> None:
        try:
            if path.stat().st_size <= MAX_VERIFIED_INDEX_BYTES:
                if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                    raise StorageFault(
                        f"{path.name} differs from the digest in the manifest; restore it from a"
                        " copy, or prepare the dataset again"
                    )
            self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
        except (OSError, pa.ArrowException) as error:
            raise StorageFault(f"{path.name} cannot be read", str(error)) from None
        if self._reader.num_record_batches != -(-num_rows // ROWS_PER_BATCH):
            raise StorageFault(f"{path.name} does not have the manifest's number of records")
        self._columns: dict[tuple[str, int], npt.NDArray[Any]] = {}

    def take(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The column's values at some rows: [n], or uint8 [n, width] for fixed-size binary."""
        batches = rows // ROWS_PER_BATCH
        distinct = np.unique(batches)
        if len(distinct) == 1:
            return self._column(name, int(distinct[0]))[rows - distinct[0] * ROWS_PER_BATCH]
        values: npt.NDArray[Any] | None = None
        for batch in distinct.tolist():
            chosen = batches == batch
            part = self._column(name, batch)[rows[chosen] - batch * ROWS_PER_BATCH]
            if values is None:
                values = np.empty((len(rows), *part.shape[1:]), part.dtype)
            values[chosen] = part
        return self._empty(name) if values is None else values

    def _column(self, name: str, batch: int) -> npt.NDArray[Any]:
        if (name, batch) not in self._columns:
            array = self._reader.get_batch(batch).column(name)
            if pa.types.is_fixed_size_binary(array.type):
                width = array.type.byte_width
                flat = np.frombuffer(array.buffers()[1], np.uint8)
                values = flat[: len(array) * width].reshape(-1, width)
            else:
                values = array.to_numpy(zero_copy_only=True)
            self._columns[name, batch] = values
        return self._columns[name, batch]

    def _empty(self, name: str) -> npt.NDArray[Any]:
        kind = self._reader.schema.field(name).type
        if pa.types.is_fixed_size_binary(kind):
            return np.empty((0, kind.byte_width), np.uint8)
        return np.empty(0, kind.to_pandas_dtype())


def _local_copy(location: Location, digest: str) -> Path:
    """The path of a table; one from an object store is fetched once per machine and user."""
    if location.is_local:
        return location.local_path
    folder = Path(tempfile.gettempdir()) / f"dp-pretrain-index-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise StorageFault(f"{folder} belongs to another user")
    path = folder / f"{digest}.arrow"
    if not path.exists():
        temporary = folder / f".{uuid.uuid4().hex}"
        filesystem, remote = location.filesystem()
        try:
            with filesystem.open_input_stream(remote, compression=None) as stream:
                with open(temporary, "wb") as copy:
                    while part := stream.read(8 * 2**20):
                        copy.write(part)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StorageFault("the index cannot be fetched from storage", str(error)) from None
        os.replace(temporary, path)
    return path
