"""In which order a public phase reads its data set: records at random, or whole shards."""

from __future__ import annotations

from typing import Literal

import numpy as np

from pipeline.data.shards import ShardStore
from pipeline.privacy.sampling import ShardShufflePlan, ShufflePlan

WASTEFUL_RECORD_BYTES = 256 * 2**10
RUN_BYTES = 2**20
LEAST_RUNS = 32


def public_plan(
    key: bytes, store: ShardStore, batch_size: int, reading: Literal["auto", "records", "shards"]
) -> ShufflePlan | ShardShufflePlan:
    """The records of a public phase's steps.

    Random access is wasteful, and `auto` reads whole shards, where all of these hold: the set lies
    in an object store (each record costs a request there), its records are small (a request costs
    as much as WASTEFUL_RECORD_BYTES), it has LEAST_RUNS shards or more and a batch LEAST_RUNS
    records or more (so that every step still mixes that many places). A run of neighbours is about
    RUN_BYTES long and at most one part in LEAST_RUNS of a batch.

    Args:
        key: of the shuffle, 32 bytes.
        store: the data set.
        batch_size: records per step.
        reading: "records" or "shards" to decide it by hand.
    """
    num_records, shards = store.num_records, store.manifest.shards
    record_bytes = sum(shard.num_bytes for shard in shards) // max(1, num_records)
    is_wasteful = (
        not store.root.is_local
        and record_bytes < WASTEFUL_RECORD_BYTES
        and min(len(shards), batch_size) >= LEAST_RUNS
    )
    if reading == "records" or (reading == "auto" and not is_wasteful):
        return ShufflePlan(key=key, num_records=num_records, batch_size=batch_size)
    run_length = max(1, min(RUN_BYTES // max(1, record_bytes), batch_size // LEAST_RUNS))
    return ShardShufflePlan(
        key=key,
        num_records=num_records,
        batch_size=batch_size,
        records_per_shard=_records_per_shard(store, len(shards)),
        num_open_shards=min(len(shards), max(LEAST_RUNS, batch_size // run_length)),
        run_length=run_length,
    )


def _records_per_shard(store: ShardStore, num_shards: int) -> int:
    """Records of every shard but the last: where the second shard begins."""
    num_records = store.num_records
    if num_shards < 2:
        return num_records
    candidates = np.arange(-(-num_records // num_shards), (num_records - 1) // (num_shards - 1) + 1)
    is_next = store.shards_of(candidates) > 0
    return int(candidates[is_next.argmax()]) if is_next.any() else -(-num_records // num_shards)
