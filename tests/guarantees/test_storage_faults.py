"""Pitfalls 31 and 35: storage faults are retried, then stop the run with a message that names
no record; the detail is for the private log alone."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.shards import ShardStore, StorageFault
from pipeline.data.stream import (
    StreamConfig,
    ray_unit_iterators,
    thread_pool_units,
    units_from_iterator,
)
from pipeline.privacy.sampling import PoissonPlan


@pytest.fixture
def copied(private_store: ShardStore, tmp_path: Path) -> ShardStore:
    shutil.copytree(private_store.root.local_path, tmp_path / "copied")
    return ShardStore(str(tmp_path / "copied"), retry_delays_seconds=(0.01, 0.01))


def damage(store: ShardStore, how: str) -> None:
    path = store.root.local_path / "000001.tar"
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "changed":
        for position in range(600, len(content), 700):
            content[position] ^= 0x40
        path.write_bytes(content)


def assert_says_nothing(fault: StorageFault) -> None:
    assert not re.search(r"\d{4,}|\.tar|shard \d|offset", str(fault)), "shard or record named"
    assert "shard 1" in fault.private_detail or "000001" in fault.private_detail
    copy = pickle.loads(pickle.dumps(fault))
    assert str(copy) == str(fault) and copy.private_detail == fault.private_detail


@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "changed"])
def test_wrong_bytes_are_never_returned(copied: ShardStore, how: str) -> None:
    expected = copied.read(np.arange(100))
    damage(copied, how)
    fresh = ShardStore(copied.root, retry_delays_seconds=(0.01, 0.01))
    assert fresh.read(np.arange(100)) == expected, "other shards are not concerned"
    with pytest.raises(StorageFault) as caught:
        fresh.read(np.arange(240))
    assert_says_nothing(caught.value)
    assert caught.value.__suppress_context__, "no traceback tells what the message does not"


def test_transient_faults_are_retried(copied: ShardStore, monkeypatch) -> None:
    expected = copied.read(np.arange(240))
    original, failures = ShardStore._shard, iter([OSError(503), None, OSError("reset"), None])

    def unreliable(self: ShardStore, number: int):
        failure = next(failures, None)
        if failure is not None:
            raise failure
        return original(self, number)

    monkeypatch.setattr(ShardStore, "_shard", unreliable)
    fresh = ShardStore(copied.root, retry_delays_seconds=(0.01, 0.01))
    assert fresh.read(np.arange(240)) == expected


def test_changed_index_is_found(copied: ShardStore) -> None:
    path = copied.root.local_path / "index.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageFault, match="differs from the digest in the manifest"):
        ShardStore(copied.root).read([0])


def stream_config(store: ShardStore) -> StreamConfig:
    return StreamConfig(
        plan=PoissonPlan(key=b"f" * 32, num_records=240, sampling_probability=0.3),
        store_root=str(store.root),
        augmentation_key=b"a" * 32,
        world_size=1,
        microbatch_size=64,
        microbatches_per_unit=2,
        image_size=16,
        num_steps=3,
        is_private=True,
    )


def test_thread_pool_stream_stops(copied: ShardStore) -> None:
    damage(copied, "changed")
    with pytest.raises(StorageFault) as caught:
        list(thread_pool_units(stream_config(copied)))
    assert_says_nothing(caught.value)


@pytest.mark.ray
def test_ray_stream_stops_and_ray_logs_nothing_of_it(ray_local, copied, capfd) -> None:
    damage(copied, "changed")
    config = stream_config(copied)
    (iterator,) = ray_unit_iterators(config, num_cpus=2)
    with pytest.raises(StorageFault) as caught:
        list(units_from_iterator(iterator, config, 0))
    assert_says_nothing(caught.value)
    printed = "".join(capfd.readouterr())
    assert "Traceback" not in printed and "offset" not in printed
