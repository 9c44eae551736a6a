"""A process that reads records of random steps and prints its memory: see benchmarks/stream.py.

It loads what a data task loads, and first reads and decodes nothing: `anonymous_bytes_before`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from pipeline.data.shards import ShardStore
from pipeline.data.views import PixelReader


def anonymous_bytes() -> int:
    """Resident memory of this process that is not a mapped file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def main(root: str) -> None:
    """Twenty steps of 4,096 records."""
    before = anonymous_bytes()
    store = PixelReader(ShardStore(root), 0).store
    draws = np.random.default_rng(0)
    for _ in range(20):
        ids = np.unique(draws.integers(0, store.num_records, 4096))
        store.read(ids)
        store.labels(ids)
    found = {"anonymous_bytes": anonymous_bytes(), "anonymous_bytes_before": before}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
