"""The ways of reading that benchmarks/stream.py compares, each a function that delivers images."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.data.images import (
    NUM_CROP_UNIFORMS,
    crop_and_resize,
    decode_stored,
    random_crop_boxes,
)
from pipeline.data.shards import INDEX_NAME, ShardStore
from pipeline.data.stream import (
    StreamConfig,
    Unit,
    ray_unit_iterators,
    thread_pool_units,
    units_from_iterator,
)
from pipeline.privacy.sampling import PoissonPlan
from pipeline.storage import Location

ROWS_PER_TASK = 64
NUM_READS_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True)
class Work:
    """The same work for every method: steps of a plan over one data set.

    Args:
        root: the data set's folder, local or s3://.
        batch_size: expected records of a step.
        num_steps: steps.
        rows_per_unit: rows of a unit of the stream.
        image_size: side of the views.
        threads: threads, or CPUs of Ray Data, that read and decode.
    """

    root: str
    batch_size: int
    num_steps: int
    rows_per_unit: int
    image_size: int
    threads: int

    @cached_property
    def store(self) -> ShardStore:
        """The data set."""
        return ShardStore(self.root)

    def config(self, world_size: int = 1) -> StreamConfig:
        """The stream's configuration."""
        num_records = self.store.num_records
        return StreamConfig(
            plan=PoissonPlan(
                key=b"k" * 32,
                num_records=num_records,
                sampling_probability=min(1.0, self.batch_size / num_records),
            ),
            store_root=self.root,
            augmentation_key=b"a" * 32,
            world_size=world_size,
            microbatch_size=self.rows_per_unit,
            microbatches_per_unit=1,
            image_size=self.image_size,
            num_steps=self.num_steps,
            is_private=True,
        )

    @cached_property
    def step_ids(self) -> list[npt.NDArray[np.int64]]:
        """Each step's record ids."""
        plan = self.config().plan
        return [plan.record_ids(step) for step in range(self.num_steps)]

    @cached_property
    def num_images(self) -> int:
        """Images of all steps."""
        return sum(map(len, self.step_ids))

    @cached_property
    def ranges(self) -> list[tuple[int, int, int]]:
        """(shard, offset, length) of every record."""
        content = (Location(self.root) / INDEX_NAME).read_bytes()
        table = pa.ipc.open_file(content).read_all()
        columns = (table.column(name).to_pylist() for name in ("shard", "offset", "length"))
        return list(zip(*columns, strict=True))

    @cached_property
    def useful_bytes(self) -> int:
        """Stored bytes of the records of all steps."""
        lengths = np.array([length for _, _, length in self.ranges])
        return int(sum(lengths[ids].sum() for ids in self.step_ids))


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How fast images came: images per second, and how long until the first."""

    images_per_second: float
    first_seconds: float


# -- a bare thread pool ----------------------------------------------------------------------------


def bare_pool(work: Work) -> Timing:
    """The same reads and decodes on as many threads, and nothing else.

    No plan, no index, no digest, no padding, no proof. On an object store, reads have threads of
    their own, NUM_READS_AT_ONCE, so that decoding does not wait for the network.
    """
    started = time.perf_counter()
    chunks = [
        ids[start : start + ROWS_PER_TASK].tolist()
        for ids in work.step_ids
        for start in range(0, len(ids), ROWS_PER_TASK)
    ]
    uniforms = np.random.default_rng(0).random((ROWS_PER_TASK, NUM_CROP_UNIFORMS))
    read = _reader(work)

    def decode(contents: list[bytes]) -> npt.NDArray[np.uint8]:
        pixels = [image for image in decode_stored(contents) if image is not None]
        heights, widths = (np.array([image.shape[axis] for image in pixels]) for axis in (0, 1))
        boxes, flips = random_crop_boxes(heights, widths, uniforms[: len(pixels)], (0.2, 1.0))
        return crop_and_resize(pixels, boxes, flips, work.image_size)

    first = 0.0
    with (
        ThreadPoolExecutor(work.threads) as decoders,
        ThreadPoolExecutor(NUM_READS_AT_ONCE) as readers,
    ):

        def submit(chunk: list[int]) -> Future[Any]:
            if work.store.root.is_local:
                return decoders.submit(lambda: decode([read(i) for i in chunk]))
            reads = [readers.submit(read, i) for i in chunk]
            return decoders.submit(lambda: decode([future.result() for future in reads]))

        waiting: deque[Future[Any]] = deque()
        for chunk in chunks:
            waiting.append(submit(chunk))
            if len(waiting) > 4 * work.threads:
                waiting.popleft().result()
                first = first or time.perf_counter() - started
        while waiting:
            waiting.popleft().result()
    seconds = time.perf_counter() - started
    return Timing(images_per_second=work.num_images / seconds, first_seconds=first or seconds)


def _reader(work: Work) -> Callable[[int], bytes]:
    ranges, root = work.ranges, work.store.root
    names = [shard.name for shard in work.store.manifest.shards]
    if root.is_local:
        descriptors = [os.open(root.local_path / name, os.O_RDONLY) for name in names]

        def pread(record_id: int) -> bytes:
            shard, offset, length = ranges[record_id]
            return os.pread(descriptors[shard], length, offset)

        return pread
    filesystem, path = root.filesystem()
    files = [filesystem.open_input_file(f"{path}/{name}") for name in names]

    def get(record_id: int) -> bytes:
        shard, offset, length = ranges[record_id]
        return files[shard].read_at(length, offset)

    return get


# -- the stream ------------------------------------------------------------------------------------


def thread_pool_stream(work: Work) -> Timing:
    """Ours in one process."""
    started = time.perf_counter()
    first, num_images = 0.0, 0
    for unit in thread_pool_units(work.config(), 0, work.threads):
        first = first or time.perf_counter() - started
        num_images += unit.receipt()[0]
    assert num_images == work.num_images
    seconds = time.perf_counter() - started
    return Timing(images_per_second=num_images / seconds, first_seconds=first)


def ray_stream(work: Work, world_size: int) -> Timing:
    """Ours as one Ray Data pipeline, dealt to so many ranks (threads of this process)."""
    started = time.perf_counter()
    config = work.config(world_size)
    arrivals = deal(
        config,
        lambda units: [(time.perf_counter(), unit.receipt()[0]) for unit in units],
        work.threads,
    )
    assert sum(num for rank in arrivals for _, num in rank) == work.num_images
    return _steady([arrival for rank in arrivals for arrival in rank], started)


def _steady(arrivals: list[tuple[float, int]], started: float) -> Timing:
    """The rate of the later half of (moment, images).

    What was read ahead before anybody asked, and the start of processes, lie in the earlier half.
    """
    arrivals = sorted(arrivals)
    later = arrivals[len(arrivals) // 2 :]
    seconds = later[-1][0] - later[0][0]
    return Timing(
        images_per_second=sum(num for _, num in later[1:]) / max(seconds, 1e-9),
        first_seconds=arrivals[0][0] - started,
    )


def deal(
    config: StreamConfig, consume: Callable[[Iterator[Unit]], Any], num_cpus: int
) -> list[Any]:
    """What `consume` makes of each rank's units, all ranks at the same time."""
    iterators = ray_unit_iterators(config, num_cpus=num_cpus)
    with ThreadPoolExecutor(config.world_size) as pool:
        work = [
            pool.submit(lambda it, rank: consume(units_from_iterator(it, config, rank)), it, rank)
            for rank, it in enumerate(iterators)
        ]
        return [future.result() for future in work]


