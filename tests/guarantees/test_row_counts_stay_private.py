"""Pitfalls 20 and 31: what Ray prints and logs while it feeds a private phase tells no count."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from phase_fixtures import make_phase, run
from pydantic import ValidationError

from pipeline.data.shards import ShardStore
from pipeline.data.stream import (
    StreamConfig,
    num_units_of_step,
    ray_unit_iterators,
    thread_pool_units,
    units_from_iterator,
)
from pipeline.privacy.sampling import PoissonPlan
from pipeline.storage import Location
from pipeline.training.checkpoint import latest_checkpoint, load_checkpoint
from pipeline.training.settings import PhaseSettings


def log_text(folder: Path) -> dict[Path, str]:
    return {path: path.read_text(errors="replace") for path in folder.rglob("ray-data*.log")}


@pytest.mark.ray
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


@pytest.mark.parametrize("world_size", [1, 2])
def test_constant_microbatches_hide_the_size_of_a_step(
    private_store: ShardStore, world_size: int
) -> None:
    """Every step has the units of mean + 6 sd, and still each record of the plan once."""
    fields: dict[str, Any] = {
        "plan": PoissonPlan(key=b"k" * 32, num_records=240, sampling_probability=0.2),
        "store_root": str(private_store.root),
        "augmentation_key": b"a" * 32,
        "world_size": world_size,
        "microbatch_size": 3,
        "microbatches_per_unit": 1,
        "image_size": 16,
        "num_steps": 40,
        "is_private": True,
    }
    plain, constant = StreamConfig(**fields), StreamConfig(**fields, is_constant=True)
    sizes = [len(plain.plan.record_ids(step)) for step in plain.steps]
    assert len({num_units_of_step(size, plain) for size in sizes}) > 3
    # mean 48, sd 6.1968: 48 + 37.18 -> 86 records, of which a rank has 86 or 43, 3 to a unit
    assert {num_units_of_step(size, constant) for size in sizes} == {29 if world_size == 1 else 15}
    assert num_units_of_step(200, constant) == num_units_of_step(200, plain), "nothing is cut off"
    short = replace(constant, num_steps=3)
    for step in short.steps:
        units = [
            unit
            for rank in range(world_size)
            for unit in thread_pool_units(short, rank, 1)
            if unit.step == step
        ]
        ids = np.concatenate([unit.record_ids[unit.record_ids >= 0] for unit in units])
        assert np.array_equal(np.sort(ids), short.plan.record_ids(step))
        assert sum(float(unit.weights.sum()) for unit in units) == len(ids)


def test_constant_microbatches_change_nothing_but_the_padding(
    settings: Callable[..., PhaseSettings], public_set: str, tmp_path: Path
) -> None:
    pinned: dict[str, Any] = {"seed": 7, "dataset_root": public_set, "domain": "public-some"}
    weights = []
    for is_constant in (False, True):
        name = f"constant-{is_constant}"
        phase = {"constant_microbatches": is_constant, "microbatch_size": 4}
        made = settings("private", run=name, phase=phase, output=str(tmp_path / name), **pinned)
        run(made)
        latest = latest_checkpoint(Location(made.output))
        assert latest is not None
        weights.append(load_checkpoint(latest).weights)
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=0, atol=1e-6, msg=name)


def test_constant_microbatches_are_for_private_phases(public_store: ShardStore) -> None:
    with pytest.raises(ValidationError, match="constant_microbatches is for private phases"):
        make_phase("public", constant_microbatches=True)
