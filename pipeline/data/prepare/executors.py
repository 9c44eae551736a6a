"""Two ways to run a task on many items, with results in order: threads here, or Ray Data."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np

from pipeline.data.shards import StorageFault
from pipeline.storage import system_reason

Item = TypeVar("Item")
Result = TypeVar("Result")


class Run(Protocol):
    """Runs a task on each item and yields the results in the items' order."""

    def __call__(
        self, task: Callable[[Item], Result], items: Sequence[Item]
    ) -> Iterator[Result]: ...


def run_with_threads(
    task: Callable[[Item], Result], items: Sequence[Item], *, num_threads: int
) -> Iterator[Result]:
    """On threads of this process; at most two items per thread are in work or waiting."""
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


def run_with_ray(
    task: Callable[[Item], Result], items: Sequence[Item], *, num_cpus: int | None = None
) -> Iterator[Result]:
    """As Ray Data tasks, one per item. A task's error comes back as a value: Ray would log its
    traceback, and with it which record it was about.
    """
    import ray.data  # noqa: PLC0415  seconds to load, and not needed for threads
    from ray.data import DataContext, ExecutionResources  # noqa: PLC0415

    if not items:
        return
    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    if num_cpus:
        context.execution_options.resource_limits = ExecutionResources(cpu=num_cpus)
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    rows = [{"item": pickle.dumps(item)} for item in items]
    with DataContext.current(context):
        dataset = ray.data.from_items(rows, override_num_blocks=len(rows))
        results = dataset.map_batches(_RayTask(task).__call__, batch_size=1)
        for row in results.iter_rows():
            outcome = pickle.loads(row["outcome"])
            if isinstance(outcome, StorageFault):
                raise outcome
            yield outcome


class _RayTask:
    def __init__(self, task: Callable[[Any], Any]) -> None:
        self._task = task

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        outcome: Any
        try:
            outcome = self._task(pickle.loads(batch["item"][0]))
        except StorageFault as fault:
            outcome = fault
        except OSError as error:
            outcome = StorageFault(
                f"a prepare task could not read or write storage ({system_reason(error)})",
                str(error),
            )
        except Exception as error:
            outcome = StorageFault(
                f"a prepare task failed ({type(error).__name__})", f"{type(error)}: {error}"
            )
        return {"outcome": np.array([pickle.dumps(outcome)], dtype=object)}
