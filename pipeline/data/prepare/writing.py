"""Pass 3: parts become numbered shards, an index, a side table and a manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.data.manifest import DatasetManifest, Shard
from pipeline.data.prepare.config import PrepareConfig, PrepareProgress, Progress
from pipeline.data.prepare.executors import Run
from pipeline.data.prepare.parts import Part, chunk_file, read_part
from pipeline.data.prepare.selection import Summary, read_selection
from pipeline.data.shards import (
    INDEX_NAME,
    INDEX_SCHEMA,
    SOURCES_NAME,
    SOURCES_SCHEMA,
    TableWriter,
    build_shard,
    shard_name,
    stored_digest,
)
from pipeline.data.sources import Source
from pipeline.storage import Location

CREATED_WITH = "dp-pretrain 0.1.0"


@dataclass(frozen=True, kw_only=True)
class _ShardPlan:
    """Where a shard's records come from: `num_records` kept ones, leaving out the first `skip`."""

    number: int
    units: tuple[int, ...]
    skip: int
    num_records: int


@dataclass(frozen=True, kw_only=True)
class _WrittenShard:
    shard: Shard
    index: dict[str, Any]
    sources: dict[str, Any]


def write_dataset(
    config: PrepareConfig,
    source: Source,
    parts: Sequence[Part],
    *,
    folder: Location,
    root: Location,
    split: int,
    summary: Summary,
    run: Run,
    progress: Progress | None,
) -> DatasetManifest:
    """Write one split's shards, index and side table; returns its manifest, not yet saved."""
    plans = list(_plan_shards(config, folder, parts, split))
    task = _WriteShard(config=config, folder=folder, root=root, split=split)
    index = TableWriter(root / INDEX_NAME, INDEX_SCHEMA, drafts=folder)
    sources = TableWriter(root / SOURCES_NAME, SOURCES_SCHEMA, drafts=folder)
    shards: list[Shard] = []
    num_records = 0
    for written in run(task, plans):
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
        group_key=config.group_key,
        max_records_per_group=config.max_records_per_group,
    )


def _plan_shards(
    config: PrepareConfig, folder: Location, parts: Sequence[Part], split: int
) -> Iterator[_ShardPlan]:
    """Cut the split's records, in source order, into shards of `records_per_shard`."""
    number = skip = num_waiting = 0
    units: list[int] = []
    for part in parts:
        num_kept = int((read_selection(folder, part.unit)[0] == split).sum())
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
            table = read_part(self.folder, unit)
            fate, unit_labels = read_selection(self.folder, unit)
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
                chunk, content = number, chunk_file(self.folder, unit, number).read_bytes()
            yield content[offset : offset + length]
