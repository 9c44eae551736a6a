"""The rule by which a public phase reads whole shards, and that it delivers the same records."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pipeline.data.manifest import Shard
from pipeline.data.shards import ShardStore
from pipeline.data.stream import StreamConfig, thread_pool_units
from pipeline.privacy.sampling import ShardShufflePlan, ShufflePlan
from pipeline.storage import Location
from pipeline.training.reading import public_plan

KEY = b"r" * 32


@dataclass
class Manifest:
    shards: list[Shard]


@dataclass
class Store:
    """What the rule asks of a data set."""

    num_records: int
    num_shards: int
    record_bytes: int
    uri: str = "s3://bucket"
    manifest: Manifest = field(init=False)

    def __post_init__(self) -> None:
        size = self.record_bytes * self.num_records // self.num_shards
        self.manifest = Manifest(
            [Shard(name="x", num_bytes=size, sha256="0" * 64)] * self.num_shards
        )
        self.root = Location(self.uri)

    def shards_of(self, ids: np.ndarray) -> np.ndarray:
        return np.asarray(ids) // 1000


def test_rule_of_when_random_access_is_wasteful() -> None:
    large = Store(num_records=99_500, num_shards=100, record_bytes=30_000)
    plan = public_plan(KEY, large, 4096, "auto")
    assert isinstance(plan, ShardShufflePlan)
    assert (plan.records_per_shard, plan.run_length, plan.num_open_shards) == (1000, 34, 100)
    by_records = [
        public_plan(KEY, Store(99_500, 100, 30_000, "/local/disk"), 4096, "auto"),
        public_plan(KEY, Store(99_500, 100, 300_000), 4096, "auto"),
        public_plan(KEY, Store(9_900, 10, 30_000), 4096, "auto"),
        public_plan(KEY, large, 16, "auto"),
        public_plan(KEY, large, 4096, "records"),
    ]
    assert all(isinstance(plan, ShufflePlan) for plan in by_records)


def test_shards_by_hand_deliver_every_record_once(public_store: ShardStore) -> None:
    plan = public_plan(KEY, public_store, 40, "shards")
    assert isinstance(plan, ShardShufflePlan)
    config = StreamConfig(
        plan=plan,
        store_root=str(public_store.root),
        augmentation_key=KEY,
        world_size=1,
        microbatch_size=8,
        microbatches_per_unit=1,
        image_size=16,
        num_steps=3,
        is_private=False,
    )
    ids = np.concatenate([unit.record_ids for unit in thread_pool_units(config)])
    assert (np.sort(ids[ids >= 0]) == np.arange(120)).all()


def test_records_per_shard_are_those_of_the_index(private_store: ShardStore) -> None:
    plan = public_plan(KEY, private_store, 40, "shards")
    assert isinstance(plan, ShardShufflePlan) and plan.records_per_shard == 100
