"""Pitfall 35 on an object store: what answers 503, hangs, resets, is missing, cut or changed.

Short troubles are waited out; lasting ones stop the run in words that name no record. Against a
real HTTP server, through pyarrow's own S3 client.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from s3_server import FaultyS3, faulty_s3

from pipeline.data.shards import INDEX_NAME, ShardStore, StorageFault
from pipeline.data.shards.index import local_copy
from pipeline.data.stream import StreamConfig, thread_pool_units
from pipeline.privacy.sampling import PoissonPlan, checksum
from pipeline.storage import Location

SOON = (0.01, 0.01, 0.01, 0.01)


@pytest.fixture
def server(
    private_store: ShardStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyS3]:
    """The private data set in a bucket; this test's own folder for the copy of its index."""
    shutil.copytree(private_store.root.local_path, tmp_path / "bucket")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with faulty_s3(tmp_path / "bucket", monkeypatch) as serving:
        yield serving


def remote_store(timeout_seconds: float = 20.0) -> ShardStore:
    return ShardStore("s3://bucket", retry_delays_seconds=SOON, timeout_seconds=timeout_seconds)


@pytest.mark.parametrize("fault", ["", "503", "reset", "hang"])
def test_short_troubles_are_waited_out(
    server: FaultyS3, private_store: ShardStore, fault: str
) -> None:
    ids = np.arange(0, 240, 7)
    store = remote_store(timeout_seconds=1.0)
    store.labels([0])
    server.fault, server.num_faults = fault, 4
    assert store.read(ids) == private_store.read(ids)
    assert not server.is_over.is_set(), "a read that hangs is given up, not waited for"


@pytest.mark.parametrize("fault", ["503", "reset", "hang", "missing", "truncated", "changed"])
def test_lasting_troubles_stop_with_a_message_that_names_nothing(
    server: FaultyS3, fault: str
) -> None:
    store = remote_store(timeout_seconds=0.3)
    shard = server.folder / "000001.tar"
    content = bytearray(shard.read_bytes())
    if fault == "missing":
        shard.unlink()
    elif fault == "truncated":
        shard.write_bytes(content[:700])
    elif fault == "changed":
        shard.write_bytes(bytes(255 - byte for byte in content))
    else:
        server.fault, server.num_faults = fault, 10**6
    with pytest.raises(StorageFault) as caught:
        store.read([150, 151])
    assert not re.search(r"\d{3,}|\.tar|shard \d|offset", str(caught.value))
    assert "shard 000001.tar" in caught.value.private_detail
    assert re.search(r"records 15[01]", caught.value.private_detail)


def test_a_stream_over_bad_storage_delivers_exactly_the_plan(server: FaultyS3) -> None:
    config = StreamConfig(
        plan=PoissonPlan(key=b"o" * 32, num_records=240, sampling_probability=0.3),
        store_root="s3://bucket",
        augmentation_key=b"a" * 32,
        world_size=1,
        microbatch_size=16,
        microbatches_per_unit=1,
        image_size=16,
        num_steps=3,
        is_private=True,
    )
    server.fault, server.num_faults = "503", 5
    units = list(thread_pool_units(config, num_threads=2))
    for step in config.steps:
        receipts = np.array([unit.receipt() for unit in units if unit.step == step])
        ids = config.plan.record_ids(step)
        assert receipts[:, 0].sum() == len(ids)
        assert receipts[:, 1].sum() % 2**62 == checksum(ids)


def test_the_index_is_fetched_once_a_machine(server: FaultyS3, private_store: ShardStore) -> None:
    location = Location("s3://bucket") / INDEX_NAME
    digest = private_store.manifest.index_digest
    start = threading.Barrier(6)

    def fetch() -> Path:
        start.wait()
        return local_copy(location, digest)

    with ThreadPoolExecutor(6) as pool:
        paths = {future.result() for future in [pool.submit(fetch) for _ in range(6)]}
    (path,) = paths
    assert path.read_bytes() == (server.folder / INDEX_NAME).read_bytes()
    assert [name for name, _ in server.reads] == [INDEX_NAME]
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_what_a_killed_process_left_of_the_index_is_begun_anew(
    server: FaultyS3, private_store: ShardStore
) -> None:
    digest = private_store.manifest.index_digest
    path = local_copy(Location("s3://bucket") / INDEX_NAME, digest)
    whole = path.read_bytes()
    path.unlink()
    path.with_suffix(".part").write_bytes(whole[:100])
    assert local_copy(Location("s3://bucket") / INDEX_NAME, digest).read_bytes() == whole


def test_a_changed_index_is_not_kept(server: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    index = server.folder / INDEX_NAME
    content = bytearray(index.read_bytes())
    content[-200] ^= 1
    index.write_bytes(content)
    monkeypatch.setattr("pipeline.data.shards.reads.REMOTE_DELAYS_SECONDS", (0.01,))
    with pytest.raises(StorageFault, match="differs from the digest in the manifest"):
        remote_store().read([0])
    assert not list(Path(tempfile.gettempdir()).rglob("*.arrow"))
    assert not list(Path(tempfile.gettempdir()).rglob("*.part"))


def test_reads_of_a_step_go_from_shard_to_shard(server: FaultyS3, rng: np.random.Generator) -> None:
    """Whatever the order asked for: one request a run of neighbours, shards in order."""
    store = remote_store()
    rows = store._rows(rng.permutation(240))
    groups = list(store.groups(rows, np.arange(240)))
    places = [(int(rows.shard[group[0]]), int(rows.offset[group].min())) for group in groups]
    assert places == sorted(places)
