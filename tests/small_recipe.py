"""A recipe of seconds (synthetic warm-up, private phase, probe) and the command line to run it."""

from __future__ import annotations

from pathlib import Path

import yaml
from click.testing import CliRunner
from phase_fixtures import write_images

from pipeline.cli import main


def write_small_recipe(folder: Path) -> Path:
    """Writes images and recipe into a folder; its storage is `folder/storage`."""
    private = write_images(folder / "private", seed=5, num_images=200)
    public = write_images(folder / "public", seed=6, num_images=160)
    optimizer = {"learning_rate": 1e-3, "warmup_steps": 2}
    content = {
        "name": "small",
        "storage": str(folder / "storage"),
        "data": {
            "synthetic": {
                "source": "synthetic:dead_leaves+textures?num_images=96&size=16&seed=0",
                "visibility": "public",
                "num_records": 96,
                "image_short_side": 16,
            },
            "private": {
                "source": private,
                "visibility": "private",
                "domain": "small-domain",
                "num_records": 200,
                "image_short_side": 16,
            },
            "benchmark": {
                "source": public,
                "visibility": "public",
                "image_short_side": 16,
                "splits": {"probe": 0.5, "score": 0.5},
            },
        },
        "model": {"size": "micro", "image_size": 16, "patch_size": 4, "norm_pix_loss": True},
        "phases": [
            {
                "name": "warmup",
                "kind": "public",
                "data": "synthetic",
                "steps": 6,
                "batch_size": 32,
                "optimizer": optimizer,
                "checkpoint_interval": 3,
                "microbatch_size": 16,
                "resources": {"device": "cpu"},
            },
            {
                "name": "private",
                "kind": "private",
                "data": "private",
                "held_out": "benchmark.probe",
                "steps": 8,
                "optimizer": optimizer,
                "privacy": {"target_epsilon": 8, "expected_batch_size": 20},
                "checkpoint_interval": 2,
                "microbatch_size": 16,
                "resources": {"device": "cpu"},
            },
        ],
        "evaluation": {
            "train": "benchmark.probe",
            "test": "benchmark.score",
            "shots": 3,
            "draws": 2,
        },
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def dp_pretrain(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output
