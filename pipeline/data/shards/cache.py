"""RecordCache: recently read records on a local disk, shared by the processes of a machine.

Two files per dataset. The *ring* holds records one after the other and begins again at its end, so
it never grows. The *table* holds 8 bytes a record: its place in the endless sequence of writes,
from which follow its offset in the ring and whether it has been written over since. Nothing in
them is believed: a reader compares what it finds with the index digest, and whatever a crash, a
full disk or a rival writer left behind is a miss.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_HEADER_BYTES = 4096
_LEAST_RING_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """Where records are kept on this machine's own disk, and how many bytes at most.

    Args:
        folder: made if it is not there, readable by its owner only. What is kept there tells which
            records were read, so it is as private as they are.
        num_bytes: of all its files together.
    """

    folder: str
    num_bytes: int

    def __post_init__(self) -> None:
        if self.num_bytes < _LEAST_RING_BYTES:
            raise ValueError(
                f"cache_bytes is {self.num_bytes}: it must be at least {_LEAST_RING_BYTES}, or"
                " leave cache_dir out"
            )


class RecordCache:
    """Record id -> stored bytes, perhaps; the oldest make room for the newest.

    A hit that is soon to be written over is written anew, so that what is read often stays.

    Args:
        settings: where and how much.
        manifest_digest: the dataset's; another one's files are deleted, unless a process uses them.
        num_records: N.

    Raises:
        OSError: the folder cannot be used.
        ValueError: there is no room for a table of N records.

    Guarantees:
        1. Its files never take more than `num_bytes` (test_cache_keeps_its_limit).
        2. Several processes may use it, and any may be killed (test_cache_survives_kills).
        3. It never fails a read: an error in it is a miss (test_cache_that_breaks_is_no_cache).
    """

    def __init__(self, settings: CacheSettings, manifest_digest: str, num_records: int) -> None:
        folder = Path(settings.folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        table_bytes = _HEADER_BYTES + 8 * num_records
        name = manifest_digest[:32]
        self._lock = threading.Lock()
        with open(folder / "lock", "w") as housekeeping:
            fcntl.flock(housekeeping, fcntl.LOCK_EX)
            room = settings.num_bytes - _free_what_is_unused(folder, name)
            self._use = _owned(folder / f"{name}.use")
            is_alone = _try_lock(self._use)
            ring, table = folder / f"{name}.ring", folder / f"{name}.table"
            ring_bytes = ring.stat().st_size if ring.exists() and table.exists() else 0
            if is_alone and ring_bytes + table_bytes != room:
                ring_bytes = room - table_bytes
                if ring_bytes < _LEAST_RING_BYTES:
                    raise ValueError(
                        f"cache_bytes={settings.num_bytes} leaves {max(room, 0)} bytes in {folder}:"
                        f" {num_records} records need {table_bytes + _LEAST_RING_BYTES} or more;"
                        " raise it, or leave cache_dir out"
                    )
                table.unlink(missing_ok=True)
                _make(ring, ring_bytes, is_reserved=False)
                _make(table, table_bytes, is_reserved=True)
            self._num_bytes = ring_bytes
            self._ring = _owned(ring)
            self._table = np.memmap(table, np.int64, "r+", _HEADER_BYTES, (num_records,))
            self._head = np.memmap(table, np.int64, "r+", 0, (1,))
            self._writing = _owned(folder / f"{name}.writing")
            fcntl.flock(self._use, fcntl.LOCK_SH)

    def places(self, record_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each record may be: int64 [n], -1 where it is not."""
        places = self._table[record_ids] - 1
        return np.where(places >= max(0, int(self._head[0]) - self._num_bytes), places, -1)

    def read(self, place: int, num_bytes: int) -> bytes:
        """What lies at a place now: the record, unless its digest differs."""
        try:
            return os.pread(self._ring, num_bytes, place % self._num_bytes)
        except OSError:
            return b""

    def is_old(self, place: int) -> bool:
        """Whether it is among the next quarter to be written over."""
        return int(self._head[0]) - place > self._num_bytes * 3 // 4

    def keep(self, record_ids: Sequence[int], contents: Sequence[bytes]) -> None:
        """Write records over the oldest ones."""
        lengths = np.array([len(content) for content in contents], np.int64)
        total = int(lengths.sum())
        if not total or total > self._num_bytes // 4:
            return
        with contextlib.suppress(OSError):
            place = self._reserve(total)
            os.pwrite(self._ring, b"".join(contents), place % self._num_bytes)
            self._table[np.asarray(record_ids, np.int64)] = place + np.cumsum(lengths) - lengths + 1

    def _reserve(self, num_bytes: int) -> int:
        """The next so many bytes of the ring in one piece; what lay there is no longer found."""
        with self._lock:
            fcntl.flock(self._writing, fcntl.LOCK_EX)
            try:
                head = int(self._head[0])
                until_end = self._num_bytes - head % self._num_bytes
                if num_bytes > until_end:
                    head += until_end
                self._head[0] = head + num_bytes
            finally:
                fcntl.flock(self._writing, fcntl.LOCK_UN)
        return head

    def __del__(self) -> None:
        for name in ("_use", "_ring", "_writing"):
            if name in self.__dict__:
                os.close(self.__dict__[name])


def _owned(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _make(path: Path, num_bytes: int, *, is_reserved: bool) -> None:
    """A new file of zeros; a mapped one gets its blocks now: a full disk must not kill later."""
    path.unlink(missing_ok=True)
    descriptor = _owned(path)
    try:
        if is_reserved:
            os.posix_fallocate(descriptor, 0, num_bytes)
        else:
            os.ftruncate(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _free_what_is_unused(folder: Path, own: str) -> int:
    """Delete other datasets' files that nobody uses; returns the bytes of those in use."""
    num_used = 0
    for use in folder.glob("*.use"):
        if use.stem == own:
            continue
        descriptor = _owned(use)
        try:
            is_unused = _try_lock(descriptor)
            for ending in (".ring", ".table", ".writing", ".use"):
                file = use.with_suffix(ending)
                if is_unused:
                    file.unlink(missing_ok=True)
                elif file.exists():
                    num_used += file.stat().st_size
        finally:
            os.close(descriptor)
    return num_used
