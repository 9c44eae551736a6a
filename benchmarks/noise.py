"""How long the noise of a private step takes: seconds per 100 M values on one core, and where.

    python benchmarks/noise.py [--rounds 7] [--json FILE]

Sizes are those of the MAE; a step's share is the noise's CPU time over the CPU time of the *whole*
logical step of B images at the plain step's rate that is measured here on a few microbatches.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from pipeline.dpsgd.noise import NOISE_BLOCK, noise_grid
from pipeline.models.mae import MaskedAutoencoder
from pipeline.models.sizes import model_size, num_parameters
from pipeline.privacy.noise import CHUNK, KeyedNoise, _Scratch

NUM_VALUES = 100_000_000
LOGICAL_BATCH = 4_096


def timed(work: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """(median CPU seconds, their spread max - min, median wall seconds)."""
    cpu, wall = [], []
    for _ in range(rounds):
        start = time.process_time(), time.perf_counter()
        work()
        cpu.append(time.process_time() - start[0])
        wall.append(time.perf_counter() - start[1])
    return statistics.median(cpu), max(cpu) - min(cpu), statistics.median(wall)


def per_100m(seconds: float, num_values: int) -> float:
    """Seconds for 100 M values."""
    return seconds * NUM_VALUES / num_values


def measure_noise(rounds: int) -> list[dict[str, Any]]:
    """The whole draw, into fresh and reused arrays, and its parts, per 100 M values."""
    noise = KeyedNoise(noise_key=bytes(range(32)))
    values = np.empty(NOISE_BLOCK, np.float64)
    blocks = 8
    scratch = _Scratch()
    chunk = np.empty(CHUNK, np.float64)
    zeros = bytes(CHUNK * 8)
    key = algorithms.AES(bytes(32))
    grid = noise_grid(0.5)
    tensor = torch.from_numpy(values)

    def reused() -> None:
        for block in range(blocks):
            noise.gaussian(0, block * NOISE_BLOCK, (block + 1) * NOISE_BLOCK, out=values)

    def fresh() -> None:
        for block in range(blocks):
            noise.gaussian(0, block * NOISE_BLOCK, (block + 1) * NOISE_BLOCK)

    def keystream() -> None:
        for index in range(64):
            counter = (index << 64).to_bytes(16, "big")
            Cipher(key, modes.CTR(counter)).encryptor().update_into(zeros, scratch.bytes)

    def normals() -> None:
        for _ in range(64):
            scratch.box_muller(chunk)

    def add_and_round() -> None:
        tensor.mul_(0.5).add_(0.1).div_(grid).round_().mul_(grid)

    parts: list[tuple[str, Callable[[], None], int]] = [
        ("noise, reused array", reused, blocks * NOISE_BLOCK),
        ("noise, fresh array", fresh, blocks * NOISE_BLOCK),
        ("of it: AES-256-CTR", keystream, 64 * CHUNK),
        ("of it: uniform to normal", normals, 64 * CHUNK),
        ("add to the sum and round (release)", add_and_round, NOISE_BLOCK),
    ]
    rows = []
    for name, work, count in parts:
        work()
        cpu, spread, wall = timed(work, rounds)
        rows.append(
            {
                "part": name,
                "cpu_seconds": per_100m(cpu, count),
                "spread_seconds": per_100m(spread, count),
                "wall_seconds": per_100m(wall, count),
            }
        )
    return rows


def measure_share(size_name: str, seconds_per_100m: float, rounds: int) -> dict[str, Any]:
    """The noise's CPU time over that of a plain logical step of LOGICAL_BATCH images."""
    size, microbatch = model_size(size_name), 8
    model = MaskedAutoencoder(size, image_size=224, patch_size=16)
    model.initialise(torch.Generator().manual_seed(0))
    images = torch.randn(microbatch, 3, 224, 224)
    uniforms = torch.rand(microbatch, model.num_patches)

    def plain() -> None:
        model(images, uniforms).mean().backward()
        model.zero_grad(set_to_none=True)

    plain()
    cpu, _, _ = timed(plain, rounds)
    step = cpu * LOGICAL_BATCH / microbatch
    count = num_parameters(size, 224, 16)
    drawn = seconds_per_100m * count / NUM_VALUES
    return {
        "size": size_name,
        "num_parameters": count,
        "noise_seconds": drawn,
        "plain_step_seconds": step,
        "share": drawn / step,
    }


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--sizes", multiple=True, default=("nano", "base"), show_default=True)
@click.option("--json", "json_file", metavar="FILE")
def main(rounds: int, sizes: tuple[str, ...], json_file: str | None) -> None:
    """Print the two tables; one thread."""
    torch.set_num_threads(1)
    rows = measure_noise(rounds)
    print("| part | CPU s per 100 M values | spread | wall s |\n|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['part']} | {row['cpu_seconds']:.2f} | {row['spread_seconds']:.2f} | "
            f"{row['wall_seconds']:.2f} |"
        )
    drawn = rows[0]["cpu_seconds"]
    shares = [measure_share(size, drawn, max(3, rounds // 2)) for size in sizes]
    print(f"\n| size | parameters | noise s | plain step of {LOGICAL_BATCH:,} images, s | share |")
    print("|---|---|---|---|---|")
    for share in shares:
        print(
            f"| {share['size']} | {share['num_parameters'] / 1e6:.2f} M | "
            f"{share['noise_seconds']:.2f} | {share['plain_step_seconds']:.0f} | "
            f"{100 * share['share']:.2f} % |"
        )
    if json_file:
        with open(json_file, "w") as file:
            json.dump({"noise": rows, "shares": shares}, file, indent=1)


if __name__ == "__main__":
    main()
