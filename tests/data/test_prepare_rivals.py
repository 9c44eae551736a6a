"""Two processes that prepare the same dataset at once: one result, and neither fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from phase_fixtures import write_images

from pipeline.data import prepare as prepare_package
from pipeline.data.prepare import PrepareConfig, prepare
from pipeline.data.shards import StorageFault
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
