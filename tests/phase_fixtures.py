"""Small prepared data sets, phase settings and ways to run them that tests share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import recipe
from pipeline.data.manifest import DatasetManifest
from pipeline.data.prepare import PrepareConfig, prepare
from pipeline.data.stream import DeliveryError, StreamConfig, Unit, thread_pool_units
from pipeline.privacy.mechanism import Mechanism
from pipeline.storage import Location
from pipeline.training.metrics import PublicMetrics
from pipeline.training.phase import PhaseOutcome, run_phase
from pipeline.training.ranks import Ranks
from pipeline.training.settings import PhaseSettings

NUM_RECORDS, BATCH_SIZE, IMAGE_SIZE, PATCH_SIZE = 120, 24, 16, 4
MODEL = recipe.Model(size="micro", image_size=IMAGE_SIZE, patch_size=PATCH_SIZE, norm_pix_loss=True)


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def write_images(folder: Path, seed: int, num_images: int = NUM_RECORDS) -> str:
    """Random smooth grey images as IDX files; returns their source URI."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (num_images, 5, 5))
    images = np.kron(coarse, np.ones((1, 4, 4)))[:, :18, :18]
    write_idx(folder / "some-images-idx3-ubyte", images)
    write_idx(folder / "some-labels-idx1-ubyte", rng.integers(0, 4, num_images))
    return f"idx:{folder}/some-images-idx3-ubyte"


def make_dataset(folder: Path, visibility: str, seed: int = 0) -> str:
    """A prepared data set; returns its folder."""
    is_private = visibility == "private"
    config = PrepareConfig(
        name=f"some-{visibility}",
        source=write_images(folder / "source", seed),
        visibility=visibility,  # type: ignore[arg-type]
        domain="some-domain" if is_private else None,
        ledger_home=str(folder / "domains") if is_private else None,
        image_short_side=32,
    )
    prepare(config, Location(str(folder / "data")), num_workers=1)
    return str(folder / "data")


@pytest.fixture(scope="session")
def public_set(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("public"), "public", seed=1)


@pytest.fixture(scope="session")
def prepared_private_set(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("private"), "private", seed=2)


@pytest.fixture
def private_set(prepared_private_set: str, tmp_path: Path) -> str:
    """The private set of one test, with a ledger of its own."""
    folder = tmp_path / "private-set"
    shutil.copytree(prepared_private_set, folder)
    manifest = DatasetManifest.load(Location(str(folder)))
    own = manifest.model_copy(update={"ledger_home": str(tmp_path / "domains")})
    own.save(Location(str(folder)))
    return str(folder)


def make_phase(kind: str, **changes: Any) -> recipe.Phase:
    fields: dict[str, Any] = {
        "name": "some",
        "kind": kind,
        "data": "some",
        "steps": 6,
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
        "microbatch_size": 8,
        "microbatches_per_unit": 2,
        "checkpoint_interval": 2,
        "crop_scale": (0.4, 1.0),
        "resources": {"device": "cpu"},
    }
    if kind == "private":
        fields["privacy"] = {
            "noise_multiplier": 1.0,
            "expected_batch_size": BATCH_SIZE,
            "reserve_steps": 4,
        }
    else:
        fields["batch_size"] = BATCH_SIZE
    return recipe.Phase.model_validate(fields | changes)


def make_mechanism(phase: recipe.Phase, **changes: Any) -> Mechanism:
    fields: dict[str, Any] = {
        "num_records": NUM_RECORDS,
        "expected_batch_size": BATCH_SIZE,
        "sampling_probability": BATCH_SIZE / NUM_RECORDS,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "num_steps": phase.steps,
        "reserve_steps": 4,
        "delta": 1e-3,
    }
    return Mechanism(**(fields | changes))


@pytest.fixture
def settings(tmp_path: Path, public_set: str, private_set: str) -> Callable[..., PhaseSettings]:
    """Makes the settings of a phase; keyword arguments change the phase or the settings."""

    def make(kind: str = "private", *, phase: dict[str, Any] | None = None, **changes: Any) -> Any:
        section = make_phase(kind, **(phase or {}))
        is_private = kind == "private"
        fields: dict[str, Any] = {
            "run": "some-run",
            "phase": section,
            "model": MODEL,
            "recipe_digest": "0" * 64,
            "mechanism": make_mechanism(section) if is_private else None,
            "dataset_root": private_set if is_private else public_set,
            "held_out_root": public_set,
            "output": str(tmp_path / "phase"),
            "init_from": None,
            "ledger_home": str(tmp_path / "domains") if is_private else None,
            "domain": "some-domain" if is_private else None,
            "private_log": str(tmp_path / "private-logs") if is_private else None,
        }
        return PhaseSettings(**(fields | changes))

    return make


class Crash(DeliveryError):
    """A planted failure."""


def units(config: StreamConfig) -> Iterator[Unit]:
    return thread_pool_units(config, 0, 1)


def run(
    settings: PhaseSettings, open_units: Callable[[StreamConfig], Iterator[Unit]] = units
) -> tuple[PhaseOutcome, list[PublicMetrics]]:
    """Run a phase in this process; returns how it ended and what it showed."""
    shown: list[PublicMetrics] = []
    ranks = Ranks(torch.device("cpu"))
    return run_phase(settings, ranks, open_units, shown.append), shown


def crash_at(step: int) -> Callable[[StreamConfig], Iterator[Unit]]:
    """A stream that dies when a step's images are asked for."""

    def open_units(config: StreamConfig) -> Iterator[Unit]:
        for unit in units(config):
            if unit.step == step:
                raise Crash
            yield unit

    return open_units
