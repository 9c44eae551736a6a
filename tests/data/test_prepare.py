"""prepare: the same bytes however it is run, duplicates, splits, resuming, clear refusals."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.data.images import decode_image, encode_jpeg
from pipeline.data.manifest import DatasetManifest, split_part
from pipeline.data.prepare import (
    SUMMARY_NAME,
    PrepareConfig,
    PrepareProgress,
    prepare,
    read_summary,
)
from pipeline.data.shards import ShardStore, StorageFault
from pipeline.storage import Location


def config_of(source: Path | str, **changes: Any) -> PrepareConfig:
    fields: dict[str, Any] = {
        "name": "photos",
        "source": source if isinstance(source, str) else f"imagefolder:{source}",
        "visibility": "public",
        "image_short_side": 32,
        "records_per_shard": 7,
    }
    return PrepareConfig(**{**fields, **changes})


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def many_units(monkeypatch) -> None:
    """A unit every five files, so that a small folder has several."""
    monkeypatch.setattr("pipeline.data.sources.imagefolder.FILES_PER_UNIT", 5)


def test_same_bytes_for_any_number_of_workers(tmp_path, image_folder, many_units) -> None:
    folder = image_folder("images", 33)
    for workers in (1, 3):
        prepare(config_of(folder), Location(str(tmp_path / str(workers))), num_workers=workers)
    files = files_of(tmp_path / "1")
    assert files == files_of(tmp_path / "3")
    assert sorted(files) == [
        *(f"00000{n}.tar" for n in range(5)),
        *("index.arrow", "manifest.json", "prepare_summary.json", "sources.arrow"),
    ]
    manifest = DatasetManifest.load(Location(str(tmp_path / "1")))
    assert manifest.num_records == 33 and manifest.class_names == ("a", "b")


def test_images_are_resized_once_and_keep_their_labels(tmp_path, image_folder) -> None:
    folder = image_folder("images", 12, size=80)
    prepare(config_of(folder), Location(str(tmp_path / "out")))
    store = ShardStore(str(tmp_path / "out"))
    originals = sorted(folder.rglob("*.png"))
    for record_id, path in enumerate(originals):
        pixels = decode_image(store.read([record_id])[0]).rgb
        width, height = Image.open(path).size
        assert min(pixels.shape[:2]) == 32
        expected = Image.open(path).resize((pixels.shape[1], pixels.shape[0]), Image.BICUBIC)
        expected = decode_image(encode_jpeg(np.array(expected))).rgb
        assert np.abs(pixels.astype(int) - expected).mean() < 1 and width <= height
    assert store.labels(np.arange(12)).tolist() == [0] * 6 + [1] * 6


def test_second_call_returns_at_once_and_other_settings_are_refused(tmp_path, image_folder) -> None:
    folder, out = image_folder("images", 5), Location(str(tmp_path / "out"))
    first = prepare(config_of(folder), out)
    shutil.rmtree(folder)  # nothing is read again
    assert prepare(config_of(folder), out) == first
    with pytest.raises(ValueError, match="already holds dataset 'photos'"):
        prepare(config_of(folder, image_short_side=64), out)


def test_interrupted_prepare_goes_on_where_it_was(
    tmp_path, image_folder, many_units, monkeypatch
) -> None:
    folder = image_folder("images", 33)
    prepare(config_of(folder), Location(str(tmp_path / "whole")))
    for stage, num_done in (("reading", 3), ("writing", 2)):
        out = tmp_path / stage

        def interrupt(progress: PrepareProgress, stage=stage, num_done=num_done) -> None:
            if (progress.stage, progress.num_done) == (stage, num_done):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare(config_of(folder), Location(str(out)), interrupt, num_workers=1)
        assert not DatasetManifest.exists(Location(str(out)))
        read = []
        original = Location.read_bytes

        def counting(self: Location, read=read, original=original) -> bytes:
            read.append(self.uri)
            return original(self)

        with monkeypatch.context() as patched:
            patched.setattr(Location, "read_bytes", counting)
            prepare(config_of(folder), Location(str(out)), num_workers=1)
        num_files_read = sum(uri.endswith(".png") for uri in read)
        assert num_files_read == (33 - 15 if stage == "reading" else 0)
        assert files_of(out) == files_of(tmp_path / "whole")


def test_equal_pictures_are_merged_and_the_first_survives(tmp_path) -> None:
    folder = tmp_path / "images"
    pixels = np.random.default_rng(0).integers(0, 256, (3, 10, 10, 3), dtype=np.uint8)
    for name in ("a/1.png", "a/2.bmp", "b/3.tiff", "b/4.png", "c/5.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels[0]).save(folder / "a/1.png")
    Image.fromarray(pixels[0]).save(folder / "a/2.bmp")  # a copy with the same label
    Image.fromarray(pixels[1]).save(folder / "b/3.tiff")
    Image.fromarray(pixels[2]).save(folder / "b/4.png")
    Image.fromarray(pixels[1]).save(folder / "c/5.png")  # a copy with another label
    out = Location(str(tmp_path / "out"))
    prepare(config_of(folder), out)
    store = ShardStore(out)
    assert store.num_records == 3
    assert store.labels([0, 1, 2]).tolist() == [0, -1, 1]
    summary = read_summary(out)
    assert summary["left_out"] == {"duplicate": 2}
    assert summary["num_label_conflicts"] == 1
    kept = Location(str(tmp_path / "kept"))
    assert prepare(config_of(folder, deduplicate="none"), kept)[""].num_records == 5


def test_deduplication_by_buckets_finds_the_same(
    tmp_path, image_folder, many_units, monkeypatch
) -> None:
    folder = image_folder("images", 30)
    for index, path in enumerate(sorted(folder.rglob("*.png"))[::2]):
        shutil.copy(path, folder / "b" / f"copy{index}.png")
    prepare(config_of(folder), Location(str(tmp_path / "one")))
    monkeypatch.setattr("pipeline.data.prepare.exchange.BUCKET_ROWS", 5)
    monkeypatch.setattr("pipeline.data.prepare.exchange.TASK_RECORDS", 4)
    prepare(config_of(folder), Location(str(tmp_path / "many")))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")
    assert ShardStore(str(tmp_path / "one")).num_records == 30


def test_splits_are_disjoint_by_public_hash(tmp_path, image_folder, many_units) -> None:
    folder = image_folder("images", 60)
    splits = {"train": 0.75, "held_out": 0.25}
    out = Location(str(tmp_path / "out"))
    config = config_of(folder, splits=splits, visibility="private", domain="d")
    manifests = prepare(config, out)
    assert set(manifests) == {"train", "held_out"} and prepare(config, out) == manifests
    stores = {name: ShardStore(out / name) for name in splits}
    digests = {
        name: {row.tobytes() for row in store.pixel_digests()} for name, store in stores.items()
    }
    assert not digests["train"] & digests["held_out"]
    assert sum(len(part) for part in digests.values()) == 60
    assert 4 <= len(digests["held_out"]) <= 26
    assert all(manifest.is_private for manifest in manifests.values())
    # A record's split depends on itself and the salt, not on the others.
    fewer = tmp_path / "fewer"
    shutil.copytree(folder / "a", fewer / "a")
    prepare(config_of(fewer, splits=splits), Location(str(tmp_path / "out2")))
    again = ShardStore(str(tmp_path / "out2" / "train")).pixel_digests()
    assert {row.tobytes() for row in again} <= digests["train"]


def test_splits_of_one_preparation_say_so(tmp_path, image_folder) -> None:
    """And no others: what was made anew, or is not cut, may share records with anything."""
    splits = {"train": 0.75, "held_out": 0.25}
    private = {"visibility": "private", "domain": "d"}
    config = config_of(image_folder("images", 30), splits=splits, **private)
    out = Location(str(tmp_path / "out"))

    def made() -> list[str]:
        prepare(config, out)
        return [split_part(out / name) for name in splits]

    first = made()
    assert [part.partition("/")[2] for part in first] == list(splits)
    assert len({part.partition("/")[0] for part in first}) == 1 and made() == first
    (out / "train").delete()
    second = made()
    assert not set(first) & set(second)
    assert len({part.partition("/")[0] for part in second}) == 1
    whole = Location(str(tmp_path / "whole"))
    prepare(replace(config, splits=None), whole)
    assert split_part(whole) == ""
    (out / "train" / "split.json").write_text("{}")
    with pytest.raises(ValueError, match=r"split\.json is damaged"):
        split_part(out / "train")


def test_labels_outside_the_class_list_are_dropped(tmp_path, image_folder) -> None:
    out = Location(str(tmp_path / "out"))
    manifest = prepare(config_of(image_folder("images", 6), class_names=("a",)), out)[""]
    assert ShardStore(out).labels(np.arange(6)).tolist() == [0, 0, 0, -1, -1, -1]
    assert manifest.class_names == ("a",) and read_summary(out)["num_labels_dropped"] == 3


def test_summary_of_a_private_set_is_for_its_owner_alone(tmp_path, image_folder) -> None:
    folder = image_folder("images", 4)
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    (folder / "empty.jpg").write_bytes(b"")
    out = tmp_path / "out"
    prepare(config_of(folder, visibility="private", domain="d"), Location(str(out)))
    assert (out / "prepare_summary.json").stat().st_mode & 0o777 == 0o600
    summary = json.loads((out / "prepare_summary.json").read_text())
    assert summary["left_out"] == {"empty": 1, "truncated_or_damaged": 1}
    assert "left_out" not in (out / "manifest.json").read_text()


def test_progress_counts_up_to_the_whole(tmp_path, image_folder, many_units) -> None:
    seen: list[PrepareProgress] = []
    prepare(config_of(image_folder("images", 22)), Location(str(tmp_path / "out")), seen.append)
    for stage, num_units in (("reading", 5), ("writing", 4)):
        stages = [progress for progress in seen if progress.stage == stage]
        assert [progress.num_done for progress in stages] == list(range(1, num_units + 1))
        assert stages[-1].num_records == 22 and stages[-1].num_units == num_units


def test_nothing_left_is_a_clear_error(tmp_path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(b"not an image")
    with pytest.raises(ValueError, match="no record is left") as caught:
        prepare(config_of(tmp_path / "images"), Location(str(tmp_path / "out")))
    assert "unknown_format" not in str(caught.value), "a private count is for the summary alone"
    assert SUMMARY_NAME in str(caught.value)


def test_storage_that_cannot_be_written_is_a_clear_error(tmp_path, image_folder) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    with pytest.raises(StorageFault, match="cannot read or write"):
        prepare(config_of(image_folder("images", 3)), Location(str(tmp_path / "file" / "out")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"visibility": "secret"}, "visibility"),
        ({"visibility": "private"}, "domain"),
        ({"domain": "d"}, "public dataset has no privacy domain"),
        ({"image_short_side": 0}, "image_short_side"),
        ({"jpeg_quality": 101}, "jpeg_quality"),
        ({"deduplicate": "fuzzy"}, "deduplicate"),
        ({"splits": {"train": 0.5}}, "add up to 1"),
        ({"splits": {"a/b": 1.0}}, "plain names"),
        ({"records_per_shard": 0}, "records_per_shard"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of("synthetic:textures?num_images=1&size=8", **changes)
