"""DatasetManifest: identity, strictness, privacy domain."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.data.manifest import MANIFEST_NAME, DatasetManifest, Shard
from pipeline.storage import Location

DIGEST = "0" * 64


def make(**changes: Any) -> DatasetManifest:
    fields: dict[str, Any] = {
        "name": "photos",
        "num_records": 3,
        "visibility": "public",
        "image_short_side": 64,
        "source": "imagefolder:/photos",
        "class_names": ("a", "b"),
        "shards": (Shard(name="000000.tar", num_bytes=10, sha256=DIGEST),),
        "index_digest": DIGEST,
        "created_with": "test",
    }
    return DatasetManifest(**{**fields, **changes})


def test_saved_and_loaded_manifest_has_the_same_digest(tmp_path) -> None:
    manifest = make()
    manifest.save(Location(str(tmp_path)))
    assert DatasetManifest.load(Location(str(tmp_path))) == manifest
    assert DatasetManifest.load(Location(str(tmp_path))).digest() == manifest.digest()


def test_digest_depends_on_every_field() -> None:
    digests = {
        make().digest(),
        make(name="other").digest(),
        make(num_records=4).digest(),
        make(visibility="private", domain="d").digest(),
        make(index_digest="1" * 64).digest(),
        make(origin="a camera").digest(),
    }
    assert len(digests) == 6


def test_private_needs_a_domain_and_public_has_none() -> None:
    with pytest.raises(ValueError, match="domain is missing"):
        make(visibility="private")
    with pytest.raises(ValueError, match="belong to private"):
        make(domain="d")
    assert make(visibility="private", domain="d").is_private


def test_unknown_key_is_an_error(tmp_path) -> None:
    make().save(Location(str(tmp_path)))
    path = tmp_path / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "visibilty": "public"}))
    with pytest.raises(ValueError, match="visibilty"):
        DatasetManifest.load(Location(str(tmp_path)))


def test_folder_without_manifest_is_no_dataset(tmp_path) -> None:
    assert not DatasetManifest.exists(Location(str(tmp_path)))
    with pytest.raises(ValueError, match="not a prepared dataset"):
        DatasetManifest.load(Location(str(tmp_path)))
