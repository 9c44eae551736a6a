"""Location: local paths and URIs, whole-file atomic writes, listing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.storage import Location


def test_relative_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = Location("a/b/")
    monkeypatch.chdir("/")
    assert place.local_path == tmp_path / "a" / "b"
    assert Location("~/x").local_path == Path.home() / "x"
    assert Location("s3://bucket/key/").uri == "s3://bucket/key"
    assert not Location("s3://bucket").is_local


def test_write_read_list_delete(tmp_path: Path) -> None:
    root = Location(str(tmp_path / "has space ü"))
    (root / "b" / "two").write_text("2")
    (root / "a").write_bytes(b"1")
    assert (root / "a").read_bytes() == b"1" and (root / "b" / "two").read_text() == "2"
    assert [p.name for p in root.list()] == ["a", "b"]
    assert [p.name for p in root.list(recursive=True)] == ["a", "b", "two"]
    (root / "b").delete()
    (root / "b").delete()
    assert not (root / "b").exists() and (root / "nothing").list() == []
    with pytest.raises(FileNotFoundError):
        (root / "nothing").read_bytes()


def test_a_failed_write_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Location(str(tmp_path / "file"))
    place.write_text("old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        place.write_text("new")
    assert place.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]
