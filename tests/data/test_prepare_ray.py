"""prepare as Ray Data tasks: the same bytes as on threads; faults without a traceback of Ray's."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.prepare import PrepareConfig, PrepareProgress, prepare
from pipeline.data.shards import StorageFault
from pipeline.storage import Location

pytestmark = pytest.mark.ray


def files_of(folder: Path) -> dict[str, bytes]:
    """All files but the splits' ids, which are drawn anew by every preparation."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.name != "split.json"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def config_of(folder: Path, **changes) -> PrepareConfig:
    return PrepareConfig(
        name="photos",
        source=f"imagefolder:{folder}",
        visibility="private",
        domain="d",
        image_short_side=32,
        records_per_shard=9,
        splits={"train": 0.8, "held_out": 0.2},
        **changes,
    )


def test_same_bytes_as_on_threads(ray_local, tmp_path, image_folder, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.data.sources.imagefolder.FILES_PER_UNIT", 10)
    folder = image_folder("images", 45)
    (folder / "a" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 nothing")
    config = config_of(folder)
    seen: list[PrepareProgress] = []
    out = Location(str(tmp_path / "ray"))
    by_ray = prepare(config, out, seen.append, executor="ray", num_workers=2)
    by_threads = prepare(config, Location(str(tmp_path / "threads")), num_workers=2)
    assert by_ray == by_threads
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "threads")
    assert [p.num_done for p in seen if p.stage == "reading"] == [1, 2, 3, 4, 5]


def test_storage_that_fails_inside_a_task(ray_local, tmp_path, image_folder, capfd) -> None:
    (tmp_path / "file").write_bytes(b"in the way")
    config = config_of(image_folder("images", 3))
    with pytest.raises(StorageFault, match="could not read or write storage"):
        prepare(config, Location(str(tmp_path / "file" / "out")), executor="ray")
    assert "Traceback" not in "".join(capfd.readouterr())
