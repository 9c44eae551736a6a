"""Prepare: any source -> checked, de-duplicated, resized shards with an index and a manifest.

Decides once, before any training, which records exist. Three passes:

1. every source unit is read, decoded, digested, resized and written as a *part* (parallel;
   a finished part is kept when the job is run again);
2. the digests of all parts decide which records stay and in which split (one reader);
3. the parts are copied into numbered shards (parallel), then index and manifest are written.

Passes 1 and 3 run on a thread pool or as Ray Data tasks; both give the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.data.images import (
    ImageError,
    canonical_pixels,
    decode_image,
    encode_jpeg,
    resize_short_side,
)
from pipeline.data.manifest import DatasetManifest, Shard
from pipeline.data.shards import (
    INDEX_NAME,
    INDEX_SCHEMA,
    SOURCES_NAME,
    SOURCES_SCHEMA,
    ShardStore,
    StorageFault,
    TableWriter,
    build_shard,
    shard_name,
    stored_digest,
)
from pipeline.data.sources import RawRecord, Source, SourceUnit, open_source
from pipeline.storage import Location

PARTS = "_parts"
SUMMARY_NAME = "prepare_summary.json"
CREATED_WITH = "dp-pretrain 0.1.0"
PART_CHUNK_BYTES = 32 * 2**20
DIGESTS_PER_BUCKET = 16_000_000
REMOVED = -1

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to prepare and by which rules; all of it is public.

    Args:
        name: the dataset's name in recipes and reports.
        source: a source URI, see `sources.open_source`.
        visibility: whether the images may be shown and scored freely.
        domain, ledger_home: of a private dataset, the privacy domain that pays and where its
            ledger lives.
        origin: where the images come from, for the statement.
        image_short_side: longer images are shrunk to this short side; smaller ones stay.
        jpeg_quality: of the stored images.
        deduplicate: "exact" merges records with equal decoded pixels. The first in source order
            survives; where labels differ, the survivor has none.
        exclude: folders of prepared datasets whose pictures are removed from this one.
        other_private: folders of prepared private datasets; if an original file of one of them
            occurs here under another domain, prepare refuses (the same picture would be paid for
            in two ledgers).
        class_names: the class list, where the source does not state one; labels outside it are
            dropped.
        splits: name -> share, adding up to 1; each becomes a dataset of its own.
        split_salt: public text; a record's split is decided by SHA-256(salt, pixel digest).
        records_per_shard: size of a tar.
    """

    name: str
    source: str
    visibility: Literal["public", "private"]
    domain: str | None = None
    ledger_home: str | None = None
    origin: str = ""
    image_short_side: int = 256
    jpeg_quality: int = 95
    deduplicate: Literal["exact", "none"] = "exact"
    exclude: tuple[str, ...] = ()
    other_private: tuple[str, ...] = ()
    class_names: tuple[str, ...] | None = None
    splits: dict[str, float] | None = None
    split_salt: str = "dp-pretrain"
    records_per_shard: int = 8_192

    def __post_init__(self) -> None:
        def refuse(name: str, allowed: str) -> None:
            raise ValueError(f"{name}={getattr(self, name)!r} of dataset {self.name!r}: {allowed}")

        if self.visibility not in ("public", "private"):
            refuse("visibility", "must be public or private")
        if self.visibility == "private" and not self.domain:
            refuse("domain", "a private dataset must name the privacy domain that pays for it")
        if self.visibility == "public" and (self.domain or self.ledger_home):
            refuse("domain", "a public dataset has no privacy domain; leave domain and ledger out")
        if not 8 <= self.image_short_side <= 8192:
            refuse("image_short_side", "must lie between 8 and 8192 pixels")
        if not 1 <= self.jpeg_quality <= 100:
            refuse("jpeg_quality", "must lie between 1 and 100")
        if self.deduplicate not in ("exact", "none"):
            refuse("deduplicate", "must be exact or none")
        if self.records_per_shard < 1:
            refuse("records_per_shard", "must be at least 1")
        if self.splits is not None:
            is_named = all(name and "/" not in name and name[0] not in "._" for name in self.splits)
            shares = list(self.splits.values())
            if not is_named or any(s <= 0 for s in shares) or abs(sum(shares) - 1) > 1e-9:
                refuse("splits", "must map plain names to positive shares that add up to 1")

    def digest(self) -> str:
        """SHA-256 (hex) of everything that decides the output bytes."""
        text = json.dumps({**asdict(self), "format": 1}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class PrepareProgress:
    """How far prepare has come; of a private source, for the operator's eyes only."""

    stage: Literal["reading", "writing"]
    num_done: int
    num_units: int
    num_records: int
    num_left_out: int


Progress = Callable[[PrepareProgress], None]


def prepare(
    config: PrepareConfig,
    destination: Location,
    progress: Progress | None = None,
    *,
    executor: Literal["threads", "ray"] = "threads",
    num_workers: int | None = None,
) -> dict[str, DatasetManifest]:
    """Make the dataset that a config describes; return at once if it is already there.

    Args:
        config: what to prepare.
        destination: its folder; with splits, the folder that holds one folder per split.
        progress: called after each unit.
        executor: "threads" in this process, or "ray" for Ray Data tasks (needs an initialised
            Ray). The output bytes are the same.
        num_workers: number of threads; None = one per CPU. Ray decides for itself.

    Returns:
        The manifests, by split name; by "" where there are no splits.

    Raises:
        ValueError: the source is empty or missing; another dataset lies at the destination; a
            public dataset would be cleaned by looking at a private one; an original file belongs
            to another privacy domain; nothing is left.
        StorageFault: storage cannot be read or written.

    Guarantees:
        1. Content never stops it: every record left out is counted by reason
           (test_undecodable_records).
        2. A public dataset is the same whatever private sets exist (test_overlap).
        3. Interrupted and run again, or with another executor or number of workers, it gives the
           same bytes (test_prepare, test_prepare_ray).
    """
    roots = {name: destination / name for name in config.splits} if config.splits else {}
    roots = roots or {"": destination}
    if all(DatasetManifest.exists(root) for root in roots.values()):
        return {name: _existing(config, root) for name, root in roots.items()}
    for root in roots.values():
        if DatasetManifest.exists(root):
            _existing(config, root)
    excluded, foreign = _foreign_digests(config)
    source = open_source(config.source)
    units = source.list_units()
    run: Callable[..., Any] = _run_with_ray if executor == "ray" else _run_with_threads
    num_threads = num_workers or os.cpu_count() or 1
    try:
        parts = _read_all(config, destination, source, units, run, num_threads, progress)
        summary = _select(config, destination, parts, excluded, foreign, list(roots))
        if not all(summary.num_records.values()):
            empty = [name or config.name for name, num in summary.num_records.items() if not num]
            raise ValueError(
                f"source={config.source}: no record is left for {', '.join(empty)};"
                f" left out: {dict(summary.left_out)}; check the source (see {SUMMARY_NAME})"
            )
        manifests = {
            name: _write_dataset(
                config, destination, root, source, parts, split, summary, run, num_threads, progress
            )
            for split, (name, root) in enumerate(roots.items())
        }
    except OSError as error:
        raise StorageFault(
            f"prepare cannot read or write its working files at {destination}"
            f" ({type(error).__name__}); check that it may be written and has room",
            str(error),
        ) from None
    # Manifests last, all together: until then none of the datasets exists.
    for name, manifest in manifests.items():
        manifest.save(roots[name])
    (destination / PARTS).delete()
    return manifests


def _existing(config: PrepareConfig, root: Location) -> DatasetManifest:
    manifest = DatasetManifest.load(root)
    if manifest.config_digest != config.digest():
        raise ValueError(
            f"{root} already holds dataset {manifest.name!r}, prepared from {manifest.source} by"
            " other settings; choose another destination, or delete that folder"
        )
    return manifest


def _foreign_digests(config: PrepareConfig) -> tuple[set[bytes], dict[bytes, str]]:
    """Pixel digests to leave out, and original-byte digests that belong to another domain."""
    excluded: set[bytes] = set()
    for uri in config.exclude:
        store = ShardStore(uri)
        if config.visibility == "public" and store.manifest.is_private:
            raise ValueError(
                f"exclude={uri} of public dataset {config.name!r} is private: a public set must"
                " not be chosen by looking at a private one; put the public dataset into the"
                " private one's exclude instead"
            )
        excluded.update(digest.tobytes() for digest in store.pixel_digests())
    foreign: dict[bytes, str] = {}
    for uri in config.other_private if config.visibility == "private" else ():
        store = ShardStore(uri)
        if store.manifest.is_private and store.manifest.domain != config.domain:
            domain = store.manifest.domain or ""
            foreign.update((digest.tobytes(), domain) for digest in store.source_digests())
    return excluded, foreign


# ------------------------------------------------------------------------ pass 1: units -> parts


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What is known of a finished part without opening it."""

    unit: int
    num_records: int
    left_out: dict[str, int]


def _read_all(
    config: PrepareConfig,
    destination: Location,
    source: Source,
    units: Sequence[SourceUnit],
    run: Callable[..., Iterator[_Part]],
    num_threads: int,
    progress: Progress | None,
) -> list[_Part]:
    parts: list[_Part] = []
    num_records = num_left_out = 0
    task = _ReadUnit(config=config, destination=destination, source=source)
    for part in run(task, units, num_threads):
        parts.append(part)
        num_records += part.num_records
        num_left_out += sum(part.left_out.values())
        if progress is not None:
            progress(
                PrepareProgress(
                    stage="reading",
                    num_done=len(parts),
                    num_units=len(units),
                    num_records=num_records,
                    num_left_out=num_left_out,
                )
            )
    return parts


@dataclass(frozen=True, kw_only=True)
class _ReadUnit:
    """The task of pass 1."""

    config: PrepareConfig
    destination: Location
    source: Source

    def __call__(self, unit: SourceUnit) -> _Part:
        folder = self.destination / PARTS
        fingerprint = hashlib.sha256((self.config.digest() + unit.fingerprint()).encode())
        stamp = fingerprint.hexdigest()
        meta_file = folder / f"{unit.index:07d}.json"
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            meta = json.loads(meta_file.read_text())
            if meta["stamp"] == stamp:
                return _Part(
                    unit=unit.index, num_records=meta["num_records"], left_out=meta["left_out"]
                )
        writer = _PartWriter(folder, unit.index)
        left_out: Counter[str] = Counter()
        for record in self.source.read_unit(unit):
            try:
                writer.add(*self._convert(record))
            except ImageError as error:
                left_out[error.reason] += 1
        num_records = writer.close()
        meta = {"stamp": stamp, "num_records": num_records, "left_out": dict(left_out)}
        meta_file.write_text(json.dumps(meta, sort_keys=True))
        return _Part(unit=unit.index, num_records=num_records, left_out=dict(left_out))

    def _convert(self, record: RawRecord) -> tuple[RawRecord, bytes, bytes, bytes]:
        """(record, original digest, pixel digest, stored bytes). Raises ImageError."""
        if record.content is None:
            raise ImageError(record.error or "unreadable_file")
        if isinstance(record.content, bytes):
            pixels = decode_image(record.content).pixels
            original = hashlib.sha256(record.content).digest()
        else:
            pixels = canonical_pixels(record.content)
            original = hashlib.sha256(np.ascontiguousarray(record.content)).digest()
        digest = hashlib.sha256(b"pixels %d %d %d\n" % pixels.shape)
        digest.update(pixels)
        resized = resize_short_side(pixels, self.config.image_short_side)
        stored = encode_jpeg(resized, self.config.jpeg_quality)
        return record, original, digest.digest(), stored


class _PartWriter:
    """Collects a unit's records; writes bytes in bounded chunks, then their table."""

    def __init__(self, folder: Location, unit: int) -> None:
        self.folder, self.unit = folder, unit
        self.columns: dict[str, list[Any]] = {name: [] for name in _PART_SCHEMA.names}
        self.chunk: list[bytes] = []
        self.chunk_bytes = self.num_chunks = 0

    def add(self, record: RawRecord, original: bytes, pixels: bytes, stored: bytes) -> None:
        label = record.label
        row = (
            original,
            pixels,
            record.key,
            -1 if label is None or not 0 <= label < 2**31 else label,
            self.num_chunks,
            self.chunk_bytes,
            len(stored),
        )
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)
        self.chunk.append(stored)
        self.chunk_bytes += len(stored)
        if self.chunk_bytes >= PART_CHUNK_BYTES:
            self._flush()

    def _flush(self) -> None:
        _chunk_file(self.folder, self.unit, self.num_chunks).write_bytes(b"".join(self.chunk))
        self.chunk, self.chunk_bytes = [], 0
        self.num_chunks += 1

    def close(self) -> int:
        if self.chunk:
            self._flush()
        table = pa.table(self.columns, _PART_SCHEMA)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        _part_file(self.folder, self.unit).write_bytes(sink.getvalue().to_pybytes())
        return table.num_rows


