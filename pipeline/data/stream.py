"""Plan + store -> each rank's units of images, in step order, each record exactly once.

A *unit* is a fixed number of rows of one step and one rank, a few microbatches, padded with
weight 0. A step's record ids come from one plan for all ranks; rank r takes a contiguous 1/W of
them; every rank has the same number of units in a step, at least one. Two ways bring them with the
same bits: a thread pool in the training process, and one ordered Ray Data pipeline for all ranks.

How many rows a step has is a private fact: nothing here prints it.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipeline.data.shards import CacheSettings, ShardStore, StorageFault
from pipeline.privacy.sampling import (
    PoissonPlan,
    ShardShufflePlan,
    ShufflePlan,
    checksum,
    view_uniforms,
)

if TYPE_CHECKING:
    from ray.data import DataIterator

    from pipeline.data.views import PixelReader, PixelRows

Plan = PoissonPlan | ShufflePlan | ShardShufflePlan

RAY_PIXEL_CACHE_BYTES = 128 * 2**20
ROWS_PER_CHUNK, LEAST_ROWS = 128, 8
CHUNKS_AHEAD = 2
STEPS_PER_PLAN_TASK = 8
CONSTANT_SDS = 6


class DeliveryError(RuntimeError):
    """What arrived is not the plan: the run must stop. Names no record and no count."""


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Everything that decides which images arrive, in which order and cut how; picklable.

    Args:
        plan: which records each step takes.
        store_root: folder of the prepared dataset; its N must be the plan's.
        augmentation_key: sub-key of crops and flips (never the noise sub-key).
        world_size: number of ranks W.
        microbatch_size: rows of one device pass.
        microbatches_per_unit: so a unit has microbatch_size x microbatches_per_unit rows.
        image_size: side of the views in pixels.
        crop_scale: smallest and largest share of the area of a random crop.
        first_step: the first step to deliver.
        num_steps: how many steps to deliver from there on.
        is_private: whether row counts are private facts; must be so for a Poisson plan.
        augment: random crop and flip, or else the central square.
        views_per_image: V: every image comes in so many views, of which the first is what a stream
            of one view brings.
        is_constant: every step has as many units as one of mean + CONSTANT_SDS standard deviations
            needs, so that the time of a step does not tell its realised size. A larger step (once
            in 1e9) has the units it needs: no record is ever left out for it.
        prefetch_units: how many units of a rank are in work or waiting. Bounds the memory of a
            rank and, with the number of data tasks, what lies in Ray's object store.
        cache: where stored bytes are kept on each machine, if anywhere.
    """

    plan: Plan
    store_root: str
    augmentation_key: bytes = field(repr=False)
    world_size: int
    microbatch_size: int
    microbatches_per_unit: int
    image_size: int
    crop_scale: tuple[float, float] = (0.2, 1.0)
    first_step: int = 0
    num_steps: int
    is_private: bool
    augment: bool = True
    views_per_image: int = 1
    is_constant: bool = False
    prefetch_units: int = 4
    cache: CacheSettings | None = None

    def __post_init__(self) -> None:
        counts = ("world_size", "microbatch_size", "microbatches_per_unit")
        for name in (*counts, "image_size", "views_per_image", "prefetch_units"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("first_step", "num_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"crop_scale={self.crop_scale} must satisfy 0 < low <= high <= 1")
        if self.is_constant and not isinstance(self.plan, PoissonPlan):
            raise ValueError("is_constant=True is for a Poisson plan: other steps are equal anyway")
        if self.plan.is_private and not self.is_private:
            raise ValueError("is_private=False with a Poisson plan: its row counts are private")

    @property
    def rows_per_unit(self) -> int:
        """R: rows of every unit."""
        return self.microbatch_size * self.microbatches_per_unit

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit's images."""
        return self.rows_per_unit * self.views_per_image * 3 * self.image_size**2

    @property
    def steps(self) -> range:
        """The steps that are delivered."""
        return range(self.first_step, self.first_step + self.num_steps)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Some rows of one rank's share of a step. Everything but the shapes is private.

    Attributes:
        step, unit, rank: which one it is; num_units: of this step, the same on every rank.
        record_ids: int64 [R], -1 = padding.
        weights: float32 [R], 0 for padding and for a record that does not decode, else 1.
        images: uint8 [R V, 3, S, S], the V views of a row one after the other, zeros where its
            weight is 0.
        labels: int64 [R], -1 where there is none.
    """

    step: int
    unit: int
    rank: int
    num_units: int
    record_ids: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]

    def receipt(self) -> tuple[int, int]:
        """(number of records, checksum of their ids): sums over units and ranks prove a step."""
        real = self.record_ids[self.record_ids >= 0]
        return len(real), checksum(real)


# --------------------------------------------------------------------------- who gets which rows


def rank_slice(
    record_ids: npt.NDArray[np.int64], rank: int, world_size: int
) -> npt.NDArray[np.int64]:
    """Rank r's contiguous 1/W of a step's ids: disjoint, together all, sizes differ by <= 1."""
    num = len(record_ids)
    return record_ids[rank * num // world_size : (rank + 1) * num // world_size]


def num_units_of_step(num_records: int, config: StreamConfig) -> int:
    """Units per rank for a step of so many records: as the largest share needs, at least one."""
    if config.is_constant and isinstance(config.plan, PoissonPlan):
        mean = config.plan.num_records * config.plan.sampling_probability
        spread = math.sqrt(mean * (1 - config.plan.sampling_probability))
        num_records = max(num_records, math.ceil(mean + CONSTANT_SDS * spread))
    largest_share = -(-num_records // config.world_size)
    return max(1, -(-largest_share // config.rows_per_unit))


def unit_record_ids(
    step_ids: npt.NDArray[np.int64], unit: int, rank: int, config: StreamConfig
) -> npt.NDArray[np.int64]:
    """One unit's record ids, int64 [R], padded with -1."""
    share = rank_slice(step_ids, rank, config.world_size)
    padded = np.full(config.rows_per_unit, -1, np.int64)
    ids = share[unit * config.rows_per_unit : (unit + 1) * config.rows_per_unit]
    padded[: len(ids)] = ids
    return padded


# ------------------------------------------------------------------------------ rows to units


def _checked_digest(config: StreamConfig) -> str:
    """The dataset's manifest digest. Raises ValueError where plan and dataset do not fit."""
    manifest = ShardStore(config.store_root).manifest
    if manifest.num_records != config.plan.num_records:
        raise ValueError(
            f"num_records={config.plan.num_records} of the plan is not the {manifest.num_records}"
            f" of {config.store_root}; make the plan from the dataset's manifest"
        )
    if manifest.is_private and not config.is_private:
        raise ValueError(
            f"is_private=False, but {config.store_root} is marked private: use a private phase,"
            " or a dataset marked public"
        )
    return manifest.digest()


class _UnitBuilder:
    """A unit's arrays, filled chunk by chunk."""

    def __init__(
        self, config: StreamConfig, step_ids: npt.NDArray[np.int64], step: int, unit: int, rank: int
    ) -> None:
        rows, size = config.rows_per_unit, config.image_size
        ids = unit_record_ids(step_ids, unit, rank, config)
        self.config = config
        self.unit = Unit(
            step=step,
            unit=unit,
            rank=rank,
            num_units=num_units_of_step(len(step_ids), config),
            record_ids=ids,
            weights=np.zeros(rows, np.float32),
            images=np.zeros((rows * config.views_per_image, 3, size, size), np.uint8),
            labels=np.full(rows, -1, np.int64),
        )
        self.num_real = int((ids >= 0).sum())

    def begin(self, reader: PixelReader, chunk: slice) -> Callable[[], None]:
        """Begin to read some rows; the call that is returned decodes them into the unit."""
        finish_reading = reader.begin(self.unit.record_ids[chunk])
        return lambda: self._fill(reader, chunk, finish_reading())

    def _fill(self, reader: PixelReader, chunk: slice, pixels: PixelRows) -> None:
        from pipeline.data import images, views  # noqa: PLC0415  torch only where pixels are made

        config, unit = self.config, self.unit
        ids, num_views = unit.record_ids[chunk], config.views_per_image
        uniforms = None
        if config.augment:
            uniforms = view_uniforms(
                config.augmentation_key,
                unit.step,
                ids,
                purpose="crop",
                num_values=images.NUM_CROP_UNIFORMS,
                num_views=num_views,
            )
        unit.weights[chunk] = views.write_views(
            pixels,
            unit.images[chunk.start * num_views : chunk.stop * num_views],
            crop_scale=config.crop_scale,
            crop_uniforms=uniforms,
        )
        unit.labels[chunk] = reader.store.labels(ids)

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """The rows that hold records, so many at a time."""
        for start in range(0, self.num_real, num_rows):
            yield slice(start, min(start + num_rows, self.num_real))


# ------------------------------------------------------------------------- way 1: a thread pool


def thread_pool_units(
    config: StreamConfig,
    rank: int = 0,
    num_threads: int | None = None,
) -> Iterator[Unit]:
    """One rank's units in (step, unit) order, read ahead by threads of this process.

    Args:
        config: what to deliver.
        rank: whose units, in [0, world_size).
        num_threads: None = one per CPU, at most 16.

    Raises:
        ValueError: plan and dataset do not fit together.
        StorageFault: storage failed, after retries.

    Guarantees:
        1. Over all ranks each id of the plan comes exactly once (test_exact_delivery).
        2. Every rank has the same number of units in a step, at least one (test_empty_steps).
        3. A record that does not decode keeps its slot with weight 0 (test_undecodable_records).
        4. Closing the generator ends its threads (test_stream).
    """
    if not 0 <= rank < config.world_size:
        raise ValueError(f"rank={rank} must lie in [0, {config.world_size})")
    digest = _checked_digest(config)
    return _thread_pool_units(config, rank, digest, num_threads or min(16, os.cpu_count() or 1))


def _thread_pool_units(
    config: StreamConfig, rank: int, digest: str, num_threads: int
) -> Iterator[Unit]:
    from pipeline.data.views import PIXEL_CACHE_BYTES, shared_reader  # noqa: PLC0415

    reader = shared_reader(config.store_root, digest, PIXEL_CACHE_BYTES, config.cache)
    pool = ThreadPoolExecutor(num_threads, "stream")
    # So small that the units read ahead keep every thread busy.
    rows_ahead = config.rows_per_unit * config.prefetch_units
    rows_per_chunk = min(max(rows_ahead // (3 * num_threads), LEAST_ROWS), ROWS_PER_CHUNK)
    waiting: deque[tuple[Unit, list[Future[None]]]] = deque()

    def first() -> Unit:
        unit, chunks = waiting.popleft()
        for chunk in chunks:
            try:
                chunk.result()
            except StorageFault:
                raise
            except Exception as error:  # its text may tell what it was about
                raise StorageFault(
                    "a data task failed", f"{type(error).__name__}: {error}"
                ) from None
        return unit

    try:
        for step in config.steps:
            step_ids = config.plan.record_ids(step)
            for number in range(num_units_of_step(len(step_ids), config)):
                builder = _UnitBuilder(config, step_ids, step, number, rank)
                chunks = [
                    pool.submit(builder.begin(reader, chunk))
                    for chunk in builder.chunks(rows_per_chunk)
                ]
                waiting.append((builder.unit, chunks))
                if len(waiting) >= config.prefetch_units:
                    yield first()
        while waiting:
            yield first()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# --------------------------------------------------------- way 2: one Ray Data pipeline for all


def ray_unit_iterators(
    config: StreamConfig, *, num_cpus: float | None = None
) -> list[DataIterator]:
    """One ordered Ray Data pipeline dealt to all ranks: W picklable iterators, by rank.

    Rank 0 makes them and sends them to the others; each feeds its own to `units_from_iterator`.
    A row of the pipeline is a whole unit, so a block can never hold a part of one, and the split
    deals rows in turn: unit i of the stream reaches rank i mod W. No bar, statistic or log line
    of Ray's tells how many rows there were.

    Args:
        config: what to deliver.
        num_cpus: the most CPUs that data tasks may hold; None = whatever the cluster has free.

    Raises:
        ValueError: plan and dataset do not fit together.
    """
    import ray.data  # noqa: PLC0415  seconds to load, and not needed for way 1
    from ray.data import DataContext, ExecutionResources  # noqa: PLC0415

    digest = _checked_digest(config)
    if config.is_private:
        _hush_ray_data()
    context = _quiet(DataContext.get_current().copy())
    if num_cpus:
        # Of Ray's object store: what tasks are making and have just made, and what waits.
        num_units = 2 * num_cpus + config.world_size * config.prefetch_units
        context.execution_options.resource_limits = ExecutionResources(
            cpu=num_cpus, object_store_memory=num_units * (config.unit_bytes + 2**20)
        )
    plan, fetch = _PlanTask(config), _FetchTask(config, digest)
    with DataContext.current(context):
        dataset = (
            ray.data.range(
                config.num_steps,
                override_num_blocks=max(1, math.ceil(config.num_steps / STEPS_PER_PLAN_TASK)),
            )
            .map_batches(plan.__call__, batch_size=None)
            .repartition(target_num_rows_per_block=1)
            .map_batches(fetch.__call__, batch_size=1)
        )
        return dataset.streaming_split(config.world_size, equal=False)


def _quiet(context: Any) -> Any:
    """Order kept; everything that would tell row counts or tracebacks switched off."""
    context.execution_options.preserve_order = True
    context.execution_options.verbose_progress = False
    context.enable_progress_bars = False
    context.enable_operator_progress_bars = False
    context.print_on_execution_start = False
    context.verbose_stats_logs = False
    context.enable_auto_log_stats = False
    return context


def _hush_ray_data() -> None:
    """Keep Ray Data's own lines (rows dispatched, rows per operator) out of this process's logs."""
    logging.getLogger("ray.data").setLevel(logging.WARNING)


_last_plans: OrderedDict[tuple[Any, int], npt.NDArray[np.int64]] = OrderedDict()


def _planned(plan: Plan, step: int) -> npt.NDArray[np.int64]:
    """A step's ids, kept for the step's other units that come to this worker."""
    key = (plan, step)
    if key not in _last_plans:
        _last_plans[key] = plan.record_ids(step)
        while len(_last_plans) > 2:
            _last_plans.popitem(last=False)
    return _last_plans[key]


@dataclass(frozen=True)
class _PlanTask:
    """Numbers of steps -> one row of tags per unit, rank fastest."""

    config: StreamConfig

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Ray runs the pipeline's executor in an actor of its own, which unpickles this task and
        # otherwise logs how many rows each operator and each rank had.
        self.__dict__.update(state)
        if self.config.is_private:
            _hush_ray_data()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        steps = [self.config.first_step + offset for offset in batch["id"].tolist()]
        ranks = range(self.config.world_size)
        fault = ""
        try:
            rows = [
                (step, unit, rank)
                for step in steps
                for unit in range(self._num_units(step))
                for rank in ranks
            ]
        except Exception as error:
            fault = fault_text(error)
            rows = [(step, 0, rank) for step in steps for rank in ranks]
        tags = np.array(rows, np.int64).reshape(-1, 3)
        faults = np.full(len(rows), fault, dtype=object)
        return {"step": tags[:, 0], "unit": tags[:, 1], "rank": tags[:, 2], "fault": faults}

    def _num_units(self, step: int) -> int:
        return num_units_of_step(len(self.config.plan.record_ids(step)), self.config)


@dataclass(frozen=True)
class _FetchTask:
    """One row of tags -> one row that holds the whole unit, or the fault that kept it away."""

    config: StreamConfig
    manifest_digest: str

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        tags = [int(batch[name][0]) for name in ("step", "unit", "rank")]
        fault = str(batch["fault"][0])
        if not fault:
            try:
                unit = self._unit(*tags)
                return {
                    "tags": np.array([[*tags, unit.num_units]], np.int64),
                    "record_ids": unit.record_ids[None],
                    "weights": unit.weights[None],
                    "images": unit.images[None],
                    "labels": unit.labels[None],
                    "fault": np.array([""], dtype=object),
                }
            except Exception as error:
                fault = fault_text(error)
        nothing = np.zeros((1, 0), np.int64)
        columns = dict.fromkeys(("record_ids", "weights", "images", "labels"), nothing)
        return {
            "tags": np.array([[*tags, 1]], np.int64),
            **columns,
            "fault": np.array([fault], dtype=object),
        }

    def _unit(self, step: int, number: int, rank: int) -> Unit:
        from pipeline.data.views import shared_reader  # noqa: PLC0415

        config = self.config
        builder = _UnitBuilder(config, _planned(config.plan, step), step, number, rank)
        reader = shared_reader(
            config.store_root, self.manifest_digest, RAY_PIXEL_CACHE_BYTES, config.cache
        )
        begun: deque[Callable[[], None]] = deque()
        for chunk in builder.chunks(ROWS_PER_CHUNK // 2):  # the next ones are read meanwhile
            begun.append(builder.begin(reader, chunk))
            if len(begun) > CHUNKS_AHEAD:
                begun.popleft()()
        while begun:
            begun.popleft()()
        return builder.unit


def fault_text(error: Exception) -> str:
    """A task's failure as a value: Ray would log its traceback, and with it what it was about."""
    if isinstance(error, StorageFault):
        return f"{error}\n{error.private_detail}"
    return f"a data task failed\n{type(error).__name__}: {error}"


def units_from_iterator(iterator: DataIterator, config: StreamConfig, rank: int) -> Iterator[Unit]:
    """One rank's units from its share of the Ray Data pipeline, each checked against its place.

    Raises:
        DeliveryError: a unit of another step, place or rank came, or the stream ended early.
        StorageFault: a data task could not read its records; `private_detail` says which.
    """
    rows = _rows_ahead(iterator, config.prefetch_units)
    try:
        yield from _checked_units(rows, config, rank)
    finally:
        rows.close()


def _checked_units(
    rows: Iterator[dict[str, Any]], config: StreamConfig, rank: int
) -> Iterator[Unit]:
    for step in config.steps:
        number, num_units = 0, 1
        while number < num_units:
            row = next(rows, None)
            if row is None:
                raise DeliveryError("the stream ended before its last step")
            if row["fault"]:
                message, _, detail = str(row["fault"]).partition("\n")
                raise StorageFault(message, detail)
            tags = tuple(int(tag) for tag in row["tags"])
            if tags[:3] != (step, number, rank) or (number > 0 and tags[3] != num_units):
                raise DeliveryError(
                    f"rank {rank} waits for step {step} and was dealt another unit's rows; start"
                    " the same command again to resume from the last checkpoint"
                )
            num_units = tags[3]
            # Copies: a block in shared memory is read-only and must be let go of.
            yield Unit(
                step=step,
                unit=number,
                rank=rank,
                num_units=num_units,
                record_ids=np.array(row["record_ids"]),
                weights=np.array(row["weights"]),
                images=np.array(row["images"]),
                labels=np.array(row["labels"]),
            )
            number += 1
    if next(rows, None) is not None:
        raise DeliveryError("the stream brought more than its last step")


def _rows_ahead(iterator: DataIterator, num_rows: int) -> Generator[dict[str, Any], None, None]:
    """Rows as they come, so many at most taken in advance by a thread.

    Ray's own prefetching holds the first block back until it has all that it may prefetch.
    """
    whole_blocks: Any = None  # the documented value, which Ray's annotation forgets
    taken: queue.Queue[dict[str, Any] | Exception | None] = queue.Queue(max(1, num_rows - 1))
    is_over = threading.Event()

    def put(row: dict[str, Any] | Exception | None) -> None:
        while not is_over.is_set():
            try:
                return taken.put(row, timeout=0.1)
            except queue.Full:
                continue

    def take() -> None:
        try:
            for batch in iterator.iter_batches(
                batch_size=whole_blocks, batch_format="numpy", prefetch_batches=0
            ):
                for row in range(len(batch["tags"])):
                    put({name: column[row] for name, column in batch.items()})
                if is_over.is_set():
                    return
            put(None)
        except Exception as error:
            put(error)

    threading.Thread(target=take, name="stream", daemon=True).start()
    try:
        while (row := taken.get()) is not None:
            if isinstance(row, Exception):
                raise row
            yield row
    finally:
        is_over.set()
