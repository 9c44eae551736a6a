"""An Arrow table mapped into memory, read by row number; of an object store one copy a machine."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.data.shards.faults import StorageFault
from pipeline.data.shards.reads import Attempt, ReadThreads, pauses, remote_filesystem
from pipeline.data.shards.writing import ROWS_PER_BATCH
from pipeline.storage import Location

MAX_VERIFIED_INDEX_BYTES = 64 * 2**20
COPY_PART_BYTES = 16 * 2**20
NUM_PARTS_AT_ONCE = 8
COPY_TIMEOUT_SECONDS = 120.0


class MappedTable:
    """An Arrow file in shared memory, of which single rows are read without touching others.

    Args:
        path: the local file.
        digest: its SHA-256, compared up to MAX_VERIFIED_INDEX_BYTES and where `verify` says so.
        num_rows: rows it must have, in batches of ROWS_PER_BATCH.

    Guarantees:
        1. Beside the mapped pages, which all processes of a machine share, it keeps 8 bytes per
           column and batch of 65,536 rows (test_stream_benchmark).
    """

    def __init__(self, path: Path, digest: str, num_rows: int, *, verify: bool = False) -> None:
        try:
            if verify or path.stat().st_size <= MAX_VERIFIED_INDEX_BYTES:
                with open(path, "rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                        raise StorageFault(
                            f"{path.name} differs from the digest in the manifest; restore it from"
                            " a copy, or prepare the dataset again"
                        )
            file = pa.memory_map(str(path))
            self._content = file.read_buffer()
            self._reader = pa.ipc.open_file(file)
        except (OSError, pa.ArrowException) as error:
            raise StorageFault(f"{path.name} cannot be read", str(error)) from None
        if self._reader.num_record_batches != -(-num_rows // ROWS_PER_BATCH):
            raise StorageFault(f"{path.name} does not have the manifest's number of records")
        self._starts: dict[str, npt.NDArray[np.int64]] = {}

    def take(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The column's values at some rows: [n], or uint8 [n, width] for fixed-size binary."""
        kind = self._reader.schema.field(name).type
        width = kind.bit_width // 8
        batches = rows // ROWS_PER_BATCH
        places = self._starts_of(name, batches) + (rows - batches * ROWS_PER_BATCH) * width
        word = np.uint64 if width % 8 == 0 else np.uint32  # Arrow aligns every buffer to 8 bytes
        size = word().itemsize
        words = np.frombuffer(self._content, word, len(self._content) // size)
        values = words[places[:, None] // size + np.arange(width // size)]
        if pa.types.is_fixed_size_binary(kind):
            return values.view(np.uint8).reshape(len(rows), width)
        return values[:, 0].view(kind.to_pandas_dtype())

    def _starts_of(self, name: str, batches: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where in the file the column of each batch begins, looked up once a batch."""
        if name not in self._starts:
            self._starts[name] = np.full(self._reader.num_record_batches, -1, np.int64)
        starts = self._starts[name]
        column = self._reader.schema.get_field_index(name)
        for batch in np.unique(batches[starts[batches] < 0]).tolist():
            values = self._reader.get_batch(batch).column(column).buffers()[1]
            starts[batch] = values.address - self._content.address
        return starts[batches]


def local_copy(location: Location, digest: str) -> Path:
    """The path of a table; one from an object store is fetched once per machine and user.

    The first process fetches it under a lock while the others wait, compares it with its digest and
    gives it its name; a half-fetched one of a killed process is begun anew.

    Raises:
        StorageFault: it cannot be fetched, or is not the manifest's.
    """
    if location.is_local:
        return location.local_path
    folder = Path(tempfile.gettempdir()) / f"dp-pretrain-index-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise StorageFault(f"{folder} belongs to another user")
    path = folder / f"{digest}.arrow"
    if path.exists():
        return path
    with open(folder / f"{digest}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = folder / f"{digest}.part"
            fault = StorageFault("")
            for pause in pauses(is_local=False):
                pause()
                try:
                    found = _fetch(location, part)
                except (OSError, pa.ArrowException) as error:
                    fault = StorageFault("the index cannot be fetched from storage", str(error))
                    continue
                if found == digest:
                    os.replace(part, path)
                    return path
                fault = StorageFault(
                    f"{location.name} differs from the digest in the manifest; restore it from a"
                    " copy, or prepare the dataset again"
                )
            part.unlink(missing_ok=True)
            raise fault
    return path


def _fetch(location: Location, target: Path) -> str:
    """Copy a file by parts, several at once; returns its SHA-256."""
    filesystem, path = remote_filesystem(location)
    file = filesystem.open_input_file(path)
    size, threads = file.size(), ReadThreads(NUM_PARTS_AT_ONCE)
    starts = deque(range(0, size, COPY_PART_BYTES))
    waiting: deque[Attempt[bytes]] = deque()
    digest = hashlib.sha256()
    with open(target, "wb") as copy:
        while starts or waiting:
            while starts and len(waiting) < NUM_PARTS_AT_ONCE:
                start = starts.popleft()
                num_bytes = min(COPY_PART_BYTES, size - start)
                waiting.append(threads.submit(functools.partial(file.read_at, num_bytes, start)))
            part = waiting.popleft().result(COPY_TIMEOUT_SECONDS)
            digest.update(part)
            copy.write(part)
        copy.flush()
        os.fsync(copy.fileno())
    return digest.hexdigest()
