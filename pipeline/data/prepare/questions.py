"""What decides together which records exist: copies, near copies, other sets, groups.

Each is a question to the exchange (`exchange.py`). All answers are functions of the records alone,
whatever the number of tasks, buckets and workers: "first" is first in source order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.data.prepare.exchange import VERDICT_FIELDS, Task, Verdicts
from pipeline.data.prepare.parts import fixed_column, read_part
from pipeline.data.shards import ShardStore
from pipeline.storage import Location

COPY, EXCLUDED, CONFLICT, LEADER, NEAR, OVER_LIMIT = (1 << bit for bit in range(6))
"""What a verdict says of a record, as bits; the first of its copies is their LEADER."""
REMOVING = COPY | EXCLUDED | NEAR | OVER_LIMIT

NEAR_BITS = 6
"""Hamming distance of perceptual hashes up to which two pictures are near copies."""

_NOBODY = -1
_SCHEMA = pa.schema([*VERDICT_FIELDS, ("flags", pa.uint8()), ("num_copies", pa.int32())])
_GROUP_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Which records are equal, to the pixel, to an earlier one or to one of another set.

    Of equal pictures (of one group, where there are groups) the first stays. It loses its label if
    a copy carries another one.
    """

    folder: Location
    merges: bool
    name: str = "copies"
    rows_per_record: int = 1

    def rows(self, task: Task) -> tuple[npt.NDArray[np.uint64], pa.Table]:
        """By pixel digest. Rows of another set have no unit."""
        if task.other is not None:
            ids = np.arange(task.start, task.stop)
            digests = ShardStore(task.other).pixel_digests(ids)
            table = _table(digests, None, _NOBODY, np.arange(len(ids)), np.full(len(ids), -1))
            return _hash_of(digests), table
        tables = []
        for part in task.parts:
            found = read_part(self.folder, part.unit)
            digests, rows = fixed_column(found, "pixel_digest"), np.arange(found.num_rows)
            labels = found.column("label").to_numpy()
            tables.append(_table(digests, _groups(found), part.unit, rows, labels))
        table = pa.concat_tables(tables).combine_chunks()
        return _hash_of(fixed_column(table, "key")), table

    def answer(self, rows: pa.Table) -> pa.Table:
        """See the class."""
        key, group = _words(rows, "key"), _words(rows, "group")
        unit, row = rows.column("unit").to_numpy(), rows.column("row").to_numpy()
        label = rows.column("label").to_numpy()
        is_own = unit != _NOBODY
        order = np.lexsort((row, unit, *group.T, is_own, *key.T))
        key, group, label, is_own = key[order], group[order], label[order], is_own[order]
        same_key = _equals_before(key)
        first_of_key = _start_of_run(same_key)
        is_excluded = is_own & ~is_own[first_of_key]
        flags = np.where(is_excluded, EXCLUDED, 0).astype(np.uint8)
        num_copies = np.zeros(len(order), np.int32)
        if self.merges:
            is_copy = same_key & _equals_before(group)
            is_copy[1:] &= is_own[1:] & is_own[:-1]
            leader = _start_of_run(is_copy)
            # A copy is counted as such, whatever else holds its picture.
            flags[is_copy] = COPY
            differs = is_copy & (label >= 0) & (label != label[leader])
            flags[leader[differs]] |= CONFLICT
            flags[leader[is_copy]] |= LEADER
            np.add.at(num_copies, leader[is_copy], 1)
        told = is_own & (flags > 0)
        return _verdicts(unit[order][told], row[order][told], flags[told], num_copies[told])


@dataclass(frozen=True, kw_only=True)
class ForeignOriginals:
    """Whether an original file lies in a private set of another domain; `domains` names it."""

    folder: Location
    domains: dict[str, int]
    name: str = "originals"
    rows_per_record: int = 1

    def rows(self, task: Task) -> tuple[npt.NDArray[np.uint64], pa.Table]:
        """By digest of the original bytes; the label column holds the number of the domain."""
        if task.other is not None:
            ids = np.arange(task.start, task.stop)
            digests = ShardStore(task.other).source_digests(ids)
            domain = np.full(len(ids), self.domains[task.other])
            return _hash_of(digests), _table(digests, None, _NOBODY, np.arange(len(ids)), domain)
        tables = []
        for part in task.parts:
            found = read_part(self.folder, part.unit)
            digests, rows = fixed_column(found, "source_digest"), np.arange(found.num_rows)
            tables.append(_table(digests, None, part.unit, rows, np.full(len(rows), -1)))
        table = pa.concat_tables(tables).combine_chunks()
        return _hash_of(fixed_column(table, "key")), table

    def answer(self, rows: pa.Table) -> pa.Table:
        """`num_copies` holds the number of the domain."""
        key = _words(rows, "key")
        unit, row = rows.column("unit").to_numpy(), rows.column("row").to_numpy()
        is_own, domain = unit != _NOBODY, rows.column("label").to_numpy()
        order = np.lexsort((row, unit, is_own, *key.T))
        first = order[_start_of_run(_equals_before(key[order]))]
        told = is_own[order] & ~is_own[first]
        flags = np.full(int(told.sum()), EXCLUDED)
        return _verdicts(unit[order][told], row[order][told], flags, domain[first][told])


