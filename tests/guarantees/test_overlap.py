"""Pitfalls 22 and 34: overlap leaves the private set; one original file, one privacy domain."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from pipeline.data.prepare import PrepareConfig, prepare, read_summary
from pipeline.data.shards import ShardStore
from pipeline.storage import Location


def config_of(folder: Path, visibility: str, **changes) -> PrepareConfig:
    domain = changes.pop("domain", "d" if visibility == "private" else None)
    return PrepareConfig(
        name=visibility,
        source=f"imagefolder:{folder}",
        visibility=visibility,
        domain=domain,
        image_short_side=32,
        **changes,
    )


@pytest.fixture
def folders(tmp_path, image_folder) -> tuple[Path, Path]:
    """A public folder of 12, and a private one of 20 that holds 5 of the same pictures as BMP."""
    public = image_folder("public", 12, seed=1)
    private = image_folder("private", 15, seed=2)
    for number, path in enumerate(sorted(public.rglob("*.png"))[:5]):
        Image.open(path).save(private / "a" / f"other_name_{number}.bmp")
    return public, private


def test_overlap_is_removed_from_the_private_set(tmp_path, folders) -> None:
    public, private = folders
    prepare(config_of(public, "public"), Location(str(tmp_path / "p")))
    out = Location(str(tmp_path / "q"))
    prepare(config_of(private, "private", exclude=(str(tmp_path / "p"),)), out)
    assert ShardStore(out).num_records == 15
    assert read_summary(out)["left_out"] == {"also_in_excluded_set": 5}
    digests = [
        {row.tobytes() for row in ShardStore(str(tmp_path / n)).pixel_digests()} for n in "pq"
    ]
    assert not digests[0] & digests[1]


def test_public_manifest_is_the_same_whatever_the_private_set(tmp_path, folders) -> None:
    public, private = folders
    before = prepare(config_of(public, "public"), Location(str(tmp_path / "before")))[""]
    for name, domain in (("one", "d"), ("two", "e")):
        prepare(
            config_of(private, "private", domain=domain, exclude=(str(tmp_path / "before"),)),
            Location(str(tmp_path / name)),
        )
        after = prepare(config_of(public, "public"), Location(str(tmp_path / f"after {name}")))[""]
        assert after.digest() == before.digest()


def test_public_set_cannot_be_cleaned_by_a_private_one(tmp_path, folders) -> None:
    public, private = folders
    prepare(config_of(private, "private"), Location(str(tmp_path / "private out")))
    with pytest.raises(ValueError, match="must not be chosen by looking at a private one"):
        prepare(
            config_of(public, "public", exclude=(str(tmp_path / "private out"),)),
            Location(str(tmp_path / "public out")),
        )


def test_original_file_of_another_domain_is_refused(tmp_path, folders) -> None:
    _, private = folders
    first = str(tmp_path / "first")
    prepare(config_of(private, "private", domain="hospital"), Location(first))
    other = tmp_path / "other"
    shutil.copytree(private / "b", other / "b")
    with pytest.raises(ValueError, match="privacy domain 'hospital'"):
        prepare(
            config_of(other, "private", domain="fresh budget", other_private=(first,)),
            Location(str(tmp_path / "second")),
        )
    prepare(
        config_of(other, "private", domain="hospital", other_private=(first,)),
        Location(str(tmp_path / "second")),
    )
