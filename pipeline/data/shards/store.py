"""ShardStore: record id -> stored bytes, by byte range, from a local disk or an object store."""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import fs

from pipeline.data.manifest import DatasetManifest
from pipeline.data.shards.cache import CacheSettings, RecordCache
from pipeline.data.shards.faults import StorageFault
from pipeline.data.shards.index import MappedTable, local_copy
from pipeline.data.shards.reads import (
    NUM_REMOTE_READS,
    READ_TIMEOUT_SECONDS,
    LocalShard,
    RangeReader,
    ReadThreads,
    pauses,
    remote_filesystem,
)
from pipeline.data.shards.writing import (
    INDEX_NAME,
    INDEX_SCHEMA,
    SOURCES_NAME,
    shard_name,
    stored_digest,
)
from pipeline.storage import Location

MAX_CHECKED_BYTES = 2 * 2**30
SHARDS_PER_LISTING = 1_000
MAX_OPEN_LOCAL_SHARDS = 256
MAX_OPEN_REMOTE_SHARDS = 8_192
MAX_JOINED_BYTES = 8 * 2**20
MAX_WASTE = 1.05

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rows:
    """Index rows of some records, one array entry each."""

    shard: npt.NDArray[np.uint32]
    length: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.uint64]
    label: npt.NDArray[np.int32]
    digest: npt.NDArray[np.uint8]  # [n, 16]


@dataclass(frozen=True)
class _Facts:
    """What a reader needs of a manifest at all times, without a line a shard."""

    digest: str
    num_records: int
    index_digest: str
    sources_digest: str | None
    names: tuple[str, ...] | None
    """Of the shards, where they are not those that `prepare` gives."""

    @classmethod
    def of(cls, manifest: DatasetManifest) -> _Facts:
        names = tuple(shard.name for shard in manifest.shards)
        is_usual = all(name == shard_name(number) for number, name in enumerate(names))
        return cls(
            digest=manifest.digest(),
            num_records=manifest.num_records,
            index_digest=manifest.index_digest,
            sources_digest=manifest.sources_digest,
            names=None if is_usual else names,
        )

    def name_of_shard(self, number: int) -> str:
        return shard_name(number) if self.names is None else self.names[number]