@dataclass(frozen=True, kw_only=True)
class NearCopies:
    """Which records look like an earlier one: perceptual hashes at most NEAR_BITS apart.

    Only records that stayed so far are compared, and only inside a group where there are groups. A
    record is removed if any earlier one is near it, whether or not that one is itself removed as
    near, so that the answer is one comparison of pairs; no two that stay are near each other.

    Hashes that differ in at most 6 of 64 bits agree in at least 2 of their 8 bytes: a record meets
    all that share two bytes with it, in one of 28 rows.
    """

    folder: Location
    earlier: tuple[Verdicts, ...]
    name: str = "near"
    rows_per_record: int = 28
    PAIRS: ClassVar[list[tuple[int, int]]] = [(i, j) for j in range(8) for i in range(j)]

    def rows(self, task: Task) -> tuple[npt.NDArray[np.uint64], pa.Table]:
        """By two bytes of the perceptual hash, and the group."""
        tables = []
        for part, found, stays in _staying(self.folder, task, self.earlier):
            hashes = found.column("perceptual_hash")
            rows = np.flatnonzero(stays & ~hashes.is_null().to_numpy())
            chosen = hashes.take(pa.array(rows)).to_numpy().astype(np.uint64)
            group = _groups(found)[rows]
            values = chosen.view(np.uint8).reshape(-1, 8)
            for number, (i, j) in enumerate(self.PAIRS):
                place = (number << 16) + (values[:, i].astype(np.int64) << 8) + values[:, j]
                columns = {"place": place, "hash": chosen, "group": _binary(group)}
                owner = {"unit": np.full(len(rows), part.unit, np.int32), "row": rows}
                tables.append(pa.table({**columns, **owner}, _NEAR_SCHEMA))
        table = pa.concat_tables(tables or [_NEAR_SCHEMA.empty_table()]).combine_chunks()
        place = table.column("place").to_numpy().astype(np.uint64)
        # Odd multiplier of 64 bits: neighbouring places fall into different buckets.
        mixed = (place + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(20)
        return mixed ^ _words(table, "group")[:, 0], table

    def answer(self, rows: pa.Table) -> pa.Table:
        """See the class."""
        place, group = rows.column("place").to_numpy(), _words(rows, "group")
        unit, row = rows.column("unit").to_numpy(), rows.column("row").to_numpy()
        order = np.lexsort((row, unit, *group.T, place))
        hashes = rows.column("hash").to_numpy()[order]
        key = np.column_stack([place[order].astype(np.uint64), group[order]])
        starts = np.flatnonzero(~_equals_before(key))
        is_near = np.zeros(len(order), bool)
        for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
            if stop - start > 1:
                is_near[start:stop] = near_an_earlier(hashes[start:stop])
        unit, row = unit[order][is_near], row[order][is_near]
        flags = np.full(len(unit), NEAR)
        return _verdicts(unit, row, flags, np.zeros(len(unit), np.int32))


@dataclass(frozen=True, kw_only=True)
class GroupLimit:
    """Which records are over the number that a group may have; chosen by a public hash.

    Of a group's records those with the smallest SHA-256(salt, pixel digest) stay, so that whether
    one stays depends on its group alone and on nothing that was looked at.
    """

    folder: Location
    earlier: tuple[Verdicts, ...]
    limit: int
    salt: str
    name: str = "groups"
    rows_per_record: int = 1

    def rows(self, task: Task) -> tuple[npt.NDArray[np.uint64], pa.Table]:
        """By group; the key is the public hash."""
        tables = [_table(np.empty((0, 32), np.uint8), None, 0, np.empty(0, np.int64), np.empty(0))]
        for part, found, stays in _staying(self.folder, task, self.earlier):
            rows = np.flatnonzero(stays)
            prefix = self.salt.encode() + b"\0limit\0"
            digests = [
                hashlib.sha256(prefix + digest.tobytes()).digest()
                for digest in fixed_column(found, "pixel_digest")[rows]
            ]
            ranks = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)
            labels = np.full(len(rows), -1)
            tables.append(_table(ranks, _groups(found)[rows], part.unit, rows, labels))
        table = pa.concat_tables(tables).combine_chunks()
        return _words(table, "group")[:, 0].copy(), table

    def answer(self, rows: pa.Table) -> pa.Table:
        """See the class."""
        rank = fixed_column(rows, "key").view(">u8").reshape(-1, 4).astype(np.uint64)
        group = _words(rows, "group")
        unit, row = rows.column("unit").to_numpy(), rows.column("row").to_numpy()
        order = np.lexsort((row, unit, *rank.T[::-1], *group.T))
        same = _equals_before(group[order])
        over = np.arange(len(order)) - _start_of_run(same) >= self.limit
        unit, row = unit[order][over], row[order][over]
        flags = np.full(len(unit), OVER_LIMIT)
        return _verdicts(unit, row, flags, np.zeros(len(unit), np.int32))


