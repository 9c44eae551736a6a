"""Pass 2: from the digests of all parts, which records exist, in which split, with which label."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.data.prepare.config import PrepareConfig
from pipeline.data.prepare.parts import PARTS, Part, digest_column, read_part, selection_file
from pipeline.data.shards import ShardStore
from pipeline.storage import Location

SUMMARY_NAME = "prepare_summary.json"
DIGESTS_PER_BUCKET = 16_000_000
REMOVED = -1


@dataclass(kw_only=True)
class Summary:
    """What became of the source's records: how many stay, by split, and why others do not."""

    num_records: dict[str, int]
    left_out: Counter[str] = field(default_factory=Counter)
    num_label_conflicts: int = 0
    num_labels_dropped: int = 0


def select(
    config: PrepareConfig,
    destination: Location,
    parts: Sequence[Part],
    *,
    splits: Sequence[str],
    excluded: set[bytes],
    foreign: dict[bytes, str],
    listing_digest: str,
) -> Summary:
    """Decide each record's fate and write it beside its part: int32 (split or REMOVED, label).

    Of equal pictures the first in source order stays; it loses its label if a copy has another.

    Equal pictures fall into one bucket by their digest and buckets are looked at one after the
    other, so that the digests in memory stay bounded.
    """
    folder = destination / PARTS
    summary = Summary(num_records=dict.fromkeys(splits, 0))
    for part in parts:
        summary.left_out.update(part.left_out)
    num_classes = len(config.class_names) if config.class_names is not None else None
    num_buckets = 1 + sum(part.num_records for part in parts) // DIGESTS_PER_BUCKET
    duplicates: dict[int, list[int]] = {}
    unlabelled: dict[int, list[int]] = {}
    if config.deduplicate == "exact":
        for bucket in range(num_buckets):
            _find_duplicates(folder, parts, (bucket, num_buckets), duplicates, unlabelled)
    bounds = np.cumsum(list(config.splits.values()))[:-1] if config.splits else np.empty(0)
    for part in parts:
        table = read_part(folder, part.unit)
        _refuse_foreign(config, table, foreign)
        digests = [digest.tobytes() for digest in digest_column(table, "pixel_digest")]
        labels = np.array(table.column("label").to_numpy(), np.int32, copy=True)
        fate = np.array([_split_of(d, config.split_salt, bounds) for d in digests], np.int32)
        is_duplicate = np.zeros(part.num_records, bool)
        is_duplicate[duplicates.get(part.unit, [])] = True
        is_excluded = np.array([digest in excluded for digest in digests], bool) & ~is_duplicate
        has_conflict = np.zeros(part.num_records, bool)
        has_conflict[unlabelled.get(part.unit, [])] = True
        is_outside = labels >= (2**31 if num_classes is None else num_classes)
        fate[is_duplicate | is_excluded] = REMOVED
        labels[has_conflict | is_outside] = -1
        summary.left_out["duplicate"] += int(is_duplicate.sum())
        summary.left_out["also_in_excluded_set"] += int(is_excluded.sum())
        summary.num_label_conflicts += int((has_conflict & (fate != REMOVED)).sum())
        summary.num_labels_dropped += int((is_outside & (fate != REMOVED)).sum())
        for split, name in enumerate(splits):
            summary.num_records[name] += int((fate == split).sum())
        selection_file(folder, part.unit).write_bytes(np.stack([fate, labels]).tobytes())
    summary.left_out = Counter({k: v for k, v in sorted(summary.left_out.items()) if v})
    _write_summary(config, destination, summary, listing_digest)
    return summary


def _refuse_foreign(config: PrepareConfig, table: pa.Table, foreign: dict[bytes, str]) -> None:
    """Raise ValueError if an original file is already paid for by another privacy domain."""
    originals = (digest.tobytes() for digest in digest_column(table, "source_digest"))
    domain = next((foreign[digest] for digest in originals if digest in foreign), None)
    if domain is not None:
        raise ValueError(
            f"domain={config.domain!r} of dataset {config.name!r}: some of its original files"
            f" already belong to privacy domain {domain!r}; prepare them under that domain, so"
            " that one ledger pays for both uses"
        )


def _find_duplicates(
    folder: Location,
    parts: Sequence[Part],
    bucket_of: tuple[int, int],
    duplicates: dict[int, list[int]],
    unlabelled: dict[int, list[int]],
) -> None:
    """Add one bucket's removed rows, and the survivors whose copies have other labels."""
    bucket, num_buckets = bucket_of
    columns: list[tuple[npt.NDArray[Any], ...]] = []
    for order, part in enumerate(parts):
        table = read_part(folder, part.unit)
        digests = digest_column(table, "pixel_digest")
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
        if labels[row] >= 0 and labels[row] != labels[first]:
            survivors = unlabelled.setdefault(parts[orders[first]].unit, [])
            if not survivors or survivors[-1] != int(rows[first]):
                survivors.append(int(rows[first]))


def _split_of(pixel_digest: bytes, salt: str, bounds: npt.NDArray[np.float64]) -> int:
    hashed = hashlib.sha256(salt.encode() + b"\0" + pixel_digest).digest()
    share = int.from_bytes(hashed[:8], "big") / 2**64
    return int(np.searchsorted(bounds, share, side="right"))


def _write_summary(
    config: PrepareConfig, destination: Location, summary: Summary, listing_digest: str
) -> None:
    """What was left out and why: private if the source is, so readable by its owner only."""
    content = {
        "dataset": config.name,
        "visibility": config.visibility,
        "num_records": {name or config.name: n for name, n in summary.num_records.items()},
        "left_out": dict(summary.left_out),
        "num_label_conflicts": summary.num_label_conflicts,
        "num_labels_dropped": summary.num_labels_dropped,
        "listing_digest": listing_digest,
    }
    text = json.dumps(content, indent=1) + "\n"
    location = destination / SUMMARY_NAME
    if config.visibility == "private" and location.is_local:
        location.local_path.unlink(missing_ok=True)
        descriptor = os.open(location.local_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as stream:
            stream.write(text)
    else:
        location.write_text(text)


def foreign_digests(config: PrepareConfig) -> tuple[set[bytes], dict[bytes, str]]:
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


def read_summary(destination: Location) -> dict[str, Any]:
    """The operator's summary of a finished prepare: counts by reason. Private if the source is."""
    summary: dict[str, Any] = json.loads((destination / SUMMARY_NAME).read_text())
    return summary


def read_selection(folder: Location, unit: int) -> npt.NDArray[np.int32]:
    """int32 [2, n]: split or REMOVED, and label."""
    return np.frombuffer(selection_file(folder, unit).read_bytes(), np.int32).reshape(2, -1)
