"""Where the memory of a training step goes, with and without activation checkpointing.

    python benchmarks/memory.py --sizes base --sizes large --microbatch 2

Each row is a process of its own, on the CPU: one microbatch, then the release (or the mean) and the
AdamW step. "weights" is 4 bytes a parameter; between two steps stay the weights, the sum of
gradients and two moments, four times that. "microbatch" is how far the resident memory rises while
one is computed, "whole step" the peak over all, libraries included (about 400 MiB).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import click
import torch
from step import PeakMemory

from pipeline.dpsgd import (
    ClippedGradientSum,
    FlatClipping,
    ParameterLayout,
    public_gradient,
    release_gradient,
)
from pipeline.models.mae import MaskedAutoencoder
from pipeline.models.sizes import SIZES
from pipeline.privacy.keys import AttemptKey
from pipeline.privacy.noise import KeyedNoise
from pipeline.recipe import Optimizer
from pipeline.training.optimizers import make_optimizer, set_rate

MIB = 2**20


def measure(size: str, microbatch: int, *, is_private: bool, checkpoints: bool) -> dict[str, float]:
    """One step in this process, in MiB and CPU seconds of the microbatch."""
    patch_size = 14 if size == "huge" else 16
    model = MaskedAutoencoder(SIZES[size], image_size=224, patch_size=patch_size)
    model.checkpoints_activations = checkpoints
    layout = ParameterLayout.of(model)
    optimizer = make_optimizer(model.named_parameters(), Optimizer(learning_rate=1e-4))
    set_rate(optimizer, 1e-4)
    images = torch.randn(microbatch, 3, 224, 224)
    uniforms = torch.rand(microbatch, model.num_patches)
    engine = None
    if is_private:
        engine = ClippedGradientSum(
            model, FlatClipping(1.0), two_backwards=checkpoints, checks_independence=False
        )
        engine.flat_sum.fill_(0.0)  # so that it is resident
    else:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    memory = PeakMemory("cpu")
    before, started = memory.now(), time.process_time()
    if engine is not None:
        engine.accumulate(lambda: model(images, uniforms))
    else:
        model(images, uniforms).sum().backward()
    seconds, during = time.process_time() - started, memory.peak() - before
    if engine is not None:
        noise = KeyedNoise(noise_key=AttemptKey.seeded(0).noise_key())
        released = release_gradient(
            engine.flat_sum,
            step=0,
            noise_std=1.0,
            divisor=microbatch,
            noise_source=noise,
            layout=layout,
        )
        released.assign(model)
    else:
        flat = layout.flatten({name: p.grad for name, p in model.named_parameters()})
        public_gradient(flat, divisor=microbatch, layout=layout, is_public=True).assign(model)
    optimizer.step()
    return {
        "weights": 4 * layout.num_coordinates / MIB,
        "microbatch": during / MIB,
        "whole step": memory.peak() / MIB,
        "CPU s": seconds,
    }


@click.command()
@click.option("--sizes", multiple=True, default=["base"])
@click.option("--microbatch", default=2)
@click.option("--row", help="of one size, in this process: private or public, then +checkpointed")
def main(sizes: tuple[str, ...], microbatch: int, row: str | None) -> None:
    """Print the memory of a step in MiB."""
    if row is not None:
        is_private, checkpoints = row.startswith("private"), row.endswith("+checkpointed")
        found = measure(sizes[0], microbatch, is_private=is_private, checkpoints=checkpoints)
        print(json.dumps(found))
        return
    print("| step (MiB) | weights | microbatch | whole step | CPU s |\n|---|---|---|---|---|")
    for size in sizes:
        for kind in ("public", "public+checkpointed", "private", "private+checkpointed"):
            command = [sys.executable, __file__, "--sizes", size, "--row", kind]
            command += ["--microbatch", str(microbatch)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            *mebibytes, seconds = found.values()
            cells = [f"{size}, {kind}", *(f"{value:,.0f}" for value in mebibytes), f"{seconds:.1f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