def flags_of(task: Task, answers: tuple[Verdicts, ...]) -> dict[int, npt.NDArray[np.uint8]]:
    """By unit: the bits of every answer on each of its records."""
    flags = {part.unit: np.zeros(part.num_records, np.uint8) for part in task.parts}
    for answer in answers:
        verdicts = answer.of(task)
        names = ("unit", "row", "flags")
        unit, row, bits = (verdicts.column(name).to_numpy() for name in names)
        order = np.argsort(unit, kind="stable")
        for each in np.unique(unit).tolist():
            low, high = np.searchsorted(unit[order], [each, each + 1])
            chosen = order[low:high]
            np.bitwise_or.at(flags[each], row[chosen], bits[chosen])
    return flags


def near_an_earlier(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Whether any hash before it is at most NEAR_BITS away; bool [n] of uint64 [n]."""
    is_near = np.ones(len(hashes), bool)
    # Of equal hashes only the first needs to be compared: the others are near to it.
    firsts = np.sort(np.unique(hashes, return_index=True)[1])
    distinct = hashes[firsts]
    block = 1024
    for start in range(0, len(distinct), block):
        rows = distinct[start : start + block]
        found = np.zeros(len(rows), bool)
        for other in range(0, start + 1, block):
            columns = distinct[other : other + block]
            near = np.bitwise_count(rows[:, None] ^ columns[None]) <= NEAR_BITS
            if other == start:
                near = np.tril(near, -1)
            found |= near.any(1)
        is_near[firsts[start : start + block]] = found
    return is_near


_ROW_SCHEMA = pa.schema(
    [
        ("key", pa.binary(32)),
        ("group", pa.binary(_GROUP_BYTES)),
        ("label", pa.int32()),
        *VERDICT_FIELDS,
    ]
)
_NEAR_SCHEMA = pa.schema(
    [
        ("place", pa.int64()),
        ("hash", pa.uint64()),
        ("group", pa.binary(_GROUP_BYTES)),
        *VERDICT_FIELDS,
    ]
)


def _table(
    keys: npt.NDArray[np.uint8],
    groups: npt.NDArray[np.uint8] | None,
    unit: int,
    rows: npt.NDArray[Any],
    labels: npt.NDArray[Any],
) -> pa.Table:
    """Rows of _ROW_SCHEMA; keys uint8 [n, 32], groups uint8 [n, 16] or none."""
    if groups is None:
        groups = np.zeros((len(keys), _GROUP_BYTES), np.uint8)
    columns = {
        "key": _binary(keys),
        "group": _binary(groups),
        "label": labels.astype(np.int32),
        "unit": np.full(len(keys), unit, np.int32),
        "row": rows.astype(np.int32),
    }
    return pa.table(columns, _ROW_SCHEMA)


def _binary(values: npt.NDArray[np.uint8]) -> pa.Array:
    """uint8 [n, width] as fixed-size binary."""
    flat = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.binary(values.shape[1]), len(values), [None, flat])


def _groups(part: pa.Table) -> npt.NDArray[np.uint8]:
    """uint8 [n, 16]: the digest of each record's group, zeros where there are no groups."""
    column = part.column("group")
    if column.null_count == len(column):
        return np.zeros((len(column), _GROUP_BYTES), np.uint8)
    return fixed_column(part, "group")


def _staying(
    folder: Location, task: Task, earlier: tuple[Verdicts, ...]
) -> list[tuple[Any, pa.Table, npt.NDArray[np.bool_]]]:
    """(part, its table, which of its records no earlier answer removed)."""
    flags = flags_of(task, earlier)
    return [
        (part, read_part(folder, part.unit), (flags[part.unit] & REMOVING) == 0)
        for part in task.parts
    ]


def _hash_of(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys[:, :8]).view(np.uint64)[:, 0]


def _words(table: pa.Table, name: str) -> npt.NDArray[np.uint64]:
    """A column of fixed-size bytes as uint64 [n, width / 8]."""
    column = fixed_column(table, name)
    return column.view(np.uint64)


def _equals_before(key: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Whether a row of [n, k] equals the row before; the first does not."""
    same = np.zeros(len(key), bool)
    same[1:] = (key[1:] == key[:-1]).all(1)
    return same


def _start_of_run(continues: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """The place where each row's run starts."""
    return np.maximum.accumulate(np.where(continues, 0, np.arange(len(continues))))


def _verdicts(
    unit: npt.NDArray[Any],
    row: npt.NDArray[Any],
    flags: npt.NDArray[Any],
    num_copies: npt.NDArray[Any],
) -> pa.Table:
    columns = {
        "unit": unit.astype(np.int32),
        "row": row.astype(np.int32),
        "flags": flags.astype(np.uint8),
        "num_copies": num_copies.astype(np.int32),
    }
    return pa.table(columns, _SCHEMA)
