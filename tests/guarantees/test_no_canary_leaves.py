"""PITFALLS 20 and 31, end to end: a whole run on Ray workers, and every place it writes or prints.

Canaries are planted in pictures, labels, file names and bytes; the losses, norms and durations that
the run itself put into its private log are canaries too. Searched: terminal, run folder
(checkpoints, TensorBoard, export, report), ledgers, Ray's session folder, command lines of all its
processes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import yaml
from phase_fixtures import write_images
from PIL import Image

ROOT = Path(__file__).parents[2]
WORD = "kanarie"
NUM_IMAGES = 160

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """A short path (Ray puts sockets there), gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="dpp-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def write_private_folder(folder: Path) -> set[bytes]:
    """Noise pictures with telling names; returns byte strings that only they contain."""
    rng = np.random.default_rng(99)
    canaries = {WORD.encode()}
    for index in range(NUM_IMAGES):
        pixels = rng.integers(0, 256, (18, 18, 3), dtype=np.uint8)
        path = folder / f"label-{WORD}-{index % 3}" / f"{WORD}-{index:04d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path, pnginfo=None)
        canaries |= {pixels[3].tobytes()[:24], path.read_bytes()[60:100]}
    return canaries


def write_recipe(folder: Path) -> Path:
    optimizer = {"learning_rate": 1e-3, "warmup_steps": 1}
    content = {
        "name": "searched",
        "storage": str(folder / "storage"),
        "data": {
            "photos": {
                "source": f"imagefolder:{folder / 'photos'}",
                "visibility": "private",
                "domain": "photos",
                "image_short_side": 16,
            },
            "benchmark": {
                "source": write_images(folder / "public", seed=6, num_images=120),
                "visibility": "public",
                "image_short_side": 16,
                "splits": {"probe": 0.5, "score": 0.5},
            },
        },
        "model": {"size": "micro", "image_size": 16, "patch_size": 4},
        "phases": [
            {
                "name": "private",
                "kind": "private",
                "data": "photos",
                "held_out": "benchmark.probe",
                "steps": 4,
                "optimizer": optimizer,
                "privacy": {"target_epsilon": 8, "expected_batch_size": 20},
                "checkpoint_interval": 2,
                "microbatch_size": 8,
                "resources": {"device": "cpu", "workers": 2, "data_cpus": 2},
            },
        ],
        "evaluation": {
            "train": "benchmark.probe",
            "test": "benchmark.score",
            "shots": 2,
            "draws": 2,
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def numbers_of(log: Path) -> set[bytes]:
    """Every float of a private log, as it would be written elsewhere.

    A ratio of small counts, such as 1/6, is no canary: a public accuracy may well be the same.
    """
    found: set[bytes] = set()
    for line in log.read_text().splitlines():
        for value in json.loads(line).values():
            values = value if isinstance(value, list) else [value]
            floats = [v for v in values if isinstance(v, float) and math.isfinite(v)]
            found |= {repr(v).encode() for v in floats if not _is_small_ratio(v)}
    return {text for text in found if len(text) > 7}


def _is_small_ratio(value: float) -> bool:
    return abs(float(Fraction(value).limit_denominator(1000)) - value) < 1e-15


class CommandLines(threading.Thread):
    """Collects the command lines of all processes that mention a folder, while it runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder, self._stop_now = os.fsencode(folder), threading.Event()
        self.seen: set[bytes] = set()

    def run(self) -> None:
        while not self._stop_now.wait(0.2):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    line = (process / "cmdline").read_bytes()
                except OSError:
                    continue
                if self._folder in line:
                    self.seen.add(line)

    def finish(self) -> set[bytes]:
        self._stop_now.set()
        self.join()
        return self.seen


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_no_canary_leaves(tmp_path: Path, ray_folder: Path) -> None:
    (tmp_path / "photos").mkdir()
    canaries = write_private_folder(tmp_path / "photos")
    recipe = write_recipe(tmp_path)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": str(ray_folder),
    }
    lines = CommandLines(ray_folder)
    lines.start()
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "run", str(recipe)],
        env=environment,
        capture_output=True,
        timeout=300,
        check=False,
    )
    commands = lines.finish()
    assert done.returncode == 0, done.stderr.decode()[-2000:]

    storage = tmp_path / "storage"
    logs = sorted((storage / "private").glob("*.jsonl"))
    assert len(logs) == 2, "one private log a rank"
    private_numbers = set().union(*(numbers_of(log) for log in logs))
    assert len(private_numbers) > 15
    canaries |= private_numbers

    places: dict[str, bytes] = {"stdout": done.stdout, "stderr": done.stderr}
    places |= {f"command {index}": line for index, line in enumerate(sorted(commands))}
    kept_apart = (storage / "private", *(storage / "data").glob("photos-*"))
    for folder in (storage, ray_folder):
        for path in folder.rglob("*"):
            if path.is_file() and not any(apart in path.parents for apart in kept_apart):
                places[str(path)] = path.read_bytes()
    for part in ("checkpoint.json", "tfevents", "report.html", "privacy.json", "worker-", "gcs"):
        assert any(part in place for place in places), f"{part} was not searched"
    assert len(commands) > 3
    found = {
        (place, canary)
        for place, content in places.items()
        for canary in canaries
        if canary in content
    }
    assert not found