class ShardStore:
    """Random access to a prepared dataset.

    Cheap to make and to pickle: nothing is opened before the first use, and a copy in another
    process opens its own. Safe to use from several threads.

    Args:
        root: the dataset's folder.
        retry_delays_seconds: pauses before each further try of a failed read, each made a little
            longer or shorter at random; None = short ones for a local disk, half a minute in all
            for an object store.
        timeout_seconds: a read of an object store that takes longer has failed.
        cache: where to keep what was read on this machine; None = nowhere.

    Guarantees:
        1. Every returned record is the bytes that the index names, by digest, or StorageFault,
           whatever storage and cache do (test_storage_faults).
        2. A StorageFault's message names no record, shard or key; its private detail names shard
           and record (test_storage_faults).
        3. Results come in the order of the ids asked for, repeated ids included (test_shards).
        4. At most 5 % more bytes are read than asked for (test_shards).
    """

    def __init__(
        self,
        root: Location | str,
        *,
        retry_delays_seconds: Sequence[float] | None = None,
        timeout_seconds: float = READ_TIMEOUT_SECONDS,
        cache: CacheSettings | None = None,
    ) -> None:
        self.root = root if isinstance(root, Location) else Location(root)
        self.retry_delays_seconds = retry_delays_seconds and tuple(retry_delays_seconds)
        self.timeout_seconds = timeout_seconds
        self.cache_settings = cache
        self._open_state()

    def _open_state(self) -> None:
        self._lock = threading.RLock()
        self._manifest: weakref.ref[DatasetManifest] | None = None
        self._known: _Facts | None = None
        self._tables: dict[str, MappedTable] = {}
        self._shards: OrderedDict[int, RangeReader] = OrderedDict()
        self._threads: ReadThreads | None = None
        self._filesystem: tuple[fs.FileSystem, str] | None = None
        self._cache: RecordCache | None = None
        self._has_tried_cache = False

    def __getstate__(self) -> dict[str, Any]:
        names = ("root", "retry_delays_seconds", "timeout_seconds", "cache_settings")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open_state()

    def __len__(self) -> int:
        return self.num_records

    @property
    def manifest(self) -> DatasetManifest:
        """The dataset's manifest, kept while somebody holds it: it names every shard.

        Raises:
            ValueError: the folder is not a finished dataset.
            StorageFault: it is another dataset than when this store was opened.
        """
        with self._lock:
            manifest = self._manifest() if self._manifest is not None else None
            if manifest is None:
                manifest = DatasetManifest.load(self.root)
                facts = _Facts.of(manifest)
                if self._known not in (None, facts):
                    raise StorageFault(
                        f"{self.root} was prepared anew since it was opened: start again"
                    )
                self._known, self._manifest = facts, weakref.ref(manifest)
            return manifest

    @property
    def _facts(self) -> _Facts:
        if self._known is None:
            _ = self.manifest
        assert self._known is not None
        return self._known

    @property
    def num_records(self) -> int:
        """N: record ids are 0 … N-1."""
        return self._facts.num_records

    def labels(self, record_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The records' labels, int64 [n]; -1 where there is none."""
        ids = self._checked(np.asarray(record_ids, np.int64))
        table = self._table(INDEX_NAME, self._facts.index_digest)
        return table.take("label", ids).astype(np.int64)

    def shards_of(self, record_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The number of the shard that holds each record, int64 [n]."""
        ids = self._checked(np.asarray(record_ids, np.int64))
        return self._table(INDEX_NAME, self._facts.index_digest).take("shard", ids).astype(np.int64)

    def pixel_digests(self, record_ids: npt.ArrayLike | None = None) -> npt.NDArray[np.uint8]:
        """SHA-256 of the decoded pixels before resizing, uint8 [n, 32]; of all records if None."""
        return self._source_column("pixel_digest", record_ids)

    def source_digests(self, record_ids: npt.ArrayLike | None = None) -> npt.NDArray[np.uint8]:
        """SHA-256 of the original bytes, uint8 [n, 32]; of all records if None."""
        return self._source_column("source_digest", record_ids)

    def _source_column(self, name: str, ids: npt.ArrayLike | None) -> npt.NDArray[np.uint8]:
        digest = self._facts.sources_digest
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
        return self.begin(record_ids).result()

    def begin(self, record_ids: npt.ArrayLike) -> PendingRead:
        """Begin to `read`; of an object store the requests are under way when this returns."""
        ids = np.asarray(record_ids, np.int64)
        return PendingRead(self, ids, self._rows(ids))

    def groups(
        self, rows: Rows, positions: npt.NDArray[np.int64]
    ) -> Iterator[npt.NDArray[np.int64]]:
        """Positions to be read by one request each, in the order of shards and offsets.

        Of an object store: neighbours, where that wastes under 5 %. A local read costs a
        microsecond, so a group is all of a shard and its records are read one by one.
        """
        order = positions[np.lexsort((rows.offset[positions], rows.shard[positions]))]
        if self.root.is_local:
            boundaries = np.flatnonzero(np.diff(rows.shard[order].astype(np.int64))) + 1
            yield from (group for group in np.split(order, boundaries) if len(group))
            return
        group: list[int] = []
        useful = end = start = shard = 0
        columns = (rows.shard[order], rows.offset[order], rows.length[order])
        for position, of_shard, offset, length in zip(
            order.tolist(), *(column.tolist() for column in columns), strict=True
        ):
            is_near = (
                bool(group)
                and of_shard == shard
                and max(end, offset + length) - start <= MAX_WASTE * (useful + length)
                and useful < MAX_JOINED_BYTES
            )
            if group and not is_near:
                yield np.array(group)
            if not is_near:
                group, useful, start, end, shard = [], 0, offset, offset, of_shard
            group.append(position)
            useful += length if offset >= end else 0
            end = max(end, offset + length)
        if group:
            yield np.array(group)

    def start(self, rows: Rows, group: npt.NDArray[np.int64]) -> Callable[[], list[bytes]]:
        """Begin one try of reading a group; the call that is returned ends it, or raises OSError.

        Of a local disk it reads only then.
        """
        shard = int(rows.shard[group[0]])
        offsets, lengths = rows.offset[group].tolist(), rows.length[group].tolist()
        if self.root.is_local:
            return lambda: [
                self._shard(shard).read_at(length, offset)
                for length, offset in zip(lengths, offsets, strict=True)
            ]
        base = min(offsets)
        end = max(offset + length for offset, length in zip(offsets, lengths, strict=True))
        with self._lock:
            if self._threads is None:
                self._threads = ReadThreads(NUM_REMOTE_READS)
        attempt = self._threads.submit(lambda: self._shard(shard).read_at(end - base, base))

        def finish() -> list[bytes]:
            whole = memoryview(attempt.result(self.timeout_seconds))
            return [
                bytes(whole[offset - base : offset - base + length])
                for offset, length in zip(offsets, lengths, strict=True)
            ]

        return finish

    def _shard(self, number: int) -> RangeReader:
        with self._lock:
            if number in self._shards:
                self._shards.move_to_end(number)
                return self._shards[number]
        name, is_local = self.name_of_shard(number), self.root.is_local
        reader: RangeReader
        if is_local:
            reader = LocalShard(str(self.root.local_path / name))
        else:
            filesystem, path = self._remote()
            reader = filesystem.open_input_file(f"{path}/{name}")
        with self._lock:
            self._shards[number] = reader
            while len(self._shards) > (
                MAX_OPEN_LOCAL_SHARDS if is_local else MAX_OPEN_REMOTE_SHARDS
            ):
                self._shards.popitem(last=False)
        return reader

    def name_of_shard(self, number: int) -> str:
        """The file name of a shard."""
        return self._facts.name_of_shard(number)

    def _remote(self) -> tuple[fs.FileSystem, str]:
        with self._lock:
            if self._filesystem is None:
                self._filesystem = remote_filesystem(self.root)
            return self._filesystem

    def forget_shard(self, number: int) -> None:
        """Open a shard anew at the next read."""
        with self._lock:
            self._shards.pop(number, None)

    @property
    def cache(self) -> RecordCache | None:
        """The records kept on this machine; None where that was not asked for or is not possible.

        Raises:
            ValueError: its limit is too small for this dataset.
        """
        with self._lock:
            if self.cache_settings is not None and not self._has_tried_cache:
                self._has_tried_cache = True
                digest = self._facts.digest
                try:
                    self._cache = RecordCache(self.cache_settings, digest, self.num_records)
                except OSError as error:
                    _log.warning("cache_dir cannot be used (%s): reading without", error.strerror)
            return self._cache

    def _rows(self, record_ids: npt.NDArray[np.int64]) -> Rows:
        ids = self._checked(record_ids)
        table = self._table(INDEX_NAME, self._facts.index_digest)
        return Rows(*(table.take(name, ids) for name in INDEX_SCHEMA.names))

    def _checked(self, record_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if record_ids.size and not (record_ids.min() >= 0 and record_ids.max() < self.num_records):
            raise ValueError(
                f"a record id lies outside [0, {self.num_records}): the plan and the"
                " dataset disagree on the number of records"
            )
        return record_ids

    def _table(self, name: str, digest: str, *, verify: bool = False) -> MappedTable:
        with self._lock:
            if verify or name not in self._tables:
                path = local_copy(self.root / name, digest)
                is_checked = verify and self.root.is_local  # a copy was checked when it was made
                self._tables[name] = MappedTable(path, digest, self.num_records, verify=is_checked)
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
            self._table(INDEX_NAME, self._facts.index_digest, verify=True)
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


class PendingRead:
    """Records on their way; `result` waits for them, tries again what failed, and checks all."""

    def __init__(self, store: ShardStore, ids: npt.NDArray[np.int64], rows: Rows) -> None:
        self._store, self._ids, self._rows = store, ids, rows
        self._places = store.cache.places(ids) if store.cache is not None else np.full(len(ids), -1)
        self._contents = [b""] * len(ids)
        self._groups = list(store.groups(rows, np.flatnonzero(self._places < 0)))
        self._begun = [store.start(rows, group) for group in self._groups]

    def result(self) -> list[bytes]:
        """The stored bytes of each record. Raises StorageFault."""
        store = self._store
        missed = self._from_cache()
        late = list(store.groups(self._rows, missed)) if len(missed) else []
        groups, begun = self._groups + late, self._begun
        begun += [store.start(self._rows, group) for group in late]
        detail = ""
        for pause in pauses(
            is_local=store.root.is_local, delays_seconds=store.retry_delays_seconds
        ):
            pause()
            if not begun:
                begun = [store.start(self._rows, group) for group in groups]
            failed = []
            for group, finish in zip(groups, begun, strict=True):
                try:
                    wrong = self._take(group, finish())
                    reason = "differs from the digest in the index"
                except (OSError, pa.ArrowException) as error:
                    wrong, reason = group, f"{type(error).__name__}: {error}"
                if len(wrong):
                    failed.append(wrong)
                    detail = self._detail(wrong, reason)
                    store.forget_shard(int(self._rows.shard[group[0]]))
            groups, begun = failed, []
            if not groups:
                return self._contents
        raise StorageFault(
            "storage did not return the bytes that the index names, after several tries; the"
            " private log says which. Restore the shard from a copy, or prepare the dataset again",
            detail,
        ) from None

    def _take(self, group: npt.NDArray[np.int64], got: list[bytes]) -> npt.NDArray[np.int64]:
        """Accept what is right, keep it in the cache; returns the positions of what is not."""
        right = [
            position
            for position, content in zip(group.tolist(), got, strict=True)
            if self._accept(position, content)
        ]
        if right and self._store.cache is not None:
            contents = [self._contents[position] for position in right]
            self._store.cache.keep(self._ids[right].tolist(), contents)
        return np.setdiff1d(group, right)

    def _accept(self, position: int, content: bytes) -> bool:
        is_right = stored_digest(content) == self._rows.digest[position].tobytes()
        if is_right:
            self._contents[position] = content
        return is_right

    def _from_cache(self) -> npt.NDArray[np.int64]:
        """Take what the cache has; returns the positions of what it no longer has."""
        cache, missed = self._store.cache, []
        for position in np.flatnonzero(self._places >= 0).tolist():
            assert cache is not None
            place = int(self._places[position])
            content = cache.read(place, int(self._rows.length[position]))
            if not self._accept(position, content):
                missed.append(position)
            elif cache.is_old(place):
                cache.keep([int(self._ids[position])], [content])
        return np.array(missed, np.int64)

    def _detail(self, positions: npt.NDArray[np.int64], reason: str) -> str:
        """For the private log: which shard and records."""
        shard = self._store.name_of_shard(int(self._rows.shard[positions[0]]))
        records = ", ".join(map(str, self._ids[positions[:10]].tolist()))
        more = f" and {len(positions) - 10} more" if len(positions) > 10 else ""
        return f"shard {shard}, records {records}{more}: {reason}"
