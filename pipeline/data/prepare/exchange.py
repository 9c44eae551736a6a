"""Rows of all parts brought together by what they have in common, in bounded memory.

A question is asked of a whole dataset, for example "which pictures are copies of an earlier one?".
Its rows are scattered into buckets by a hash, so that all rows that concern each other meet in one;
each bucket is answered on its own; the verdicts go back to the parts that they are about:

    parts of a task ── rows, by bucket ──> rows-{task}.arrow      one task per TASK_RECORDS records
    bucket of every rows file ── answer ──> verdicts-{bucket}.arrow   one task per bucket
    task of every verdicts file ──> what became of the task's records

Nothing grows with the dataset but the number of tasks; the driver holds no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.data.prepare.executors import Run
from pipeline.data.prepare.parts import Part
from pipeline.storage import Location

TASK_RECORDS = 2**18
"""Records whose tables one task holds at a time."""
BUCKET_ROWS = 2**22
"""Rows that are expected in a bucket."""

VERDICT_FIELDS = [("unit", pa.int32()), ("row", pa.int32())]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Some parts, in source order; without parts, rows of a dataset that is compared with.

    Args:
        index: the task's place.
        parts: the parts.
        other, start, stop: folder of a prepared dataset, and which of its records.
    """

    index: int
    parts: tuple[Part, ...] = ()
    other: str | None = None
    start: int = 0
    stop: int = 0

    @property
    def num_records(self) -> int:
        """How many records it speaks for."""
        return sum(part.num_records for part in self.parts) + self.stop - self.start


class Question(Protocol):
    """What is asked; picklable, for it travels to the tasks."""

    @property
    def name(self) -> str:
        """Of the folder of its files."""
        ...

    @property
    def rows_per_record(self) -> int:
        """How many rows speak for one record."""
        ...

    def rows(self, task: Task) -> tuple[npt.NDArray[np.uint64], pa.Table]:
        """One hash a row, and the rows: columns `unit` and `row` say whose they are."""
        ...

    def answer(self, rows: pa.Table) -> pa.Table:
        """Verdicts (VERDICT_FIELDS and others) on a bucket's rows, in the order of the tasks."""
        ...


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """Where the answers to a question lie."""

    folder: Location
    num_buckets: int

    def of(self, task: Task) -> pa.Table:
        """The verdicts on a task's records."""
        files = (self.folder / _verdicts_name(b) for b in range(self.num_buckets))
        return pa.Table.from_batches([_read_batch(file, task.index) for file in files])


def plan_tasks(parts: Sequence[Part]) -> list[Task]:
    """The parts in tasks of about TASK_RECORDS records."""
    tasks: list[Task] = []
    waiting: list[Part] = []
    for place, part in enumerate(parts):
        waiting.append(part)
        is_full = sum(each.num_records for each in waiting) >= TASK_RECORDS
        if is_full or place == len(parts) - 1:
            tasks.append(Task(index=len(tasks), parts=tuple(waiting)))
            waiting = []
    return tasks


def tasks_of_others(sizes: dict[str, int], first_index: int) -> list[Task]:
    """The records of other datasets, folder -> N, in tasks."""
    bounds = [
        (uri, start, min(start + TASK_RECORDS, num))
        for uri, num in sizes.items()
        for start in range(0, num, TASK_RECORDS)
    ]
    return [
        Task(index=first_index + place, other=uri, start=start, stop=stop)
        for place, (uri, start, stop) in enumerate(bounds)
    ]


def ask(question: Question, tasks: Sequence[Task], folder: Location, run: Run) -> Verdicts:
    """Answer a question about all tasks' records.

    Args:
        tasks: those with parts first, in source order, `index` counting from 0.
        folder: where its files lie; they are left there for who reads the verdicts.
    """
    num_rows = question.rows_per_record * sum(task.num_records for task in tasks)
    num_buckets = 1 + num_rows // BUCKET_ROWS
    place = folder / question.name
    for _ in run(_Scatter(question, place, num_buckets), tasks):
        pass
    units = [task.parts[0].unit for task in tasks if task.parts]
    for _ in run(_Answer(question, place, tuple(units), len(tasks)), list(range(num_buckets))):
        pass
    return Verdicts(folder=place, num_buckets=num_buckets)


@dataclass(frozen=True)
class _Scatter:
    """Writes a task's rows, one record batch a bucket."""

    question: Question
    folder: Location
    num_buckets: int

    def __call__(self, task: Task) -> None:
        hashes, rows = self.question.rows(task)
        bucket = (hashes % np.uint64(self.num_buckets)).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        bounds = np.searchsorted(bucket[order], np.arange(self.num_buckets + 1))
        _write_batches(self.folder / _rows_name(task.index), rows.take(pa.array(order)), bounds)


@dataclass(frozen=True)
class _Answer:
    """Answers a bucket; writes the verdicts, one record batch a task."""

    question: Question
    folder: Location
    first_units: tuple[int, ...]
    num_tasks: int

    def __call__(self, bucket: int) -> None:
        files = (self.folder / _rows_name(task) for task in range(self.num_tasks))
        rows = pa.Table.from_batches([_read_batch(file, bucket) for file in files])
        verdicts = self.question.answer(rows.combine_chunks())
        units = verdicts.column("unit").to_numpy()
        # Units are in source order, so the verdicts sorted by unit are sorted by task.
        order = np.lexsort((verdicts.column("row").to_numpy(), units))
        bounds = np.append(np.searchsorted(units[order], self.first_units), len(units))
        _write_batches(self.folder / _verdicts_name(bucket), verdicts.take(pa.array(order)), bounds)


def _rows_name(task: int) -> str:
    return f"rows-{task:06d}.arrow"


def _verdicts_name(bucket: int) -> str:
    return f"verdicts-{bucket:06d}.arrow"


def _write_batches(file: Location, table: pa.Table, bounds: npt.NDArray[Any]) -> None:
    """The table's rows as record batches [bounds[i], bounds[i + 1])."""
    sink = pa.BufferOutputStream()
    (whole,) = table.combine_chunks().to_batches() or [_empty(table.schema)]
    with pa.ipc.new_file(sink, table.schema) as writer:
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            # A slice is written with all it was cut from unless it is copied.
            batch = whole.slice(start, stop - start).take(pa.array(np.arange(stop - start)))
            writer.write_batch(batch)
    file.write_bytes(sink.getvalue().to_pybytes())


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema)


def _read_batch(file: Location, number: int) -> pa.RecordBatch:
    """One record batch, by the byte range that it lies in."""
    filesystem, path = file.filesystem()
    with filesystem.open_input_file(path) as stream:
        return pa.ipc.open_file(stream).get_batch(number)
