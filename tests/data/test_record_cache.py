"""The local cache: right bytes whatever happens to it, never more than its limit."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pipeline.data.shards import CacheSettings, ShardStore
from pipeline.data.shards.cache import RecordCache
from pipeline.data.shards.store import ShardStore as Store

DIGEST, OTHER = "d" * 64, "e" * 64
MIB = 2**20


def files_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@pytest.fixture
def cached(private_store: ShardStore, tmp_path: Path) -> ShardStore:
    settings = CacheSettings(folder=str(tmp_path / "cache"), num_bytes=2 * MIB)
    return ShardStore(private_store.root, retry_delays_seconds=(), cache=settings)


def test_what_was_read_is_not_read_again(
    cached: ShardStore, private_store: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process's store neither."""
    expected = private_store.read(np.arange(240))
    assert cached.read([5, 9, 200]) == [expected[i] for i in (5, 9, 200)]
    again = ShardStore(cached.root, cache=cached.cache_settings)
    monkeypatch.setattr(Store, "start", lambda *_: pytest.fail("read from storage"))
    for store in (cached, again):
        assert store.read([200, 5, 5, 9]) == [expected[i] for i in (200, 5, 5, 9)]


def test_damaged_cache_is_a_miss(cached: ShardStore, private_store: ShardStore) -> None:
    expected = cached.read(np.arange(240))
    (ring,) = Path(cached.cache_settings.folder).glob("*.ring")
    content = bytearray(ring.read_bytes())
    for position in range(100, len(content), 150):
        content[position] ^= 0x10
    ring.write_bytes(content)
    assert cached.read(np.arange(240)) == expected == private_store.read(np.arange(240))


def test_cache_keeps_its_limit(tmp_path: Path, rng: np.random.Generator) -> None:
    """Far more is written than it may hold: the newest are found, the files never grow."""
    settings = CacheSettings(folder=str(tmp_path), num_bytes=2 * MIB)
    cache = RecordCache(settings, DIGEST, 1000)
    contents = {}
    for record_id in range(1000):
        contents[record_id] = rng.bytes(int(rng.integers(1, 9000)))
        cache.keep([record_id], [contents[record_id]])
        assert files_of(tmp_path) <= 2 * MIB
    places = cache.places(np.arange(1000))
    found = np.flatnonzero(places >= 0)
    assert 100 < len(found) < 500 and (np.diff(found) == 1).all() and found[-1] == 999
    for record_id in found.tolist():
        read = cache.read(int(places[record_id]), len(contents[record_id]))
        assert read == contents[record_id]
    assert cache.is_old(int(places[found[0]])) and not cache.is_old(int(places[999]))
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.glob("d*"))


def test_what_is_read_often_stays(tmp_path: Path, dataset_of) -> None:
    contents = [os.urandom(20_000) for _ in range(200)]
    plain = dataset_of(contents)
    settings = CacheSettings(folder=str(tmp_path / "cache"), num_bytes=2 * MIB)
    store = ShardStore(plain.root, cache=settings)
    for record_id in range(1, 200):
        store.read([0])
        store.read([record_id])
    assert store.cache is not None
    places = store.cache.places(np.array([0, 1, 199]))
    assert places[0] >= 0 and places[1] < 0 and places[2] >= 0


def test_one_folder_serves_one_data_set_after_another(tmp_path: Path) -> None:
    """An earlier one's files are deleted; of one in use they count."""
    settings = CacheSettings(folder=str(tmp_path), num_bytes=4 * MIB)
    first = RecordCache(settings, DIGEST, 10)
    with pytest.raises(ValueError, match="cache_bytes=4194304 leaves 0 bytes"):
        RecordCache(settings, OTHER, 10)
    del first
    second = RecordCache(settings, OTHER, 10)
    second.keep([3], [b"three"])
    assert not list(tmp_path.glob(f"{DIGEST[:32]}*")) and files_of(tmp_path) <= 4 * MIB
    del second
    smaller = CacheSettings(folder=str(tmp_path), num_bytes=2 * MIB)
    third = RecordCache(smaller, OTHER, 10)
    assert files_of(tmp_path) <= 2 * MIB and (third.places(np.arange(10)) < 0).all()


def test_limits_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cache_bytes is 5: it must be at least"):
        CacheSettings(folder=str(tmp_path), num_bytes=5)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="1000000 records need") as refusal:
        RecordCache(CacheSettings(folder=str(tmp_path), num_bytes=MIB), DIGEST, 10**6)
    del refusal
    gc.collect()
    assert os.listdir("/proc/self/fd") == before, "files closed once, and no other's"


def test_cache_that_breaks_is_no_cache(
    private_store: ShardStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    settings = CacheSettings(folder=str(tmp_path / "file"), num_bytes=2 * MIB)
    expected = private_store.read([1, 2])
    assert ShardStore(private_store.root, cache=settings).read([1, 2]) == expected
    settings = CacheSettings(folder=str(tmp_path / "full"), num_bytes=2 * MIB)
    store = ShardStore(private_store.root, cache=settings)

    def is_full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", is_full)
    assert store.read([1, 2]) == expected == store.read([1, 2])


WRITER = """
import sys, numpy as np
from pipeline.data.shards import CacheSettings
from pipeline.data.shards.cache import RecordCache
cache = RecordCache(CacheSettings(folder=sys.argv[1], num_bytes=2**21), "d" * 64, 500)
print("ready", flush=True)
draws = np.random.default_rng()
while True:
    record_id = int(draws.integers(500))
    cache.keep([record_id], [b"%03d" % record_id * 3000])
"""


def test_cache_survives_kills(tmp_path: Path) -> None:
    """Several writers at once, killed at any moment: what is found is right or told from it."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    time.sleep(0.3)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    settings = CacheSettings(folder=str(tmp_path), num_bytes=2 * MIB)
    cache = RecordCache(settings, DIGEST, 500)
    assert files_of(tmp_path) <= 2 * MIB
    places = cache.places(np.arange(500))
    found = np.flatnonzero(places >= 0).tolist()
    right = [i for i in found if cache.read(int(places[i]), 9000) == b"%03d" % i * 3000]
    assert len(right) >= len(found) - len(writers) and len(right) > 50
    cache.keep([7], [b"seven"])
    assert cache.read(int(cache.places(np.array([7]))[0]), 5) == b"seven"
