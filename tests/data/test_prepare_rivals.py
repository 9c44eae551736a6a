"""Two processes that prepare the same dataset at once: one result, and neither fails."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from phase_fixtures import write_images

from pipeline.data import prepare as prepare_package
from pipeline.data.prepare import PrepareConfig, prepare
from pipeline.data.shards import (
    INDEX_NAME,
    INDEX_SCHEMA,
    SOURCES_NAME,
    SOURCES_SCHEMA,
    ShardStore,
    StorageFault,
    TableWriter,
)
from pipeline.storage import Location


def config_of(folder: Path) -> PrepareConfig:
    source = write_images(folder / "source", seed=3, num_images=40)
    return PrepareConfig(name="some", source=source, visibility="public", image_short_side=32)


@pytest.mark.parametrize("fault", [FileNotFoundError("gone"), StorageFault("gone")])
def test_the_slower_one_takes_what_the_faster_one_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    config, destination = config_of(tmp_path), Location(str(tmp_path / "data"))
    original = prepare_package._read_all

    def overtaken(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(prepare_package, "_read_all", original)
        prepare(config, destination, num_workers=1)
        raise fault

    monkeypatch.setattr(prepare_package, "_read_all", overtaken)
    manifests = prepare(config, destination, num_workers=1)
    assert manifests[""].num_records == 40
    assert prepare(config, destination) == manifests


def test_a_fault_without_a_rival_stays_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_package, "_read_all", fail)
    with pytest.raises(StorageFault, match="has room"):
        prepare(config_of(tmp_path), Location(str(tmp_path / "data")), num_workers=1)


@pytest.mark.parametrize("name", [INDEX_NAME, SOURCES_NAME])
def test_an_unfinished_rival_does_not_cut_off_a_finished_table(tmp_path: Path, name: str) -> None:
    """The slower process opened its tables, then failed: those of the faster one stay whole."""
    config, destination = config_of(tmp_path), Location(str(tmp_path / "data"))
    prepare(config, destination, num_workers=1)
    before = (destination / name).read_bytes()
    schema = INDEX_SCHEMA if name == INDEX_NAME else SOURCES_SCHEMA
    unfinished = TableWriter(destination / name, schema)
    assert (destination / name).read_bytes() == before
    ShardStore(str(destination)).check_files()
    del unfinished


def test_processes_at_once_leave_a_whole_dataset(tmp_path: Path) -> None:
    """Real processes, started together: the data verifies whoever was first."""
    config = config_of(tmp_path)
    for attempt in range(4):
        destination = str(tmp_path / f"data-{attempt}")
        rivals = [
            multiprocessing.get_context("spawn").Process(
                target=prepare, args=(config, Location(destination)), kwargs={"num_workers": 1}
            )
            for _ in range(2)
        ]
        for rival in rivals:
            rival.start()
        for rival in rivals:
            rival.join(120)
        assert [rival.exitcode for rival in rivals] == [0, 0]
        ShardStore(destination).check_files()