_PART_SCHEMA = pa.schema(
    [
        ("source_digest", pa.binary(32)),
        ("pixel_digest", pa.binary(32)),
        ("key", pa.string()),
        ("label", pa.int32()),
        ("chunk", pa.int32()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
    ]
)


def _part_file(folder: Location, unit: int) -> Location:
    return folder / f"{unit:07d}.arrow"


def _chunk_file(folder: Location, unit: int, chunk: int) -> Location:
    return folder / f"{unit:07d}-{chunk:04d}.bin"


def _selection_file(folder: Location, unit: int) -> Location:
    return folder / f"{unit:07d}.selection"


def _read_part(folder: Location, unit: int) -> pa.Table:
    return pa.ipc.open_file(pa.py_buffer(_part_file(folder, unit).read_bytes())).read_all()


def _digest_column(table: pa.Table, name: str) -> npt.NDArray[np.void]:
    """A column of 32-byte digests as [n] void scalars, comparable and hashable as bytes."""
    if table.num_rows == 0:
        return np.empty(0, "V32")
    array = table.column(name).combine_chunks()
    flat = np.frombuffer(array.buffers()[1], np.uint8)
    start = array.offset * 32
    return flat[start : start + len(array) * 32].reshape(-1, 32).copy().view("V32")[:, 0]


# ------------------------------------------------------------------ pass 2: which records exist


@dataclass(kw_only=True)
class _Summary:
    num_records: dict[str, int]
    left_out: Counter[str] = field(default_factory=Counter)
    num_label_conflicts: int = 0
    num_labels_dropped: int = 0


def _select(
    config: PrepareConfig,
    destination: Location,
    parts: Sequence[_Part],
    excluded: set[bytes],
    foreign: dict[bytes, str],
    splits: Sequence[str],
) -> _Summary:
    """Decide each record's fate and write it beside its part: int32 (split or REMOVED, label).

    Equal pictures fall into one bucket by their digest and buckets are looked at one after the
    other, so that the digests in memory stay bounded.
    """
    folder = destination / PARTS
    summary = _Summary(num_records=dict.fromkeys(splits, 0))
    for part in parts:
        summary.left_out.update(part.left_out)
    num_classes = len(config.class_names) if config.class_names is not None else None
    num_buckets = 1 + sum(part.num_records for part in parts) // DIGESTS_PER_BUCKET
    duplicates: dict[int, list[int]] = {}
    unlabelled: dict[int, list[int]] = {}
    if config.deduplicate == "exact":
        for bucket in range(num_buckets):
            _find_duplicates(folder, parts, bucket, num_buckets, duplicates, unlabelled)
    bounds = np.cumsum(list(config.splits.values()))[:-1] if config.splits else np.empty(0)
    for part in parts:
        table = _read_part(folder, part.unit)
        digests = [digest.tobytes() for digest in _digest_column(table, "pixel_digest")]
        originals = _digest_column(table, "source_digest")
        if foreign:
            domains = {foreign[o.tobytes()] for o in originals if o.tobytes() in foreign}
            if domains:
                raise ValueError(
                    f"domain={config.domain!r} of dataset {config.name!r}: some of its original"
                    f" files already belong to privacy domain {sorted(domains)[0]!r}; prepare"
                    " them under that domain, so that one ledger pays for both uses"
                )
        labels = np.array(table.column("label").to_numpy(), np.int32, copy=True)
        fate = np.zeros(part.num_records, np.int32)
        if config.splits:
            fate[:] = [_split_of(digest, config.split_salt, bounds) for digest in digests]
        is_duplicate = np.zeros(part.num_records, bool)
        is_duplicate[duplicates.get(part.unit, [])] = True
        is_excluded = np.array([digest in excluded for digest in digests], bool)
        is_excluded = is_excluded & ~is_duplicate
        conflicts = np.array(unlabelled.get(part.unit, []), np.int64)
        conflicts = conflicts[~is_excluded[conflicts]]
        labels[conflicts] = -1
        if num_classes is not None:
            summary.num_labels_dropped += int((labels >= num_classes).sum())
            labels[labels >= num_classes] = -1
        fate[is_duplicate | is_excluded] = REMOVED
        summary.left_out["duplicate"] += int(is_duplicate.sum())
        summary.left_out["also_in_excluded_set"] += int(is_excluded.sum())
        summary.num_label_conflicts += len(conflicts)
        for split, name in enumerate(splits):
            summary.num_records[name] += int((fate == split).sum())
        _selection_file(folder, part.unit).write_bytes(np.stack([fate, labels]).tobytes())
    summary.left_out = Counter({k: v for k, v in sorted(summary.left_out.items()) if v})
    _write_summary(config, destination, summary)
    return summary


def _find_duplicates(
    folder: Location,
    parts: Sequence[_Part],
    bucket: int,
    num_buckets: int,
    duplicates: dict[int, list[int]],
    unlabelled: dict[int, list[int]],
) -> None:
    """Add one bucket's removed rows, and the survivors whose copies have other labels."""
    columns: list[tuple[npt.NDArray[Any], ...]] = []
    for order, part in enumerate(parts):
        table = _read_part(folder, part.unit)
        digests = _digest_column(table, "pixel_digest")
        prefix = digests.view(np.uint64).reshape(-1, 4)[:, 0]
        rows = np.flatnonzero(prefix % np.uint64(num_buckets) == bucket)
        labels = np.array(table.column("label").to_numpy(), np.int32, copy=True)
        columns.append((digests[rows], np.full(len(rows), order), rows, labels[rows]))
    digests, orders, rows, labels = (
        np.concatenate(column) for column in zip(*columns, strict=True)
    )
    words = digests.view(np.uint64).reshape(-1, 4)
    # Equal digests next to each other, the first in source order leading each run.
    ranking = np.lexsort((rows, orders, *words.T))
    is_copy = np.zeros(len(ranking), bool)
    is_copy[1:] = (words[ranking[1:]] == words[ranking[:-1]]).all(1)
    leader = ranking[np.maximum.accumulate(np.where(is_copy, 0, np.arange(len(ranking))))]
    for position in np.flatnonzero(is_copy).tolist():
        row, first = int(ranking[position]), int(leader[position])
        duplicates.setdefault(parts[orders[row]].unit, []).append(int(rows[row]))
        if labels[row] != labels[first]:
            survivors = unlabelled.setdefault(parts[orders[first]].unit, [])
            if not survivors or survivors[-1] != int(rows[first]):
                survivors.append(int(rows[first]))


def _split_of(pixel_digest: bytes, salt: str, bounds: npt.NDArray[np.float64]) -> int:
    hashed = hashlib.sha256(salt.encode() + b"\0" + pixel_digest).digest()
    share = int.from_bytes(hashed[:8], "big") / 2**64
    return int(np.searchsorted(bounds, share, side="right"))


def _write_summary(config: PrepareConfig, destination: Location, summary: _Summary) -> None:
    """What was left out and why: private if the source is, so readable by its owner only."""
    location = destination / SUMMARY_NAME
    location.write_text(
        json.dumps(
            {
                "dataset": config.name,
                "visibility": config.visibility,
                "num_records": {name or config.name: n for name, n in summary.num_records.items()},
                "left_out": dict(summary.left_out),
                "num_label_conflicts": summary.num_label_conflicts,
                "num_labels_dropped": summary.num_labels_dropped,
            },
            indent=1,
        )
        + "\n"
    )
    if config.visibility == "private" and location.is_local:
        location.local_path.chmod(0o600)


def read_summary(destination: Location) -> dict[str, Any]:
    """The operator's summary of a finished prepare: counts by reason. Private if the source is."""
    summary: dict[str, Any] = json.loads((destination / SUMMARY_NAME).read_text())
    return summary


# ----------------------------------------------------------------------- pass 3: parts -> shards


@dataclass(frozen=True, kw_only=True)
class _ShardPlan:
    """Where a shard's records come from: `num_records` kept ones from the `skip`-th of a unit on."""

    number: int
    units: tuple[int, ...]
    skip: int
    num_records: int


@dataclass(frozen=True, kw_only=True)
class _WrittenShard:
    shard: Shard
    index: dict[str, Any]
    sources: dict[str, Any]


def _write_dataset(
    config: PrepareConfig,
    destination: Location,
    root: Location,
    source: Source,
    parts: Sequence[_Part],
    split: int,
    summary: _Summary,
    run: Callable[..., Iterator[_WrittenShard]],
    num_threads: int,
    progress: Progress | None,
) -> DatasetManifest:
    folder = destination / PARTS
    plans = list(_plan_shards(config, folder, parts, split))
    task = _WriteShard(config=config, folder=folder, root=root, split=split)
    index = TableWriter(root / INDEX_NAME, INDEX_SCHEMA)
    sources = TableWriter(root / SOURCES_NAME, SOURCES_SCHEMA)
    shards: list[Shard] = []
    num_records = 0
    for written in run(task, plans, num_threads):
        shards.append(written.shard)
        index.append(written.index)
        sources.append(written.sources)
        num_records += len(written.index["shard"])
        if progress is not None:
            progress(
                PrepareProgress(
                    stage="writing",
                    num_done=len(shards),
                    num_units=len(plans),
                    num_records=num_records,
                    num_left_out=sum(summary.left_out.values()),
                )
            )
    name = list(summary.num_records)[split]
    return DatasetManifest(
        name=f"{config.name}/{name}" if name else config.name,
        num_records=num_records,
        visibility=config.visibility,
        domain=config.domain,
        ledger_home=config.ledger_home,
        origin=config.origin,
        image_short_side=config.image_short_side,
        source=config.source,
        class_names=config.class_names or source.class_names,
        shards=tuple(shards),
        index_digest=index.close(),
        sources_digest=sources.close(),
        config_digest=config.digest(),
        created_with=CREATED_WITH,
    )


def _read_selection(folder: Location, unit: int) -> npt.NDArray[np.int32]:
    """int32 [2, n]: split or REMOVED, and label."""
    return np.frombuffer(_selection_file(folder, unit).read_bytes(), np.int32).reshape(2, -1)


def _plan_shards(
    config: PrepareConfig, folder: Location, parts: Sequence[_Part], split: int
) -> Iterator[_ShardPlan]:
    """Cut the split's records, in source order, into shards of `records_per_shard`."""
    number = skip = num_waiting = 0
    units: list[int] = []
    for part in parts:
        num_kept = int((_read_selection(folder, part.unit)[0] == split).sum())
        if not num_kept:
            continue
        if not units:
            skip = 0
        units.append(part.unit)
        num_waiting += num_kept
        while num_waiting >= config.records_per_shard:
            yield _ShardPlan(
                number=number,
                units=tuple(units),
                skip=skip,
                num_records=config.records_per_shard,
            )
            number, num_waiting = number + 1, num_waiting - config.records_per_shard
            units, skip = ([part.unit], num_kept - num_waiting) if num_waiting else ([], 0)
    if num_waiting:
        yield _ShardPlan(number=number, units=tuple(units), skip=skip, num_records=num_waiting)


@dataclass(frozen=True, kw_only=True)
class _WriteShard:
    """The task of pass 3."""

    config: PrepareConfig
    folder: Location
    root: Location
    split: int

    def __call__(self, plan: _ShardPlan) -> _WrittenShard:
        contents: list[bytes] = []
        labels: list[int] = []
        columns: list[pa.Table] = []
        skip = plan.skip
        for unit in plan.units:
            table = _read_part(self.folder, unit)
            fate, unit_labels = _read_selection(self.folder, unit)
            rows = np.flatnonzero(fate == self.split)[skip:][: plan.num_records - len(contents)]
            skip = 0
            chosen = table.take(pa.array(rows))
            contents += self._contents(unit, chosen)
            labels += unit_labels[rows].tolist()
            columns.append(chosen.select(SOURCES_SCHEMA.names))
        first_record_id = plan.number * self.config.records_per_shard
        tar, offsets = build_shard(first_record_id, contents, labels)
        name = shard_name(plan.number)
        (self.root / name).write_bytes(tar)
        sources = pa.concat_tables(columns).combine_chunks()
        return _WrittenShard(
            shard=Shard(name=name, num_bytes=len(tar), sha256=hashlib.sha256(tar).hexdigest()),
            index={
                "shard": np.full(len(contents), plan.number, np.uint32),
                "length": np.array([len(content) for content in contents], np.uint32),
                "offset": offsets,
                "label": np.array(labels, np.int32),
                "digest": [stored_digest(content) for content in contents],
            },
            sources={name: sources.column(name).combine_chunks() for name in SOURCES_SCHEMA.names},
        )

    def _contents(self, unit: int, chosen: pa.Table) -> Iterator[bytes]:
        chunk, content = -1, b""
        rows = (chosen.column(name).to_pylist() for name in ("chunk", "offset", "length"))
        for number, offset, length in zip(*rows, strict=True):
            if number != chunk:
                chunk, content = number, _chunk_file(self.folder, unit, number).read_bytes()
            yield content[offset : offset + length]


# --------------------------------------------------------------------------------- the two ways


def _run_with_threads(
    task: Callable[[Item], Result], items: Iterable[Item], num_threads: int
) -> Iterator[Result]:
    """Results in order; at most two items per thread are in work or waiting."""
    if num_threads == 1:
        yield from map(task, items)
        return
    pool = ThreadPoolExecutor(num_threads, "prepare")
    waiting: deque[Any] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(task, item))
            if len(waiting) >= 2 * num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run_with_ray(
    task: Callable[[Item], Result], items: Iterable[Item], num_threads: int
) -> Iterator[Result]:
    """Results in order, from Ray Data tasks; storage faults come back as values, not tracebacks."""
    import ray.data
    from ray.data import DataContext

    def apply(batch: dict[str, Any]) -> dict[str, Any]:
        try:
            outcome: Any = task(pickle.loads(batch["item"][0]))
        except (StorageFault, OSError) as error:
            outcome = StorageFault("a prepare task could not read or write storage", str(error))
        return {"result": np.array([pickle.dumps(outcome)], dtype=object)}

    rows = [{"item": pickle.dumps(item)} for item in items]
    if not rows:
        return
    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    with DataContext.current(context):
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
        for row in dataset.map_batches(apply, batch_size=1).iter_rows():
            outcome = pickle.loads(row["result"])
            if isinstance(outcome, StorageFault):
                raise outcome
            yield outcome
