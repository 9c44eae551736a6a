"""Reads that may fail or hang: open files, threads that can be given up, pauses between tries."""

from __future__ import annotations

import functools
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Generic, Protocol, TypeVar

import pyarrow as pa
from pyarrow import fs

from pipeline.storage import Location

Result = TypeVar("Result")

NUM_REMOTE_READS = 64
LOCAL_DELAYS_SECONDS = (0.05, 0.5, 2.0)
REMOTE_DELAYS_SECONDS = (0.1, 0.5, 2.0, 8.0, 20.0)
READ_TIMEOUT_SECONDS = 30.0


class RangeReader(Protocol):
    """An open shard."""

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        """Bytes from an offset on; fewer at the end of the file."""


class LocalShard:
    """An open local file; `pread` needs no lock and, unlike a mapping, survives truncation."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        return os.pread(self._descriptor, num_bytes, offset)

    def __del__(self) -> None:
        # Closed when the last reader lets go: another thread may still read a dropped shard.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def remote_filesystem(location: Location) -> tuple[fs.FileSystem, str]:
    """The object store and the path on it; to be asked for once and kept.

    Arrow's S3 opens no further connection pool while a request of an earlier one is under way, so
    that one request that hangs would hold up whoever opens another.
    """
    # Arrow gives a store as many connections as it has such threads, or 25.
    if pa.io_thread_count() < NUM_REMOTE_READS:
        pa.set_io_thread_count(NUM_REMOTE_READS)
    return location.filesystem()


class Attempt(Generic[Result]):
    """One try of a read, begun on a thread that may be given up."""

    def __init__(self, read: Callable[[], Result], give_up: Callable[[], None]) -> None:
        self._read, self._give_up = read, give_up
        self._future: Future[Result] = Future()
        self._started: float | None = None

    def run(self) -> None:
        """Called by the thread."""
        self._started = time.monotonic()
        try:
            self._future.set_result(self._read())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self, timeout_seconds: float) -> Result:
        """What was read; raises what the read raised.

        Raises:
            TimeoutError: (an OSError) the read has taken so long; time spent waiting for a thread
                does not count.
        """
        while not self._future.done():
            spent = 0.0 if self._started is None else time.monotonic() - self._started
            if spent >= timeout_seconds:
                self._give_up()
                raise TimeoutError(f"no answer within {timeout_seconds:g} seconds")
            wait([self._future], timeout_seconds - spent)
        return self._future.result()


class ReadThreads:
    """At most so many reads at once, and one more for each that hangs and was given up.

    The threads never keep the process from ending, as those of an executor would.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_allowed = num_threads
        self._num_threads = self._num_idle = 0
        self._lock = threading.Lock()
        self._attempts: queue.SimpleQueue[Attempt] = queue.SimpleQueue()

    def submit(self, read: Callable[[], Result]) -> Attempt[Result]:
        """Begin a read as soon as a thread is free."""
        attempt = Attempt(read, self._give_up_a_thread)
        self._attempts.put(attempt)
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
            elif self._num_threads < self._num_allowed:
                self._start_thread()
        return attempt

    def _start_thread(self) -> None:
        self._num_threads += 1
        threading.Thread(target=self._work, name="shard-read", daemon=True).start()

    def _give_up_a_thread(self) -> None:
        with self._lock:
            self._num_allowed += 1
            self._start_thread()

    def _work(self) -> None:
        while True:
            self._attempts.get().run()
            with self._lock:
                self._num_idle += 1


def pauses(
    *, is_local: bool, delays_seconds: Sequence[float] | None = None
) -> Iterator[Callable[[], None]]:
    """Before each try a pause to be made: none, then longer and longer ones, each a little random.

    Random, so that many processes that were turned away together do not come back together.
    """
    if delays_seconds is None:
        delays_seconds = LOCAL_DELAYS_SECONDS if is_local else REMOTE_DELAYS_SECONDS
    yield lambda: None
    for delay in delays_seconds:
        yield functools.partial(time.sleep, delay * random.uniform(0.75, 1.25))
