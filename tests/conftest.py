"""Shared by all tests: one thread per process, one local Ray a session, small datasets."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.data.manifest import DatasetManifest, Shard
from pipeline.data.prepare import PrepareConfig, prepare
from pipeline.data.shards import (
    INDEX_NAME,
    INDEX_SCHEMA,
    ShardStore,
    TableWriter,
    build_shard,
    stored_digest,
)
from pipeline.data.synthetic import generate_batch
from pipeline.storage import Location

torch.set_num_threads(1)

pytest_plugins = ["phase_fixtures"]


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """A local Ray of this test session, whatever other clusters run on this machine."""
    import ray

    repository = str(Path(__file__).parents[1])
    paths = [repository, *filter(None, [os.environ.get("PYTHONPATH")])]
    ray.init(
        address="local",
        num_cpus=6,
        include_dashboard=False,
        logging_level=logging.ERROR,
        runtime_env={
            "env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        },
    )
    yield
    ray.shutdown()


def write_image_folder(folder: Path, num_images: int, *, seed: int = 0, size: int = 40) -> None:
    """Procedural PNG files in two class folders, `a` and `b`, every picture another one."""
    for index, pixels in enumerate(generate_batch("dead_leaves", seed, 0, num_images, size)):
        path = folder / ("a" if index % 2 == 0 else "b") / f"{index:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[:, : size - index % 3]).save(path)


@pytest.fixture
def image_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder of images: image_folder("name", 10, seed=1) -> its path."""

    def make(name: str, num_images: int, **options: int) -> Path:
        write_image_folder(tmp_path / name, num_images, **options)
        return tmp_path / name

    return make


@pytest.fixture(scope="session")
def private_store(tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    """A prepared private dataset: 240 colour images of a few shapes, labels 0 and 1, 3 shards."""
    folder = tmp_path_factory.mktemp("private")
    write_image_folder(folder / "images", 240)
    config = PrepareConfig(
        name="private",
        source=f"imagefolder:{folder / 'images'}",
        visibility="private",
        domain="tests",
        image_short_side=32,
        records_per_shard=100,
    )
    prepare(config, Location(str(folder / "prepared")), num_workers=1)
    return ShardStore(str(folder / "prepared"))


@pytest.fixture(scope="session")
def public_store(tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    """A prepared public dataset: 120 procedural images of 32 x 32 pixels."""
    folder = tmp_path_factory.mktemp("public")
    config = PrepareConfig(
        name="public",
        source="synthetic:dead_leaves+fractals+textures?num_images=120&size=32&seed=7",
        visibility="public",
        image_short_side=32,
    )
    prepare(config, Location(str(folder)), num_workers=1)
    return ShardStore(str(folder))


@pytest.fixture
def dataset_of(tmp_path: Path) -> Callable[..., ShardStore]:
    """Makes a dataset of given stored bytes, decodable or not: dataset_of(contents)."""

    def make(
        contents: list[bytes], *, visibility: str = "private", name: str = "made"
    ) -> ShardStore:
        root = Location(str(tmp_path / name))
        tar, offsets = build_shard(0, contents, [-1] * len(contents))
        (root / "000000.tar").write_bytes(tar)
        index = TableWriter(root / INDEX_NAME, INDEX_SCHEMA)
        index.append(
            {
                "shard": np.zeros(len(contents), np.uint32),
                "length": np.array([len(content) for content in contents], np.uint32),
                "offset": offsets,
                "label": np.full(len(contents), -1, np.int32),
                "digest": [stored_digest(content) for content in contents],
            }
        )
        manifest = DatasetManifest(
            name=name,
            num_records=len(contents),
            visibility=visibility,
            domain="tests" if visibility == "private" else None,
            image_short_side=32,
            source="test",
            shards=(
                Shard(
                    name="000000.tar",
                    num_bytes=len(tar),
                    sha256=hashlib.sha256(tar).hexdigest(),
                ),
            ),
            index_digest=index.close(),
            created_with="test",
        )
        manifest.save(root)
        return ShardStore(root, retry_delays_seconds=(0.01, 0.01))

    return make


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator for test data."""
    return np.random.default_rng(0)
