"""shards.py: the tars are WebDataset's, the index is small, reads are exact and in order."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile

import numpy as np
import pytest

from pipeline.data import shards
from pipeline.data.shards import (
    INDEX_NAME,
    INDEX_SCHEMA,
    ROWS_PER_BATCH,
    ShardStore,
    TableWriter,
    build_shard,
    stored_digest,
)
from pipeline.data.shards import store as store_module
from pipeline.data.shards.index import MappedTable
from pipeline.data.shards.store import Rows
from pipeline.storage import Location


def test_shards_are_ordinary_tars(private_store: ShardStore) -> None:
    names, record_id = [], 0
    for shard in private_store.manifest.shards:
        with tarfile.open(str(private_store.root / shard.name)) as tar:
            for info in tar.getmembers():
                names.append(info.name)
                content = tar.extractfile(info).read()
                if info.name.endswith(".jpg"):
                    assert info.name == f"{record_id:012d}.jpg"
                    assert content == private_store.read([record_id])[0]
                    record_id += 1
                else:
                    assert int(content) == private_store.labels([record_id - 1])[0]
    assert record_id == private_store.num_records == 240
    assert len(names) == 480


def test_same_records_give_the_same_tar_as_tarfile_reads() -> None:
    contents = [b"abc", b"d" * 512, b""]
    tar, offsets = build_shard(7, contents, [-1, 3, 12])
    assert tar == build_shard(7, contents, [-1, 3, 12])[0]
    for offset, content in zip(offsets.tolist(), contents, strict=True):
        assert tar[offset : offset + len(content)] == content
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        assert opened.getnames() == [
            "000000000007.jpg",
            *("000000000008.jpg", "000000000008.cls"),
            *("000000000009.jpg", "000000000009.cls"),
        ]


def test_reads_come_in_the_order_asked_for(private_store: ShardStore, rng) -> None:
    everything = private_store.read(np.arange(240))
    ids = rng.integers(0, 240, 500)
    assert private_store.read(ids) == [everything[i] for i in ids]
    assert private_store.read([]) == []
    assert (private_store.labels(ids) == private_store.labels(np.arange(240))[ids]).all()
    assert private_store.labels([]).shape == (0,)


def test_ids_outside_are_refused(private_store: ShardStore) -> None:
    for ids in ([240], [-1]):
        with pytest.raises(ValueError, match="outside"):
            private_store.read(ids)


def test_digests_are_of_pixels_and_of_original_bytes(private_store: ShardStore) -> None:
    pixels, sources = private_store.pixel_digests(), private_store.source_digests()
    assert pixels.shape == sources.shape == (240, 32)
    files = sorted((private_store.root.local_path.parent / "images").rglob("*.png"))
    expected = [hashlib.sha256(file.read_bytes()).digest() for file in files]
    assert [row.tobytes() for row in sources] == expected
    assert (private_store.pixel_digests([5, 3]) == pixels[[5, 3]]).all()


def test_store_is_picklable_and_works_elsewhere(private_store: ShardStore) -> None:
    private_store.read([0])
    copy = pickle.loads(pickle.dumps(private_store))
    assert copy.read([3]) == private_store.read([3])


@pytest.mark.parametrize("how", ["changed", "shorter", "missing", "index"])
@pytest.mark.parametrize("num_bytes", [shards.MAX_CHECKED_BYTES, 0])
def test_check_files_names_what_is_damaged(
    private_store: ShardStore, tmp_path, monkeypatch, how: str, num_bytes: int
) -> None:
    """Sizes are compared always, contents where they are few bytes."""
    import shutil

    monkeypatch.setattr(store_module, "MAX_CHECKED_BYTES", num_bytes)
    shutil.copytree(private_store.root.local_path, tmp_path / "copy")
    ShardStore(str(tmp_path / "copy")).check_files()
    path = tmp_path / "copy" / ("index.arrow" if how == "index" else "000001.tar")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content[:-512] if how == "shorter" else content)
    if how == "missing":
        path.unlink()
    store = ShardStore(str(tmp_path / "copy"))
    if how == "changed" and not num_bytes:
        store.check_files()
        return
    with pytest.raises(shards.StorageFault, match="delete that folder") as fault:
        store.check_files()
    assert path.name in str(fault.value) and str(tmp_path / "copy") in str(fault.value)


def test_index_needs_at_most_40_bytes_a_record_in_whole_batches(tmp_path, rng) -> None:
    num = 2 * ROWS_PER_BATCH + 5
    writer = TableWriter(Location(str(tmp_path / INDEX_NAME)), INDEX_SCHEMA)
    columns = {
        "shard": np.arange(num, dtype=np.uint32) // 1000,
        "length": rng.integers(0, 1000, num, dtype=np.uint32),
        "offset": np.arange(num, dtype=np.uint64) * 7,
        "label": np.arange(num, dtype=np.int32) % 10,
        "digest": [stored_digest(b"%d" % i) for i in range(num)],
    }
    for part in (slice(0, 10), slice(10, num - 3), slice(num - 3, num)):
        writer.append({name: column[part] for name, column in columns.items()})
    digest = writer.close()
    path = tmp_path / INDEX_NAME
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert path.stat().st_size <= 40 * num
    table = MappedTable(path, digest, num)
    rows = np.array([num - 1, 0, ROWS_PER_BATCH, ROWS_PER_BATCH - 1, 12])
    for name in ("shard", "length", "offset", "label"):
        assert (table.take(name, rows) == columns[name][rows]).all()
    assert [d.tobytes() for d in table.take("digest", rows)] == [columns["digest"][i] for i in rows]


class CountingReader:
    """An object store's file: counts what is read."""

    def __init__(self, path: str) -> None:
        self.content = open(path, "rb").read()
        self.num_bytes, self.num_requests = 0, 0

    def read_at(self, num_bytes: int, offset: int) -> bytes:
        self.num_bytes += num_bytes
        self.num_requests += 1
        return self.content[offset : offset + num_bytes]


