"""A data task that is killed or fails, an object store that is full: the proof of every step holds,
or the run stops in words that name nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data import stream
from pipeline.data.shards import ShardStore, StorageFault
from pipeline.data.stream import StreamConfig, ray_unit_iterators, units_from_iterator
from pipeline.privacy.sampling import PoissonPlan, checksum

pytestmark = pytest.mark.ray
SECRET = "record 1234567 of uploader X"


def config_of(store: ShardStore, **changes: Any) -> StreamConfig:
    fields: dict[str, Any] = {
        "plan": PoissonPlan(key=b"t" * 32, num_records=240, sampling_probability=0.2),
        "store_root": str(store.root),
        "augmentation_key": b"a" * 32,
        "world_size": 1,
        "microbatch_size": 8,
        "microbatches_per_unit": 1,
        "image_size": 16,
        "num_steps": 4,
        "is_private": True,
    }
    return StreamConfig(**{**fields, **changes})


def assert_proved(config: StreamConfig, units: list[stream.Unit]) -> None:
    for step in config.steps:
        ids = config.plan.record_ids(step)
        receipts = np.array([unit.receipt() for unit in units if unit.step == step])
        assert receipts[:, 0].sum() == len(ids)
        assert receipts[:, 1].sum() % 2**62 == checksum(ids)


def test_a_killed_task_is_run_again(
    ray_local: None, private_store: ShardStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = str(tmp_path / "killed")

    class Dying(stream._FetchTask):
        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            if int(batch["step"][0]) == 2 and not os.path.exists(mark):
                open(mark, "w").close()
                os._exit(137)
            return super().__call__(batch)

    monkeypatch.setattr(stream, "_FetchTask", Dying)
    config = config_of(private_store)
    (iterator,) = ray_unit_iterators(config, num_cpus=2)
    units = list(units_from_iterator(iterator, config, 0))
    assert os.path.exists(mark), "a worker process died"
    assert_proved(config, units)


@pytest.mark.parametrize("where", ["plan", "fetch"])
def test_what_a_task_raises_reaches_no_log(
    ray_local: None, private_store: ShardStore, monkeypatch, capfd, where: str
) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError(SECRET)

    class FailingPlan(stream._PlanTask):
        _num_units = fail

    class FailingFetch(stream._FetchTask):
        _unit = fail

    name, failing = ("_PlanTask", FailingPlan) if where == "plan" else ("_FetchTask", FailingFetch)
    monkeypatch.setattr(stream, name, failing)
    config = config_of(private_store)
    (iterator,) = ray_unit_iterators(config, num_cpus=2)
    with pytest.raises(StorageFault, match=r"^a data task failed$") as caught:
        list(units_from_iterator(iterator, config, 0))
    assert SECRET in caught.value.private_detail
    printed = "".join(capfd.readouterr())
    assert not re.search("1234567|uploader|Traceback", printed)


FULL = """
import sys
import ray
from pipeline.data.shards import ShardStore
from pipeline.data.stream import ray_unit_iterators, units_from_iterator
sys.path.insert(0, sys.argv[2])
from test_data_task_faults import assert_proved, config_of

ray.init(
    address="local", num_cpus=6, include_dashboard=False, object_store_memory=80 * 2**20,
    log_to_driver=False, logging_level="ERROR",
)
config = config_of(ShardStore(sys.argv[1]), image_size=512, microbatch_size=24, num_steps=6)
(iterator,) = ray_unit_iterators(config, num_cpus=2)
units, num_bytes = [], 0
for unit in units_from_iterator(iterator, config, 0):
    num_bytes += unit.images.nbytes
    units.append(unit)
assert num_bytes > 2 * 80 * 2**20, num_bytes
assert_proved(config, units)
print("proved")
"""


@pytest.mark.slow
def test_more_than_the_object_store_holds_still_arrives(private_store: ShardStore) -> None:
    """More than twice its size, kept by the reader as copies: tasks wait, or Ray spills."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", FULL, str(private_store.root), here]
    paths = os.pathsep.join([str(Path(here).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "proved" in done.stdout
