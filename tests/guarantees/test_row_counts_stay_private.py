"""Pitfalls 20 and 31: what Ray prints and logs while it feeds a private phase tells no count."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.data.shards import ShardStore
from pipeline.data.stream import StreamConfig, ray_unit_iterators, units_from_iterator
from pipeline.privacy.sampling import PoissonPlan

pytestmark = pytest.mark.ray


def log_text(folder: Path) -> dict[Path, str]:
    return {path: path.read_text(errors="replace") for path in folder.rglob("ray-data*.log")}


def test_ray_tells_no_number_of_rows_or_units(ray_local, private_store: ShardStore, capfd) -> None:
    import ray

    key = bytes(range(100, 132))
    config = StreamConfig(
        plan=PoissonPlan(key=key, num_records=240, sampling_probability=0.3),
        store_root=str(private_store.root),
        augmentation_key=key[::-1],
        world_size=1,
        microbatch_size=5,
        microbatches_per_unit=1,
        image_size=16,
        num_steps=5,
        is_private=True,
    )
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    before = log_text(session / "logs")
    (iterator,) = ray_unit_iterators(config, num_cpus=2)
    num_units = len(list(units_from_iterator(iterator, config, 0)))
    assert num_units > 20
    printed = "".join(capfd.readouterr())
    logged = "".join(
        text.removeprefix(before.get(path, "")) for path, text in log_text(session / "logs").items()
    )
    for text in (printed, logged):
        assert not re.search(r"\brows?\b|num_output|dispatched", text)
        assert not re.search(rf"\b{num_units}\b", re.sub(r"\d\d:\d\d:\d\d,\d+|pid=\d+", "", text))
        assert repr(key) not in text and key.hex() not in text