def test_object_store_reads_waste_at_most_five_percent(
    private_store: ShardStore, monkeypatch, rng
) -> None:
    store = ShardStore(private_store.root)
    expected = private_store.read(np.arange(240))
    _ = store.labels([0])  # opens the index while the folder still counts as local
    readers: dict[int, CountingReader] = {}

    def open_shard(number: int) -> CountingReader:
        path = str(private_store.root / store.manifest.shards[number].name)
        return readers.setdefault(number, CountingReader(path))

    monkeypatch.setattr(Location, "is_local", property(lambda self: False))
    monkeypatch.setattr(store, "_shard", open_shard)
    for ids in (np.arange(240), np.sort(rng.choice(240, 60, replace=False)), np.array([5, 5, 7])):
        before = sum(reader.num_bytes for reader in readers.values())
        assert store.read(ids) == [expected[i] for i in ids]
        useful = sum(len(expected[i]) for i in set(ids.tolist()))
        read = sum(reader.num_bytes for reader in readers.values()) - before
        assert read <= 1.05 * useful


def test_object_store_reads_join_neighbours(tmp_path, monkeypatch) -> None:
    """Large records in one shard: their headers between them are under 5 %, so one request."""
    contents = [bytes([i]) * 40_000 for i in range(20)]
    tar, offsets = build_shard(0, contents, [-1] * 20)
    rows = Rows(
        np.zeros(20, np.uint32),
        np.full(20, 40_000, np.uint32),
        offsets,
        np.full(20, -1, np.int32),
        np.zeros((20, 16), np.uint8),
    )
    monkeypatch.setattr(Location, "is_local", property(lambda self: False))
    groups = list(ShardStore("/nowhere").groups(rows, np.arange(20)))
    assert len(groups) == 1 and len(tar) > 800_000