def first_unit_seconds(work: Work, num_steps: int) -> float:
    """Time to the first unit of a phase of so many steps, on a warm cluster.

    Warm: another pipeline has just come to its end, so that processes wait for work.
    """
    deal(replace(work.config(), num_steps=8), lambda units: sum(1 for _ in units), work.threads)
    started = time.perf_counter()
    config = replace(work.config(), num_steps=num_steps)
    (iterator,) = ray_unit_iterators(config, num_cpus=work.threads)
    units = units_from_iterator(iterator, config, 0)
    next(units)
    seconds = time.perf_counter() - started
    units.close()
    return seconds


# -- Ray Data's own reader -------------------------------------------------------------------------


def sequential_webdataset(work: Work) -> Timing:
    """`ray.data.read_webdataset`, every shard front to back, with the same decoding."""
    import ray.cloudpickle  # noqa: PLC0415
    import ray.data  # noqa: PLC0415
    from ray.data import DataContext, ExecutionResources  # noqa: PLC0415

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
    filesystem, path = work.store.root.filesystem()
    paths = [f"{path}/{shard.name}" for shard in work.store.manifest.shards]
    context = DataContext.get_current().copy()
    context.execution_options.resource_limits = ExecutionResources(cpu=work.threads)
    context.enable_progress_bars = False
    started = time.perf_counter()
    with DataContext.current(context):
        dataset = ray.data.read_webdataset(
            paths, filesystem=filesystem, decoder=None, suffixes=["jpg"]
        ).map_batches(_DecodeRows(work.image_size).__call__, batch_size=ROWS_PER_TASK)
        arrivals = [
            (time.perf_counter(), len(batch["images"]))
            for batch in dataset.iter_batches(batch_size=None, batch_format="numpy")
        ]
    return _steady(arrivals, started)


@dataclass(frozen=True)
class _DecodeRows:
    image_size: int

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        pixels = [image for image in decode_stored(list(batch["jpg"])) if image is not None]
        uniforms = np.random.default_rng(0).random((len(pixels), NUM_CROP_UNIFORMS))
        heights, widths = (np.array([image.shape[axis] for image in pixels]) for axis in (0, 1))
        boxes, flips = random_crop_boxes(heights, widths, uniforms, (0.2, 1.0))
        return {"images": crop_and_resize(pixels, boxes, flips, self.image_size)}
